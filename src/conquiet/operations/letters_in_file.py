"""Dead letters in a file of JSON lines, as `conquiet worker run --dead-letters` writes it.

A worker may be appending to the file, so it is never written anew: a line that is done with is
overwritten by spaces, which every reader of JSON lines skips. Line numbers stay as they are.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from conquiet.codec import from_json
from conquiet.errors import ConquietError, InvalidMessage, NotFound, StoreError
from conquiet.middleware import dead_letter
from conquiet.operations.dead_letters import ENTRY, STREAM, Letter, Wanted, letter_of
from conquiet.sink import Sink


class _Line(NamedTuple):
    """Where a line stands in the file, and what stood there when it was read."""

    offset: int
    text: bytes


class FileLetters:
    """The letters of one file; `sink` is where replayed messages go."""

    def __init__(self, path: str | os.PathLike[str], sink: Sink | None = None) -> None:
        self.path = Path(path)
        self.name = f"file {str(self.path)!r}"
        self._sink = sink

    def exists(self) -> bool:
        return self.path.exists()

    def scan(self, wanted: Wanted) -> Iterator[tuple[Letter, Any]]:
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
            raise NotFound(f"{self.name}: is not there") from None
        except OSError as error:
            raise StoreError(f"{self.name}: {error.strerror}") from error

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        if self._sink is None:
            raise ConquietError(f"line {letter.id}: say where to with --to")
        message = dead_letter.replay(from_json(raw.text))
        for name in (STREAM, ENTRY):
            message.attributes.pop(name, None)
        if to is not None:
            message.topic = to
        with self._locked() as file:
            if os.pread(file, len(raw.text), raw.offset) != raw.text:
                return False
            [answer] = self._sink.publish([message])
            if answer is not None:
                raise ConquietError(f"line {letter.id}: {answer}") from answer
            _blank(file, raw)
        return True

    def remove(self, letter: Letter, raw: Any) -> bool:
        with self._locked() as file:
            if os.pread(file, len(raw.text), raw.offset) != raw.text:
                return False
            _blank(file, raw)
        return True

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """One operator at a time; workers that append do not mind."""
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
