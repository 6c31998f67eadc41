"""Sources and sinks by their URL: what `--source` and `--sink` understand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from conquiet.errors import ConfigError
from conquiet.jsonlines import MAX_LINE_BYTES, LinesSink, LinesSource
from conquiet.sink import Sink
from conquiet.source import Source


@dataclass
class Reading:
    """How a source shall read; each kind of source uses what concerns it."""

    dead_letters: Sink | None = None
    tries: int = 3
    max_line_bytes: int = MAX_LINE_BYTES
    files: ExitStack = field(default_factory=ExitStack)
    """Closed when the worker has ended."""


def _read_stdin(rest: str, reading: Reading) -> Source:
    # Not sys.stdin: a buffer of our own, which nobody closes while it is read.
    stream = open(0, "rb", closefd=False)  # noqa: SIM115
    return _lines(stream, "stdin:", reading)


def _read_file(rest: str, reading: Reading) -> Source:
    path = _path(rest)
    try:
        stream = reading.files.enter_context(path.open("rb"))
        stream.peek(1)  # a directory can be opened, but not read
    except OSError as error:
        raise ConfigError(f"--source file:{path}: {error.strerror}; name a readable file") from None
    return _lines(stream, f"file:{path}", reading)


def _lines(stream: BinaryIO, name: str, reading: Reading) -> Source:
    return LinesSource(
        stream,  # type: ignore[arg-type]  # BinaryIO does not tell that it has read1
        reading.dead_letters,
        tries=reading.tries,
        max_line_bytes=reading.max_line_bytes,
        name=name,
    )


def _write_stdout(rest: str, files: ExitStack) -> Sink:
    return LinesSink(sys.stdout.buffer)


def _write_file(rest: str, files: ExitStack) -> Sink:
    return LinesSink(files.enter_context(append_to(_path(rest), "--sink")))


def append_to(path: Path, option: str) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; name a writable file") from None


def _path(rest: str) -> Path:
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//"):
        raise ConfigError(f"'file:{rest}' names no file; write file:commands.jsonl")
    return Path(path)


# A new kind of source or sink gets its line here. Its module is imported by its function, so
# that nobody needs the packages of a kind that they do not use.
SOURCES: dict[str, Callable[[str, Reading], Source]] = {
    "-": _read_stdin,
    "stdin": _read_stdin,
    "file": _read_file,
}
SINKS: dict[str, Callable[[str, ExitStack], Sink]] = {
    "-": _write_stdout,
    "stdout": _write_stdout,
    "file": _write_file,
}
SHAREABLE: frozenset[str] = frozenset()
"""Sources that several processes can read at once."""

_LATER = {"redis": "redis", "rediss": "redis", "unix": "redis"}
"""Schemes that are known and not built yet, and the extra that will bring them."""


def open_source(url: str, reading: Reading) -> Source:
    scheme, rest = _split(url, "--source", SOURCES)
    return SOURCES[scheme](rest, reading)


def open_sink(url: str, files: ExitStack) -> Sink:
    scheme, rest = _split(url, "--sink", SINKS)
    return SINKS[scheme](rest, files)


def is_shareable(url: str) -> bool:
    return url.partition(":")[0] in SHAREABLE


def refuse_one_file_for_both(source: str, sink: str) -> None:
    """Every event written would be read again, for ever."""
    if source.startswith("file:") and sink.startswith("file:"):
        ends = [_path(url.removeprefix("file:")) for url in (source, sink)]
        if all(map(os.path.exists, ends)) and os.path.samefile(*ends):
            raise ConfigError(f"--source and --sink are one file, {ends[0]}; name two")


def _split(url: str, option: str, known: Collection[str]) -> tuple[str, str]:
    scheme, _, rest = url.partition(":")
    if scheme in known:
        return scheme, rest
    if scheme in _LATER:
        raise ConfigError(
            f"{option} {scheme}:// needs conquiet.{_LATER[scheme]}, which this version does not"
            f" have: pip install --upgrade 'conquiet[{_LATER[scheme]}]', or make a Worker with a"
            " source of your own and run that"
        )
    hint = f"; for a file, write file:{url}" if ":" not in url else ""
    choices = ", ".join(name if name == "-" else f"{name}:" for name in known)
    raise ConfigError(f"{option} {url!r:.100}: unknown, choose one of {choices}{hint}")
