"""Locate the values of all entries in the bytes of an XRANGE reply.

    *2 ⏎  *2 ⏎ $15 ⏎ 1700000000000-0 ⏎ *4 ⏎ $2 ⏎ id ⏎ $1 ⏎ 7 ⏎ $4 ⏎ data ⏎ $2 ⏎ {} ⏎  *2 ⏎ …

Line ends are found in one pass over all bytes. Then the entries of one shape (the same fields in
the same order) are a table of lines, of which whole columns are checked and cut at once.

A value may contain a line end, which is then taken for one of the reply. So everything is checked:
the bytes between the values must be those of the shape, and every declared length that of its line.
The result is exactly that of a sequential parser, or None, and then a sequential parser is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]

_CR, _LF, _STAR, _ZERO = b"\r\n*0"
_MOST_SHAPES = 32
_MOST_DIGITS = 9
"""Digits of a declared length: a value in Redis is smaller than a gigabyte."""


@dataclass(frozen=True, slots=True)
class Group:
    """The entries of a reply that have the same fields in the same order."""

    names: tuple[bytes, ...]
    rows: Numbers
    """Their places among the entries of the reply."""
    starts: Numbers
    """Where each value begins, by column: the id first, then the fields."""
    ends: Numbers


@dataclass(frozen=True, slots=True)
class Table:
    """A reply, all of whose values were located."""

    buffer: NDArray[np.uint8]
    count: int
    groups: list[Group]


def locate(buffer: NDArray[np.uint8], count: int, start: int) -> Table | None:
    """Locate the values of `count` entries that begin at `start`; None if that failed a check."""
    if count == 0:
        return Table(buffer, 0, [])
    ends = np.flatnonzero(buffer[start:] == _LF)
    ends += start
    shape = _Shape.at(buffer, start, ends)
    if shape is None:
        return None
    if len(ends) != count * shape.lines:
        ends = ends[buffer[ends - 1] == _CR]  # a lone line feed is part of a value
    if len(ends) == count * shape.lines:
        heads = np.arange(0, len(ends), shape.lines)
        group = _Reply(buffer, ends, start).group(shape, np.arange(count), heads)
        if group is not None and len(group.rows) == count:
            return Table(buffer, count, [group])
    groups = _Reply(buffer, ends, start).by_shape(count)
    return None if groups is None else Table(buffer, count, groups)


class _Shape:
    """The bytes between the values of an entry."""

    def __init__(self, names: tuple[bytes, ...]) -> None:
        self.names = names
        self.lines = 4 + 4 * len(names)
        first = b"\r\n*%d\r\n" % (2 * len(names))
        gaps = [b"\r\n$%d\r\n%s\r\n$" % (len(name), name) for name in names]
        gaps[0] = first + gaps[0][2:]
        self.gaps = gaps
        """Between the end of a value and the length of the next."""
        self.value_lines = np.array([2, *range(7, self.lines, 4)])
        """Which lines of an entry are values."""

    @classmethod
    def at(cls, buffer: NDArray[np.uint8], start: int, ends: Numbers) -> _Shape | None:
        """Return the shape of the entry that begins here, read line by line."""
        try:
            id_length, at = _length(buffer, start + 4)
            strings, at = _length(buffer, at + id_length + 2)
            if strings < 2 or strings % 2 or 4 + 2 * strings > len(ends):
                return None
            names = []
            for place in range(strings):
                length, at = _length(buffer, at)
                if place % 2 == 0:
                    names.append(buffer[at : at + length].tobytes())
                at += length + 2
        except (ValueError, IndexError):
            return None
        return cls(tuple(names))


def _length(buffer: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the number in a line such as `$15`, and where the next line begins."""
    line = buffer[at + 1 : at + 2 + _MOST_DIGITS + 1].tobytes()
    digits, found, _ = line.partition(b"\r\n")
    if not found or not digits.isdigit():
        raise ValueError(line)
    return int(digits), at + 1 + len(digits) + 2


