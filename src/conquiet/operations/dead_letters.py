"""Dead letters of streams, files, queues, logs and brokers: find, show, replay and drop them.

    letters ──filter──▶ found ──replay──▶ published where it came from ──▶ then removed here
                          └────drop───▶ removed

A replayed message keeps its event id, so that an inbox still knows it. It is published first and
removed afterwards: after a crash, a letter is in one place or in both, never in none.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from conquiet import attempts
from conquiet.attempts import FailedAttempt
from conquiet.codec import from_json
from conquiet.config import DATABASES
from conquiet.errors import ConquietError, InvalidMessage, NotFound, StoreError
from conquiet.middleware import dead_letter
from conquiet.operations.text import as_text, whole
from conquiet.sink import Sink

Progress: TypeAlias = Callable[[int], object]
"""Called with the number of letters that are done."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that failed for good, and the reason."""

    id: str
    """Its position: an entry id, or the number of a line."""
    event_id: str
    event_type: str
    source: str
    reason: str
    traceback: str
    attempts: int
    time: str
    """When it became a dead letter."""
    handler: str
    topic: str
    stream: str
    """The stream it came from, if that is known; `entry` is the entry there."""
    entry: str
    attributes: Mapping[str, str]
    """The attributes of the message, as it was."""
    data: str
    data_is_base64: bool
    errors: tuple[FailedAttempt, ...] = ()
    """The errors of its attempts, the oldest first, if it waited for later ones."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects letters that meet all its conditions; `type` and `source` may have * and ?.

    >>> Filter(type="order.*", error="timeout").type
    'order.*'
    """

    ids: tuple[str, ...] = ()
    """Of letters, or of events."""
    type: str = ""
    source: str = ""
    error: str = ""
    """A part of the reason or of the traceback; case does not matter."""
    since: datetime | None = None
    until: datetime | None = None
    after: str = ""
    """The id of the last letter of the previous page."""
    cause: str = ""
    """As `cause_of` returns it."""

    def matches(self, letter: Letter) -> bool:
        if self.after and _place(letter.id) <= _place(self.after):
            return False
        if self.ids and letter.id not in self.ids and letter.event_id not in self.ids:
            return False
        if self.type and not fnmatchcase(letter.event_type, self.type):
            return False
        if self.source and not fnmatchcase(letter.source, self.source):
            return False
        if self.cause and cause_of(letter) != self.cause:
            return False
        text = f"{letter.reason}\n{letter.traceback}".lower()
        return self.error.lower() in text and self._matches_time(letter.time)

    def _matches_time(self, time: str) -> bool:
        if self.since is None and self.until is None:
            return True
        try:
            at = datetime.fromisoformat(time)
        except ValueError:  # a letter without a time is not between two moments
            return False
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return not (self.since and at < self.since) and not (self.until and at > self.until)


_particular = re.compile(
    r"""'[^']*'|"[^"]*"|\b0x[0-9a-f]+\b|\b[0-9a-f]{8}-[0-9a-f-]{27}\b"""
    # From the beginning of a word alone: a long one without digits would be tried at each letter.
    r"""|(?<![\w-])[\w-]*\d[\w.,:+-]*""",
    re.I,
)
_CAUSE_CHARS = 160


def cause_of(letter: Letter) -> str:
    """Return what letters of one cause have in common: the reason without what is particular.

    >>> letter = letter_of("1-0", {"deadreason": "LookupError: no customer c-17 in 'shop'"}, b"")
    >>> cause_of(letter)
    'LookupError: no customer … in …'
    """
    lines = letter.reason.strip().splitlines()
    return _particular.sub("…", lines[0])[:_CAUSE_CHARS] if lines else "no reason given"


@dataclass(frozen=True, slots=True)
class Cause:
    """The letters of one cause."""

    text: str
    count: int
    first: str
    """When the oldest of them died."""
    last: str
    types: tuple[str, ...]
    handlers: tuple[str, ...]
    example: Letter
    """The newest of them, without its data."""


def group_by_cause(
    letters: Letters, filter_: Filter | None = None, limit: int = 10_000
) -> list[Cause]:
    """Return the causes of up to `limit` letters, the most frequent first."""
    found: dict[str, list[Letter]] = {}
    for letter, _ in islice(_find(letters, filter_ or Filter(), brief=True), limit):
        slim = replace(letter, data="", attributes={}, traceback="")
        found.setdefault(cause_of(letter), []).append(slim)
    causes = [
        Cause(
            text,
            len(some),
            min(letter.time for letter in some),
            max(letter.time for letter in some),
            tuple(sorted({letter.event_type for letter in some if letter.event_type})),
            tuple(sorted({letter.handler for letter in some if letter.handler})),
            some[-1],
        )
        for text, some in found.items()
    ]
    return sorted(causes, key=lambda cause: -cause.count)


