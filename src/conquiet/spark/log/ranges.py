"""Ranges of stream entries, and indexes that find the n-th entry of a range.

Ids are made of a clock and do not say how many entries lie between two of them, and Redis has no
command for it. A script inside Redis walks through the entries and returns ids only; where scripts
are not allowed, the entries are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conquiet.errors import StoreError
from conquiet.redis import ids
from conquiet.redis.wire import Wire
from conquiet.spark.log.connection import ask

logger = logging.getLogger("conquiet.spark")

BEGINNING = ids.MIN.decode()
"""Before every entry: no entry has this id."""

PAGE = 500
"""Entries between two marks of an index."""
_PER_CALL = 5_000
"""Entries that one call walks through: Redis serves no other client meanwhile."""
_AT_ONCE = 100
"""Ranges that are indexed side by side."""
_FIRST_STEP, _STEP_BYTES = 8, 1 << 20
"""Entries that are read first, to see how large they are; then about so many bytes at a time."""


class EntryRange(NamedTuple):
    """The entries of a stream after one id and up to another."""

    stream: str
    after: str
    """Exclusive; `0-0` for the beginning."""
    until: str
    entries: int | None = None
    """How many entries it must have, where that is known."""
    first: str | None = None
    """Where the number is unknown: the first entry, which must exist until all are read."""
    at_most: int | None = None
    """Where the number is unknown: the length of the whole stream."""


# KEYS[1]  the stream
# ARGV     the first id, the last id, how many entries, how many of them per page, how many to read
#          first, and about how many bytes to read at a time, which a script copies
# Returns the last id of each page, and how many entries there were.
_WALK = b"""
local from, marks, counted = ARGV[1], {}, 0
local wanted, page, step = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
while counted < wanted do
  local count = math.min(step, page - counted % page, wanted - counted)
  local entries = redis.call('XRANGE', KEYS[1], from, ARGV[2], 'COUNT', count)
  if #entries == 0 then break end
  local last, size = entries[#entries], 1
  counted = counted + #entries
  marks[math.ceil(counted / page)] = last[1]
  from = '(' .. last[1]
  if #entries < count or last[1] == ARGV[2] then break end
  for _, text in ipairs(last[2]) do size = size + #text end
  step = math.max(1, math.min(page, math.floor(tonumber(ARGV[6]) / size)))
end
return {marks, counted}
"""


@dataclass(slots=True)
class RangeIndex:
    """The id at the end of each page of a range, up to a wanted number of entries."""

    range: EntryRange
    wanted: int
    marks: list[tuple[int, str]] = field(default_factory=list)
    """How many entries lie up to an id, and the id."""
    is_complete: bool = False

    @property
    def entries(self) -> int:
        """Return how many entries were counted."""
        return self.marks[-1][0] if self.marks else 0

    @property
    def end(self) -> str:
        """The last id that was counted."""
        return self.marks[-1][1] if self.marks else self.range.after

    def covers(self, entry_range: EntryRange) -> bool:
        """Return whether the index goes from the beginning of a range to its end."""
        return (self.range.after, self.end) == (entry_range.after, entry_range.until)

    def add(self, marks: Sequence[bytes], counted: int, asked: int) -> None:
        """Append the pages that one call found."""
        base = self.entries
        for number, mark in enumerate(marks, 1):
            self.marks.append((base + min(number * PAGE, counted), mark.decode()))
        self.is_complete = counted < asked or self.entries >= self.wanted

    def fill_dense(self) -> None:
        """Compute the marks if the ids of the range are numbered without a gap."""
        (first_ms, first), (last_ms, last) = (
            ids.parse(self.range.after),
            ids.parse(self.range.until),
        )
        there = self.range.entries
        if first_ms == last_ms and there is not None and there == last - first:
            steps = range(PAGE, min(self.wanted, there) + PAGE, PAGE)
            counts = [min(step, self.wanted, there) for step in steps]
            self.marks = [(count, ids.format(first_ms, first + count)) for count in counts]
            self.is_complete = True


def index_ranges(wire: Wire, wanted: Sequence[tuple[EntryRange, int]]) -> list[RangeIndex]:
    """Index the first entries of each range, many ranges at a time."""
    indexes = [RangeIndex(one, count, is_complete=count <= 0) for one, count in wanted]
    for index in indexes:
        if not index.is_complete:
            index.fill_dense()
    while left := [index for index in indexes if not index.is_complete][:_AT_ONCE]:
        steps = [min(_PER_CALL // len(left), index.wanted - index.entries) for index in left]
        for index, asked, reply in zip(left, steps, _walk(wire, left, steps), strict=True):
            index.add(*reply, asked)
    return indexes


def _walk(
    wire: Wire, indexes: Sequence[RangeIndex], steps: Sequence[int]
) -> list[tuple[list[bytes], int]]:
    commands = []
    for index, count in zip(indexes, steps, strict=True):
        key, first = index.range.stream.encode(), ids.next_after(index.end.encode())
        until = index.range.until.encode()
        bounds = (first, until, count, PAGE, _FIRST_STEP, _STEP_BYTES)
        commands.append((key, (b"EVAL", _WALK, 1, key, *bounds)))
    replies = ask(wire, commands)
    return [
        _read_pages(wire, index, count, reply) if isinstance(reply, Exception) else reply
        for index, count, reply in zip(indexes, steps, replies, strict=True)
    ]


def _read_pages(
    wire: Wire, index: RangeIndex, wanted: int, error: Exception
) -> tuple[list[bytes], int]:
    """Count by reading entries, for Redis before 6.2 and users without scripts."""
    logger.debug("entries of %r are counted by reading them: %s", index.range.stream, error)
    key, marks, counted = index.range.stream.encode(), list[bytes](), 0
    first, until = ids.next_after(index.end.encode()), index.range.until.encode()
    step = _FIRST_STEP
    while counted < wanted:
        count = min(step, PAGE - counted % PAGE, wanted - counted)
        [page] = ask(wire, [(key, (b"XRANGE", key, first, until, b"COUNT", count))])
        if isinstance(page, Exception):
            raise StoreError(f"stream {index.range.stream!r} cannot be read: {page}") from page
        if not page:
            break
        last, fields = page[-1]
        if counted % PAGE == 0:
            marks.append(last)
        counted += len(page)
        marks[-1] = last
        if len(page) < count or last == until:  # no id follows the largest
            break
        first = ids.next_after(last)
        step = max(1, min(PAGE, _STEP_BYTES // (1 + sum(map(len, fields or ())))))
    return marks, counted
