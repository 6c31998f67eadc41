"""Density: where the entries of a piece lie, by a look at a few of them.

The time between ids says nothing about how many entries there are: one burst can outweigh a day.
So a piece is cut into bins, and of each the first entries are looked at. What a bin has beyond
them is a guess, by how close they lie; a bin that was guessed can be looked at again, in parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from conquiet.errors import StoreError
from conquiet.redis.ids import next_after
from conquiet.redis.wire import Wire
from conquiet.spark.log.asking import ask
from conquiet.spark.log.piece import Piece, id_of, parts

LOOK = 64_000
"""Entries that all bins of a piece may be looked at for, together; about 0.1 s of Redis."""
_FEWEST_BINS, _MOST_BINS = 16, 256
_PARTS = 16
"""Into which a bin is cut that is looked at again; no more than _MOST_BINS are."""
_LEAST_ENTRIES, _MOST_ENTRIES = 8, 250
"""Of a bin. The least also where entries must be sent, because scripts are not allowed; with more
than the most it is worth a cut."""
_CALL_ENTRIES, _CALL_BYTES = 4_000, 4_000_000
"""That one call takes into the script: Redis serves nobody else meanwhile."""
_MS = 1 << 64
"""Ids as numbers: a millisecond has room for so many."""

# KEYS[1]  the stream
# ARGV     how many entries of a bin, and how many bytes in all, at most; then the first and the
#          last id of each bin
# Answers, for as many bins as there were bytes for, with how many entries there were, the last of
# their ids, and how many were asked for.
_PROBE = b"""
local found, left = {}, tonumber(ARGV[2])
for at = 3, #ARGV, 2 do
  local count, last = tonumber(ARGV[1]), ''
  local entries = redis.call('XRANGE', KEYS[1], ARGV[at], ARGV[at + 1], 'COUNT', 1)
  if #entries > 0 then
    local size = 1
    for _, text in ipairs(entries[1][2]) do size = size + #text end
    count = math.max(1, math.min(count, math.floor(left / size)))
    entries = redis.call('XRANGE', KEYS[1], ARGV[at], ARGV[at + 1], 'COUNT', count)
    last = entries[#entries][1]
    left = left - #entries * size
  end
  found[#found + 1] = {#entries, last, count}
  if left <= 0 then break end
end
return found
"""


class Bin(NamedTuple):
    """Ids from one to another, as numbers, and about how many entries have them."""

    start: int
    end: int
    """Not part of it."""
    entries: float = 0.0
    seen: int | None = None
    """The last id that was looked at, if there are more: then their number is a guess."""

    @property
    def is_open(self) -> bool:
        """Whether it ends where a millisecond does: nobody knows how far the numbers go in it."""
        return self.end - self.start <= _MS and self.end % _MS == 0

    @property
    def grain(self) -> int:
        return _MS if self.end - self.start > _MS else 1

    def with_entries(self, entries: int, last: str, asked: int) -> Bin:
        """What was found in it."""
        if entries < asked:
            return self._replace(entries=float(entries))
        seen, first = _number(last), self.start // self.grain
        length, looked = -(-self.end // self.grain) - first, seen // self.grain - first + 1
        # From its start, not from the first entry: the gap before that counts.
        guess = entries * (1.0 if self.is_open else length / looked)
        return self._replace(entries=guess, seen=seen)

    def parts(self, count: int) -> list[Bin]:
        """Parts of the same length; but a millisecond that was full of entries stands alone."""
        if self.is_open:
            borders = {self.start + (1 << power) for power in range(64)}
        else:
            first, last = self.start // self.grain, -(-self.end // self.grain)
            step = max(1, -(-(last - first) // count))
            borders = {number * self.grain for number in range(first, last, step)}
            if self.seen is not None:
                full = self.seen // self.grain * self.grain
                borders |= {full, full + self.grain}
        inner = sorted(border for border in borders if self.start < border < self.end)
        return [Bin(*ends) for ends in pairwise([self.start, *inner, self.end])]

    def after(self, share: float) -> int:
        """The number behind such a share of its entries."""
        if self.seen is None or self.is_open:
            return self.end
        return self.start + max(1, int(share * (self.end - self.start)))


@dataclass(frozen=True, slots=True)
class Density:
    """The bins of a piece, in order."""

    stream: str
    bins: Sequence[Bin]

    @property
    def total(self) -> float:
        return sum(one.entries for one in self.bins)

    def finer(self, wire: Wire, look: int = LOOK) -> Density:
        """With another look at those bins whose entries were guessed, the largest of them."""
        guessed = [one for one in self.bins if one.seen is not None]
        # Of an open one nothing is known but that it has more: it may be the largest.
        guessed.sort(key=lambda one: (one.is_open, one.entries), reverse=True)
        again = set(guessed[:_MOST_BINS])
        if not again:
            return self
        finer = [part for one in again for part in one.parts(_PARTS)]
        kept = [one for one in self.bins if one not in again]
        return Density(self.stream, sorted([*kept, *_looked_at(wire, self.stream, finer, look)]))

    def cuts(self, count: int) -> list[str]:
        """Ids between which lie about as many entries, if there are that many; each ends a part."""
        reached = list(accumulate(one.entries for one in self.bins))
        if not reached or not reached[-1]:
            return []
        places = set()
        for number in range(1, count):
            wanted = reached[-1] * number / count
            at = bisect_left(reached, wanted)
            one = self.bins[at]
            places.add(one.after(1 - (reached[at] - wanted) / one.entries))
        return [_id(place - 1) for place in sorted(places) if place < self.bins[-1].end]


def density_of(wire: Wire, piece: Piece, look: int = LOOK) -> Density:
    """A first look at a piece."""
    [first] = first_ids(wire, [piece])
    if first is None:
        return Density(piece.stream, ())
    whole = Bin(_number(first), _number(piece.until) + 1)
    count = min(_MOST_BINS, max(_FEWEST_BINS, look // (4 * _LEAST_ENTRIES)))
    return Density(piece.stream, _looked_at(wire, piece.stream, whole.parts(count), look))


def first_ids(wire: Wire, pieces: Sequence[Piece]) -> list[str | None]:
    """The first entry that each piece has."""
    wanted = [(piece.stream, next_after(piece.after.encode()), piece.until) for piece in pieces]
    pages = _pages(wire, [(stream, first, last.encode()) for stream, first, last in wanted], 1)
    return [ids[0] if ids else None for ids in pages]


# --- asking ---------------------------------------------------------------------------------


def _looked_at(wire: Wire, stream: str, bins: Sequence[Bin], look: int) -> list[Bin]:
    most = min(_MOST_ENTRIES, max(_LEAST_ENTRIES, look // len(bins)))
    at_once = max(1, _CALL_ENTRIES // most)
    done: list[Bin] = []
    while len(done) < len(bins):
        some = bins[len(done) : len(done) + at_once]
        found = _probe(wire, stream, some, most)
        done += [one.with_entries(*said) for one, said in zip(some, found, strict=False)]
    return done


def _probe(wire: Wire, stream: str, bins: Sequence[Bin], most: int) -> list[tuple[int, str, int]]:
    """How many entries the first of these bins have, the last id, and how many were asked for."""
    key = stream.encode()
    ranges = [(_id(one.start).encode(), _id(one.end - 1).encode()) for one in bins]
    ends = [end for pair in ranges for end in pair]
    [reply] = ask(wire, [(key, (b"EVAL", _PROBE, 1, key, most, _CALL_BYTES, *ends))])
    if not isinstance(reply, Exception):
        return [(entries, last.decode(), asked) for entries, last, asked in reply]
    pages = _pages(wire, [(stream, *pair) for pair in ranges], _LEAST_ENTRIES)
    return [(len(ids), ids[-1] if ids else "", _LEAST_ENTRIES) for ids in pages]


def _pages(wire: Wire, ranges: Sequence[tuple[str, bytes, bytes]], count: int) -> list[list[str]]:
    """The ids of the first entries of each range of a stream."""
    commands = [
        (stream.encode(), (b"XRANGE", stream.encode(), first, last, b"COUNT", count))
        for stream, first, last in ranges
    ]
    replies = ask(wire, commands)
    for (stream, _, _), reply in zip(ranges, replies, strict=True):
        if isinstance(reply, Exception):
            raise StoreError(f"stream {stream!r} cannot be read: {reply}") from reply
    return [[entry_id.decode() for entry_id, _ in reply] for reply in replies]


def _number(entry_id: str) -> int:
    milliseconds, sequence = parts(entry_id)
    return milliseconds * _MS + sequence


def _id(number: int) -> str:
    return id_of(*divmod(number, _MS))