class Letters(Protocol):
    """A place that holds dead letters: a stream, a file, a queue of Kombu."""

    name: str

    def exists(self) -> bool:
        """Return whether the place exists; a stream is created by its first letter."""

    def scan(self, filter_: Filter, *, brief: bool = False) -> Iterator[tuple[Letter, Any]]:
        """Yield the letters there are now, the oldest first, each with the data for `send`.

        With `brief`, long data may be cut, and must not be sent. May skip letters that the filter
        excludes; callers apply the filter to the others.
        """

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        """Publish the message where it came from, or `to`, then remove the letter.

        False if the letter is gone. Raises `ConquietError` if this one cannot be sent.
        """

    def remove(self, letter: Letter, raw: Any) -> bool:
        """Remove a letter; False if it is gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A letter that could not be replayed, and is kept."""

    id: str
    event_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The letters that a replay or a drop processed, or in a dry run would process."""

    done: tuple[str, ...]
    """Ids of the letters."""
    failed: tuple[Failure, ...]
    dry_run: bool


def open_letters(
    place: str, client: Any = None, *, prefix: str = "", sink: Sink | None = None
) -> Letters:
    """Open a place by its name: a Redis Stream, `file:PATH`, `kombu:QUEUE`, or a URL.

    The URL is that of a `LogSource`: `postgresql://HOST/NAME?topic=…&group=…`, `sqlite:///FILE?…`,
    or that of a dead letter queue: `amqp://…?queue=NAME`, `kafka://…?topic=NAME`, `sqs://…/NAME`.
    `client` is a Redis client, `prefix` the `global_keyprefix` of a Kombu application; `sink`
    receives the messages that are replayed from a file.
    """
    kind, colon, rest = place.partition(":")
    if colon and kind == "file":
        from conquiet.registry import file_path

        return FileLetters(file_path(place), sink)
    if colon and kind.partition("+")[0] in DATABASES:
        from conquiet.operations.log_groups import open_log_letters

        return open_log_letters(place)
    if colon and rest.startswith("//") and kind in ("amqp", "amqps", "kafka", "sqs"):
        from conquiet.operations.brokers import BrokerLetters

        return BrokerLetters(place)
    if colon and kind == "kombu":
        from conquiet.operations.dead_letter_queues import KombuLetters

        return KombuLetters(client, rest, prefix)
    from conquiet.operations.dead_letter_streams import StreamLetters

    return StreamLetters(client, place)


def list_streams(client: Any, pattern: str = "*") -> dict[str, int]:
    """Return the streams that hold dead letters, and their lengths."""
    from conquiet.operations.dead_letter_streams import list_streams

    return list_streams(client, pattern)


def find(
    letters: Letters, filter_: Filter | None = None, limit: int = 100, *, brief: bool = False
) -> list[Letter]:
    """Return up to `limit` letters, the oldest first; with `brief`, long data may be cut.

    >>> from conquiet.operations import dead_letters
    >>> letters = dead_letters.open_letters("dead-letters", client)
    >>> dead_letters.find(letters, dead_letters.Filter(type="order.*"))
    []
    """
    found: list[Letter] = []
    for letter, _ in _find(letters, filter_ or Filter(), brief):
        found.append(letter)
        if len(found) == limit:
            break
    return found


def show(letters: Letters, id_: str) -> Letter:
    """Return one letter by its own id or by its event's; raise `NotFound` if there is none."""
    for found in find(letters, Filter((id_,)), 1, brief=True):
        for letter, _ in _find(letters, Filter((found.id,)), brief=False):
            if letter.id == found.id:
                return letter
    raise NotFound(f"no dead letter {id_!r:.100} in {letters.name}; dead-letters list shows them")


