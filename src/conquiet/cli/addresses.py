"""Sources and sinks by their URL: what `--source` and `--sink` understand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from conquiet.errors import ConfigError
from conquiet.jsonlines import MAX_LINE_BYTES, LinesSink, LinesSource
from conquiet.sink import Sink
from conquiet.source import Source


@dataclass
class Reading:
    """How a source shall read; each kind of source uses what concerns it."""

    dead_letters: Path | None = None
    tries: int | None = None
    max_line_bytes: int | None = None
    files: ExitStack = field(default_factory=ExitStack)
    """Closed when the worker has ended."""


def _read_stdin(url: str, reading: Reading) -> Source:
    # Not sys.stdin: a buffer of our own, which nobody closes while it is read.
    stream = open(0, "rb", closefd=False)  # noqa: SIM115
    return _lines(stream, "stdin:", reading)


def _read_file(url: str, reading: Reading) -> Source:
    path = file_path(url)
    try:
        stream = reading.files.enter_context(path.open("rb"))
        stream.peek(1)  # a directory can be opened, but not read
    except OSError as error:
        raise ConfigError(f"--source file:{path}: {error.strerror}; name a readable file") from None
    return _lines(stream, f"file:{path}", reading)


def _lines(stream: BinaryIO, name: str, reading: Reading) -> Source:
    letters = None
    if reading.dead_letters is not None:
        letters = _open_dead_letters(reading.dead_letters, reading.files)
    return LinesSource(
        stream,  # type: ignore[arg-type]  # BinaryIO does not tell that it has read1
        letters,
        tries=reading.tries or 3,
        max_line_bytes=reading.max_line_bytes or MAX_LINE_BYTES,
        name=name,
    )


def _open_dead_letters(path: Path, files: ExitStack) -> LinesSink:
    is_new = not path.exists()
    stream = _append_to(path, "--dead-letters")  # now: not when the first message has failed

    def remove_if_unused() -> None:
        if is_new and path.stat().st_size == 0:
            path.unlink()

    files.callback(remove_if_unused)
    files.enter_context(stream)
    return LinesSink(stream)


def _read_redis(url: str, reading: Reading) -> Source:
    if reading.dead_letters is not None or reading.max_line_bytes is not None:
        raise ConfigError(
            "--dead-letters and --max-line-bytes are for JSON lines; dead letters of a stream go"
            " to another stream: add &dead_letters=NAME to the URL"
        )
    place = _StreamPlace(url, "--source", needs_group=True)
    return place.room.StreamSource(  # type: ignore[no-any-return]  # the room may be absent
        place.client(),
        place.topic,
        place.group,
        max_attempts=reading.tries,
        dead_letters=place.dead_letters,
    )


def _write_stdout(url: str, files: ExitStack) -> Sink:
    return LinesSink(sys.stdout.buffer)


def _write_file(url: str, files: ExitStack) -> Sink:
    return LinesSink(files.enter_context(_append_to(file_path(url), "--sink")))


def _write_redis(url: str, files: ExitStack) -> Sink:
    place = _StreamPlace(url, "--sink", needs_group=False)
    name = place.topic.name
    return place.room.StreamSink(  # type: ignore[no-any-return]  # the room may be absent
        place.client(), name, streams={name: place.topic}
    )


class _StreamPlace:
    """What a URL says about a stream: `redis://HOST/0?stream=NAME&group=NAME&partitions=N`.

    Without a host, it is on the server of CONQUIET_REDIS_URL, or of this machine.
    """

    def __init__(self, url: str, option: str, needs_group: bool) -> None:
        self.room: Any = _room("redis")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            from conquiet.relay.sinks.url import trouble

            raise ConfigError(f"{option}: {trouble(error, url)}") from None
        query = dict(parse_qsl(parts.query))
        stream, self.group = query.pop("stream", ""), query.pop("group", "")
        if not stream or (needs_group and not self.group):
            wanted = "stream=commands&group=billing" if needs_group else "stream=events"
            raise ConfigError(f"{option} redis://…: say which stream, as in ?{wanted}")
        partitions = query.pop("partitions", "1")
        if not partitions.isdecimal():
            raise ConfigError(f"{option}: partitions={partitions!r:.40} is not a whole number")
        self.topic = self.room.Topic(stream, int(partitions))
        self.dead_letters = query.pop("dead_letters", None)
        self._url = urlunsplit(parts._replace(query=urlencode(query)))
        if not parts.netloc:
            self._url = os.environ.get("CONQUIET_REDIS_URL", "redis://localhost:6379/0")
        self._option = option

    def client(self) -> Any:
        import redis

        try:
            return redis.Redis.from_url(self._url)
        except (ValueError, TypeError) as error:
            from conquiet.relay.sinks.url import trouble

            raise ConfigError(
                f"{self._option} redis://…: {trouble(error, self._url)}"
            ) from None  # whose words may quote a part of the password


def _room(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"conquiet.{name}")
    except ImportError as error:
        raise ConfigError(
            f"{name}:// needs packages that are missing: pip install 'conquiet[{name}]'"
        ) from error


def _append_to(path: Path, option: str) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; name a writable file") from None


def file_path(url: str) -> Path:
    rest = url.removeprefix("file:")
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//"):
        raise ConfigError(f"{url!r} names no file; write file:commands.jsonl")
    return Path(path)


# A new kind of source or sink gets its line here. Its module is imported by its function, so
# that nobody needs the packages of a kind that they do not use.
SOURCES: dict[str, Callable[[str, Reading], Source]] = {
    "-": _read_stdin,
    "stdin": _read_stdin,
    "file": _read_file,
    "redis": _read_redis,
    "rediss": _read_redis,
}
SINKS: dict[str, Callable[[str, ExitStack], Sink]] = {
    "-": _write_stdout,
    "stdout": _write_stdout,
    "file": _write_file,
    "redis": _write_redis,
    "rediss": _write_redis,
}
SHAREABLE = frozenset(("redis", "rediss"))
"""Sources that several processes can read at once."""


def open_source(url: str, reading: Reading) -> Source:
    return SOURCES[_scheme(url, "--source", SOURCES)](url, reading)


def open_sink(url: str, files: ExitStack) -> Sink:
    return SINKS[_scheme(url, "--sink", SINKS)](url, files)


def is_shareable(url: str) -> bool:
    return url.partition(":")[0] in SHAREABLE


def refuse_one_file_for_both(source: str, sink: str) -> None:
    """Every event written would be read again, for ever."""
    if source.startswith("file:") and sink.startswith("file:"):
        ends = [file_path(url) for url in (source, sink)]
        if all(map(os.path.exists, ends)) and os.path.samefile(*ends):
            raise ConfigError(f"--source and --sink are one file, {ends[0]}; name two")


def _scheme(url: str, option: str, known: Collection[str]) -> str:
    scheme = url.partition(":")[0]
    if scheme in known:
        return scheme
    hint = f"; for a file, write file:{url}" if ":" not in url else ""
    choices = ", ".join(name if name == "-" else f"{name}:" for name in known)
    from conquiet.relay.masked import masked

    shown = masked(url.partition("?")[0])
    raise ConfigError(f"{option} {shown!r:.100}: unknown, choose one of {choices}{hint}")
