"""Footer: what a Parquet file says about itself, made the same in every process.

Spark's writer lists the encodings of a column in the order of a hash set of the JVM, which differs
from one JVM to the next: the same rows were then other bytes. Their order means nothing to readers,
so they are sorted here, in place.

    file      PAR1 … pages … footer, its length in 4 bytes, PAR1
    footer    FileMetaData.row_groups[].columns[].meta_data.encodings, in Thrift's compact protocol
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from conquiet.errors import StoreError

_MAGIC = b"PAR1"
_TAIL = 8
_ENCODINGS = (4, 1, 3, 2)
"""The numbers of the fields that lead to them; those of parquet.thrift, which never change."""
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 0, 1, 2, 3, 7, 8, 12
_NUMBERS = (4, 5, 6)
_LISTS = (9, 10)


def with_sorted_encodings(path: str | os.PathLike[str]) -> None:
    """Sort the encodings of each column in the footer of a file."""
    with open(path, "r+b") as file:
        start = file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
        tail = file.read(_TAIL)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or length > start:
            raise StoreError(f"{os.fspath(path)} is no whole Parquet file: its end is missing")
        file.seek(start - length)
        footer = bytearray(file.read(length))
        for place, end in list(_Walk(footer).encodings()):
            footer[place:end] = bytes(sorted(footer[place:end]))  # each is one byte
        file.seek(start - length)
        file.write(footer)


class _Walk:
    """Goes once through a footer, and tells where lists of encodings are."""

    def __init__(self, footer: bytes | bytearray) -> None:
        self._bytes = footer
        self._at = 0

    def encodings(self) -> Iterator[tuple[int, int]]:
        return self._struct(_ENCODINGS)

    def _struct(self, path: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Fields, of which the first of the path is gone into, and the others are passed by."""
        number = 0
        while (head := self._byte()) != _STOP:
            kind, step = head & 0x0F, head >> 4
            number = number + step if step else self._zigzag()
            if kind in (_TRUE, _FALSE):
                continue  # the head of a field says it already
            on_path = bool(path) and number == path[0]
            yield from self._value(kind, path[1:] if on_path else None)

    def _value(self, kind: int, path: tuple[int, ...] | None) -> Iterator[tuple[int, int]]:
        """What is found in a value that the path leads to; nothing where it is None."""
        if kind == _STRUCT:
            yield from self._struct(path or ())
        elif kind in _LISTS:
            yield from self._list(path)
        elif kind in _NUMBERS:
            self._number()
        elif kind == _BINARY:
            size = self._number()  # which moves on
            self._at += size
        elif kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
            self._at += 8 if kind == _DOUBLE else 1
        else:
            raise StoreError(
                f"a Parquet footer with a value of Thrift's kind {kind}; known are 1-12"
            )

    def _list(self, path: tuple[int, ...] | None) -> Iterator[tuple[int, int]]:
        head = self._byte()
        size = head >> 4 if head >> 4 < 15 else self._number()
        start = self._at
        for _ in range(size):
            yield from self._value(head & 0x0F, path)
        if path == ():
            yield start, self._at

    def _byte(self) -> int:
        self._at += 1
        return self._bytes[self._at - 1]

    def _number(self) -> int:
        value = shift = 0
        while True:
            one = self._byte()
            value |= (one & 0x7F) << shift
            if one < 0x80:
                return value
            shift += 7

    def _zigzag(self) -> int:
        value = self._number()
        return value >> 1 ^ -(value & 1)