class _Reply:
    """The bytes of a reply with its line ends."""

    def __init__(self, buffer: NDArray[np.uint8], ends: Numbers, start: int) -> None:
        self.buffer = buffer
        self.ends = ends
        self.start = start
        # Eight bytes from anywhere as one number, to compare much at once.
        self.words: Any = np.ndarray((len(buffer) - 7,), dtype="<u8", buffer=buffer, strides=(1,))

    def by_shape(self, count: int) -> list[Group] | None:
        """Group entries by their shapes."""
        heads = self._heads(count)
        if heads is None:
            return None
        left = np.arange(count)
        groups: list[Group] = []
        while len(left):
            if len(groups) == _MOST_SHAPES:
                return None
            first = heads[left[0]]
            shape = _Shape.at(self.buffer, self._line_start(first), self.ends)
            if shape is None:
                return None
            lengths = np.diff(heads, append=len(self.ends))[left]
            group = self.group(shape, left, heads[left], lengths == shape.lines)
            if group is None or not len(group.rows) or group.rows[0] != left[0]:
                return None
            groups.append(group)
            left = np.setdiff1d(left, group.rows, assume_unique=True)
        return groups

    def _heads(self, count: int) -> Numbers | None:
        """Return the line with which each entry begins, found from one entry to the next."""
        starts = np.concatenate(([self.start], self.ends[:-1] + 1))
        stars = np.flatnonzero(self.buffer[starts] == _STAR)
        strings = np.full(len(starts), -1)
        strings[stars] = self._numbers(starts[stars] + 1, self.ends[stars] - 1)
        steps, heads, at = strings.data, [], 0
        for _ in range(count):
            if at + 3 >= len(steps) or steps[at] != 2 or steps[at + 3] < 2:
                return None
            heads.append(at)
            at += 4 + 2 * steps[at + 3]
        return np.array(heads) if at == len(steps) else None

    def _line_start(self, line: int) -> int:
        return int(self.ends[line - 1]) + 1 if line else self.start

    def group(
        self, shape: _Shape, rows: Numbers, heads: Numbers, likely: NDArray[np.bool_] | None = None
    ) -> Group | None:
        """Return the entries that have the shape; None if a length is not as declared."""
        if likely is not None:
            rows, heads = rows[likely], heads[likely]
        if len(heads) * shape.lines == len(self.ends):  # all of the reply: a table as it is
            table = self.ends.reshape(-1, shape.lines).T
            ends, starts = table[shape.value_lines] - 1, table[shape.value_lines - 1] + 1
        else:
            lines = shape.value_lines[:, None] + heads
            ends, starts = self.ends[lines] - 1, self.ends[lines - 1] + 1
        first = np.where(heads > 0, self.ends[heads - 1] + 1, self.start)
        fits = self._equal(first, b"*2\r\n$")
        lengths_at = np.empty_like(starts)
        lengths_at[0] = first + 5
        for column, gap in enumerate(shape.gaps):
            lengths_at[column + 1] = ends[column] + len(gap)
            fits &= self._equal(ends[column], gap)
        if not fits.all():
            rows, starts, ends = rows[fits], starts[:, fits], ends[:, fits]
            lengths_at = lengths_at[:, fits]
        for column, at in enumerate(lengths_at):
            declared = self._numbers(at, starts[column] - 2)
            if not np.array_equal(declared, ends[column] - starts[column]):
                return None
        return Group(shape.names, rows, starts, ends)

    def _equal(self, at: Numbers, wanted: bytes) -> NDArray[np.bool_]:
        """Return whether the wanted bytes are at each of these places."""
        at = np.minimum(at, len(self.words) - 1 - max(0, len(wanted) - 8))
        if len(wanted) < 8:
            mask = (1 << 8 * len(wanted)) - 1
            return np.asarray(self.words[at] & mask == int.from_bytes(wanted, "little"))
        differences: Any = np.zeros(len(at), dtype=np.uint64)
        for offset in [*range(0, len(wanted) - 8, 8), len(wanted) - 8]:
            word = np.uint64(int.from_bytes(wanted[offset : offset + 8], "little"))
            differences |= self.words[at + offset] ^ word
        return np.asarray(differences == 0)

    def _numbers(self, starts: Numbers, ends: Numbers) -> Numbers:
        """Parse the decimal numbers between starts and ends; -1 for one that is too long or empty.

        Bytes that are no digits give a wrong number, which the checks of the caller refuse.
        """
        widths = ends - starts
        good = (widths > 0) & (widths <= _MOST_DIGITS)
        widest = int(widths.max(initial=0, where=good))
        is_even = bool((widths == widest).all())
        numbers = np.zeros(len(starts), dtype=np.int64)
        for place in range(widest):
            digits = self.buffer[ends - 1 - place].astype(np.int64) - _ZERO
            numbers += (digits if is_even else np.where(widths > place, digits, 0)) * 10**place
        if not is_even:
            numbers[~good] = -1
        return numbers
