"""Dead letters, wherever they lie: find them, look at one, replay them, drop them.

    letters ──wanted──▶ found ──replay──▶ published where it came from ──▶ then removed here
                          └────drop───▶ removed

A replayed message keeps its event id, so that an inbox still knows it. Published first and removed
afterwards: whatever kills a replay, a letter is in one place or in both, never in none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias

from conquiet.errors import ConquietError, NotFound, StoreError
from conquiet.middleware import dead_letter
from conquiet.operations.text import as_text, whole

Tell: TypeAlias = Callable[[int], object]
"""Called with the number of letters that are done."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that was given up, and why."""

    id: str
    """Its place: an entry id, or the number of a line."""
    event_id: str
    event_type: str
    source: str
    reason: str
    traceback: str
    attempts: int
    time: str
    """When it died."""
    handler: str
    topic: str
    stream: str
    """Where it came from, if that is known: the stream and the entry."""
    entry: str
    attributes: Mapping[str, str]
    """Of the message, as it was."""
    data: str
    data_is_base64: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which letters: all that is said must hold. `type` and `source` may have * and ?.

    >>> Wanted(type="order.*", error="timeout").type
    'order.*'
    """

    ids: tuple[str, ...] = ()
    """Of letters, or of events."""
    type: str = ""
    source: str = ""
    error: str = ""
    """A part of the reason or of the traceback, in capitals or not."""
    since: datetime | None = None
    until: datetime | None = None
    after: str = ""
    """The id of the last letter that was seen: what follows is the next page."""

    def fits(self, letter: Letter) -> bool:
        if self.after and _place(letter.id) <= _place(self.after):
            return False
        if self.ids and letter.id not in self.ids and letter.event_id not in self.ids:
            return False
        if self.type and not fnmatchcase(letter.event_type, self.type):
            return False
        if self.source and not fnmatchcase(letter.source, self.source):
            return False
        text = f"{letter.reason}\n{letter.traceback}".lower()
        return self.error.lower() in text and self._fits_time(letter.time)

    def _fits_time(self, time: str) -> bool:
        if self.since is None and self.until is None:
            return True
        try:
            at = datetime.fromisoformat(time)
        except ValueError:  # a letter that does not say when is not between two moments
            return False
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return not (self.since and at < self.since) and not (self.until and at > self.until)


class Letters(Protocol):
    """A place where dead letters lie: a stream, a file, a queue of Kombu."""

    name: str

    def exists(self) -> bool:
        """Whether the place is there at all; a stream comes into being with its first letter."""

    def scan(self, wanted: Wanted) -> Iterator[tuple[Letter, Any]]:
        """Those that are there now, the oldest first, each with what `send` needs of it.

        May leave out what cannot fit; whoever calls it looks at the others.
        """

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        """Publish the message where it came from, or `to`, then remove the letter.

        False if the letter is gone. Raises `ConquietError` if this one cannot be sent.
        """

    def remove(self, letter: Letter, raw: Any) -> bool:
        """Remove a letter; False if it is gone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A letter that could not be replayed, and stays."""

    id: str
    event_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay or a drop did, or in a dry run would do."""

    done: tuple[str, ...]
    """Ids of the letters."""
    failed: tuple[Failure, ...]
    dry_run: bool


def find(letters: Letters, wanted: Wanted | None = None, limit: int = 100) -> list[Letter]:
    """Up to `limit` letters, the oldest first.

    >>> from conquiet.operations.letters_in_stream import StreamLetters
    >>> find(StreamLetters(client, "dead-letters"), Wanted(type="order.*"))
    []
    """
    found: list[Letter] = []
    for letter, _ in _matching(letters, wanted or Wanted()):
        found.append(letter)
        if len(found) == limit:
            break
    return found


def show(letters: Letters, id_: str) -> Letter:
    """One letter by its own id or by its event's; raises `NotFound`."""
    for letter in find(letters, Wanted((id_,)), 1):
        return letter
    raise NotFound(f"no dead letter {id_!r:.100} in {letters.name}; dead-letters list shows them")


def replay(
    letters: Letters,
    wanted: Wanted,
    *,
    to: str | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    tell: Tell | None = None,
) -> Outcome:
    """Send the messages of letters on their way again; what fails stays where it is."""
    return _each(
        letters, wanted, lambda letter, raw: letters.send(letter, raw, to), limit, dry_run, tell
    )


def drop(
    letters: Letters,
    wanted: Wanted,
    *,
    among: Collection[str] | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    tell: Tell | None = None,
) -> Outcome:
    """Delete letters for good; `among` those ids only, such as a dry run gave."""

    def remove(letter: Letter, raw: Any) -> bool:
        return (among is None or letter.id in among) and letters.remove(letter, raw)

    return _each(letters, wanted, remove, limit, dry_run, tell)


def _each(
    letters: Letters,
    wanted: Wanted,
    act: Callable[[Letter, Any], bool],
    limit: int | None,
    dry_run: bool,
    tell: Tell | None,
) -> Outcome:
    done: list[str] = []
    failed: list[Failure] = []
    for letter, raw in _matching(letters, wanted):
        if limit is not None and len(done) + len(failed) == limit:
            break
        try:
            if dry_run or act(letter, raw):
                done.append(letter.id)
        except StoreError as error:  # nothing more will work; what is not done is as it was
            raise StoreError(f"{error}; {len(done)} letters were done before that") from error
        except ConquietError as error:
            failed.append(Failure(letter.id, letter.event_id, str(error)))
        if tell is not None:
            tell(len(done) + len(failed))
    return Outcome(tuple(done), tuple(failed), dry_run)


def _matching(letters: Letters, wanted: Wanted) -> Iterator[tuple[Letter, Any]]:
    return ((letter, raw) for letter, raw in letters.scan(wanted) if wanted.fits(letter))


def letter_of(
    id_: str, attributes: Mapping[str, Any], data: bytes, *, time: str = "", extra: str = ""
) -> Letter:
    """A letter of a CloudEvent with the attributes of the `DeadLetter` middleware."""
    about = {name: str(attributes.get(name, "")) for name in _ABOUT}
    original = {n: str(v) for n, v in attributes.items() if n not in _ABOUT}
    text, is_base64 = as_text(data)
    attempts = about[dead_letter.ATTEMPTS]
    return Letter(
        id_,
        original.get("id", ""),
        original.get("type", ""),
        original.get("source", ""),
        about[dead_letter.REASON],
        _lines(about[dead_letter.TRACEBACK]),
        whole(attempts),
        about[dead_letter.TIME] or time,
        about[dead_letter.HANDLER],
        about[dead_letter.TOPIC],
        about[STREAM],
        about[ENTRY],
        original,
        text,
        is_base64,
    )


# As conquiet.redis.dead_letter writes them; that room needs redis-py, a file of letters does not.
STREAM, ENTRY = "deadstream", "deadentry"
_ABOUT = frozenset(
    (
        *(dead_letter.REASON, dead_letter.HANDLER, dead_letter.ATTEMPTS, dead_letter.TRACEBACK),
        *(dead_letter.TIME, dead_letter.TOPIC, dead_letter.ATTRIBUTES, STREAM, ENTRY),
    )
)


def _place(id_: str) -> tuple[int, ...]:
    """Entry ids and numbers of lines in their order."""
    return tuple(whole(part) for part in id_.split("-"))


def _lines(traceback: str) -> str:
    """The middleware writes line breaks out, since CloudEvents has no control characters."""
    return traceback if "\n" in traceback else traceback.replace("\\n", "\n")