def replay(
    letters: Letters,
    filter_: Filter,
    *,
    to: str | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Publish the messages of letters again; a letter that cannot be published is kept."""
    return _each(
        letters,
        filter_,
        lambda letter, raw: letters.send(letter, raw, to),
        limit,
        dry_run,
        progress,
    )


def drop(
    letters: Letters,
    filter_: Filter,
    *,
    among: Collection[str] | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Delete letters for good; only those of the ids `among`, such as a dry run returned."""

    def remove(letter: Letter, raw: Any) -> bool:
        return (among is None or letter.id in among) and letters.remove(letter, raw)

    return _each(letters, filter_, remove, limit, dry_run, progress)


def _each(
    letters: Letters,
    filter_: Filter,
    act: Callable[[Letter, Any], bool],
    limit: int | None,
    dry_run: bool,
    progress: Progress | None,
) -> Outcome:
    done: list[str] = []
    failed: list[Failure] = []
    for letter, raw in _find(letters, filter_, dry_run):
        if limit is not None and len(done) + len(failed) == limit:
            break
        try:
            if dry_run or act(letter, raw):
                done.append(letter.id)
        except StoreError as error:  # the others would fail too, and are unchanged
            raise StoreError(f"{error}; {len(done)} letters were processed before that") from error
        except ConquietError as error:
            failed.append(Failure(letter.id, letter.event_id, str(error)))
        if progress is not None:
            progress(len(done) + len(failed))
    return Outcome(tuple(done), tuple(failed), dry_run)


def _find(letters: Letters, filter_: Filter, brief: bool) -> Iterator[tuple[Letter, Any]]:
    found = letters.scan(filter_, brief=brief)
    return ((letter, raw) for letter, raw in found if filter_.matches(letter))


def letter_of(
    id_: str, attributes: Mapping[str, Any], data: bytes, *, time: str = "", extra: str = ""
) -> Letter:
    """Build a letter from a CloudEvent with the attributes of the `DeadLetter` middleware."""
    about = {name: str(attributes.get(name, "")) for name in _ABOUT}
    original = {n: str(v) for n, v in attributes.items() if n not in _ABOUT}
    text, is_base64 = as_text(data)
    return Letter(
        id_,
        original.get("id", ""),
        original.get("type", ""),
        original.get("source", ""),
        about[dead_letter.REASON],
        _lines(about[dead_letter.TRACEBACK]),
        whole(about[dead_letter.ATTEMPTS]),
        about[dead_letter.TIME] or time,
        about[dead_letter.HANDLER],
        about[dead_letter.TOPIC],
        about[dead_letter.STREAM],
        about[dead_letter.ENTRY],
        original,
        text,
        is_base64,
        attempts.read(about[dead_letter.ERRORS]),
    )


_ABOUT = frozenset(
    (
        *(dead_letter.REASON, dead_letter.HANDLER, dead_letter.ATTEMPTS, dead_letter.TRACEBACK),
        *(dead_letter.TIME, dead_letter.TOPIC, dead_letter.ERRORS, dead_letter.ATTRIBUTES),
        *(dead_letter.STREAM, dead_letter.ENTRY),
    )
)


def _place(id_: str) -> tuple[int, ...]:
    """Parse an entry id or the number of a line, for comparison."""
    return tuple(whole(part) for part in id_.split("-"))


def _lines(traceback: str) -> str:
    """Restore line breaks, which the middleware escapes: CloudEvents has no control characters."""
    return traceback if "\n" in traceback else traceback.replace("\\n", "\n")


# --- files ----------------------------------------------------------------------------------


class _Line(NamedTuple):
    """The offset of a line in the file, and its text when it was read."""

    offset: int
    text: bytes


class FileLetters:
    """The letters of a file of JSON lines, as `conquiet worker run --dead-letters` writes it.

    A worker may append to the file at any time, so it is never rewritten: a line that was replayed
    or dropped is overwritten by spaces, which readers of JSON lines skip. Line numbers stay. `sink`
    receives replayed messages.
    """

    def __init__(self, path: str | os.PathLike[str], sink: Sink | None = None) -> None:
        self.path = Path(path)
        self.name = f"file {str(self.path)!r}"
        self._sink = sink

    def exists(self) -> bool:
        return self.path.exists()

    def scan(self, filter_: Filter, *, brief: bool = False) -> Iterator[tuple[Letter, Any]]:
        try:
            with self.path.open("rb") as lines:
                end = os.fstat(lines.fileno()).st_size
                offset, number = 0, 0
                while offset < end:
                    text = lines.readline()
                    number += 1
                    if text.strip():
                        yield _letter(number, text), _Line(offset, text)
                    offset += len(text)
        except FileNotFoundError:
            raise NotFound(f"{self.name}: does not exist") from None
        except OSError as error:
            raise StoreError(f"{self.name}: {error.strerror}") from error

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        if self._sink is None:
            raise ConquietError(f"line {letter.id}: name the sink with --to")
        message = dead_letter.replay(from_json(raw.text))
        for name in (dead_letter.STREAM, dead_letter.ENTRY):
            message.attributes.pop(name, None)
        if to is not None:
            message.topic = to
        with self._lock() as file:
            if os.pread(file, len(raw.text), raw.offset) != raw.text:
                return False
            [answer] = self._sink.publish_each([message])
            if answer is not None:
                raise ConquietError(f"line {letter.id}: {answer}") from answer
            _blank(file, raw)
        return True

    def remove(self, letter: Letter, raw: Any) -> bool:
        with self._lock() as file:
            if os.pread(file, len(raw.text), raw.offset) != raw.text:
                return False
            _blank(file, raw)
        return True

    @contextmanager
    def _lock(self) -> Iterator[int]:
        """Lock the file against other operators; workers that append are not affected."""
        try:
            file = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise StoreError(f"{self.name}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _blank(file: int, line: _Line) -> None:
    length = len(line.text.rstrip(b"\r\n"))
    os.pwrite(file, b" " * length, line.offset)
    os.fsync(file)


def _letter(number: int, text: bytes) -> Letter:
    try:
        message = from_json(text)
    except InvalidMessage as error:
        return letter_of(str(number), {dead_letter.REASON: f"no dead letter: {error}"}, text)
    return letter_of(str(number), message.attributes, message.data)
