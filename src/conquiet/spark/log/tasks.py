"""Tasks: which task reads which ranges; large ranges are split, small ones packed together.

A range is split by a sample of its entries, if the sum that the sample promises agrees with the
number of entries, where that is known. Otherwise the entries are indexed, unless indexing would
take longer than uneven tasks cost.
"""

from __future__ import annotations

import heapq
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from conquiet.errors import StoreError
from conquiet.redis import ids
from conquiet.redis.wire import Wire
from conquiet.spark.columns import CORES_VARIABLE
from conquiet.spark.log.connection import ask
from conquiet.spark.log.ranges import EntryRange, RangeIndex, index_ranges

WORTH_A_TASK = 20_000
"""Entries that are read in about the time that it takes to start a task."""
MOST_PER_TASK = 2_000_000
"""Entries that a failed task reads again, at most, and the longest time it reports nothing."""
_UNEVEN = 1.25

INDEXED_ANYWAY = 20_000
"""Ranges of at most so many entries are indexed without a sample."""
_MANY = 200_000
"""Ranges of so many entries take longer to index than somewhat uneven tasks cost."""
_REFINEMENTS = 3
"""Further samples, while the sum is off or there is no number to compare it with."""
_TOLERANCE, _TOLERANCE_OF_MANY = 4 / 3, 2.5
"""The factor by which the sum of a sample may be off the number of entries."""
_AT_ONCE = 50
"""Ranges whose first entries are read together, with all their data."""

SAMPLE_ENTRIES = 64_000
"""Entries that one sample of a range looks at, in all; about 0.1 s of Redis."""
_FEWEST_PARTS, _MOST_PARTS = 16, 256
_REFINED_INTO = 16
"""Parts into which a part is cut that is sampled again; at most _MOST_PARTS are."""
_LEAST_ENTRIES, _MOST_ENTRIES = 8, 250
"""Entries that are sampled of a part. The least also where scripts are not allowed and entries must
be sent; a part with more than the most is worth a cut."""
_CALL_ENTRIES, _CALL_BYTES = 4_000, 4_000_000
"""Entries and bytes that one call takes into the script: Redis serves no other client meanwhile."""
_MS = 1 << 64
"""Ids as numbers: a millisecond has room for so many."""


class LogPartition(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: Sequence[EntryRange]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)


def plan_tasks(
    wire: Wire,
    ranges: Sequence[EntryRange],
    min_tasks: int = 0,
    max_entries: int | None = None,
    indexes: Mapping[str, RangeIndex] | None = None,
) -> list[LogPartition]:
    """Return tasks of about the same number of entries.

    There are at least `min_tasks`, even if they are small, and none has many more entries than
    `max_entries`. `indexes` are those of ranges whose entries were counted already, by stream.
    """
    if not ranges:
        return []
    known = indexes or {}
    sized = _sizes(wire, ranges, known)
    total = sum(size for _, size, _ in sized)
    tasks = min(ceil(total / WORTH_A_TASK), _cores())
    tasks = max(1, tasks, min_tasks, ceil(total / (max_entries or MOST_PER_TASK)))
    share = total / tasks
    weights: list[float] = []
    parts: list[EntryRange] = []
    for one, size, sample in sized:
        count = ceil(size / share) if size > _UNEVEN * share else 1
        cut = split(wire, one, count, known.get(one.stream), sample)
        weights.extend(part.entries or size / len(cut) for part in cut)
        parts.extend(cut)
    return _pack(list(zip(weights, _with_firsts(wire, parts), strict=True)), tasks)


def _cores() -> int:
    """Return the cores of the executors, or of this machine where they are not known."""
    given = os.environ.get(CORES_VARIABLE, "")
    return int(given) if given.isdecimal() and int(given) else os.cpu_count() or 1


def _sizes(
    wire: Wire, ranges: Sequence[EntryRange], indexes: Mapping[str, RangeIndex]
) -> list[tuple[EntryRange, float, Sample | None]]:
    """Return each range, how many entries it has, and its sample if one had to be taken."""
    sized: list[tuple[EntryRange, float, Sample | None]] = []
    unknown: list[EntryRange] = []
    for one in ranges:
        index = indexes.get(one.stream)
        if index is not None and index.covers(one):
            sized.append((one, max(1, index.entries), None))
        elif one.entries is not None:
            sized.append((one, max(1, one.entries), None))
        elif one.at_most is not None and one.at_most <= WORTH_A_TASK:
            sized.append((one, max(1, one.at_most), None))
        else:
            unknown.append(one)
    for one in unknown:
        sample = credible_sample(wire, one, SAMPLE_ENTRIES // len(unknown))
        found = sample.total if sample is not None else 0.0
        sized.append((one, max(1.0, min(found, one.at_most or found)), sample))
    return sized


def _pack(weighed: Sequence[tuple[float, EntryRange]], tasks: int) -> list[LogPartition]:
    """Give each range, the largest first, to the task that has least."""
    chosen: list[list[EntryRange]] = [[] for _ in range(min(tasks, len(weighed)))]
    loads = [(0.0, number) for number in range(len(chosen))]
    for weight, one in sorted(weighed, key=lambda item: item[0], reverse=True):
        load, number = heapq.heappop(loads)
        chosen[number].append(one)
        heapq.heappush(loads, (load + weight, number))
    return [LogPartition(item) for item in chosen]


def _with_firsts(wire: Wire, ranges: Sequence[EntryRange]) -> list[EntryRange]:
    """Add the first entry to ranges that were not counted, by which a trim can be noticed."""
    uncounted = [one for one in ranges if one.entries is None]
    firsts: dict[EntryRange, str | None] = {}
    for at in range(0, len(uncounted), _AT_ONCE):
        some = uncounted[at : at + _AT_ONCE]
        firsts |= zip(some, first_ids(wire, some), strict=True)
    return [one._replace(first=firsts.get(one)) for one in ranges]


# --- splitting ------------------------------------------------------------------------------


def split(
    wire: Wire,
    whole: EntryRange,
    count: int,
    index: RangeIndex | None = None,
    sample: Sample | None = None,
) -> list[EntryRange]:
    """Split a range into `count` parts, or fewer if it has fewer entries.

    `index` and `sample` are those of the range, if they exist already.
    """
    if count < 2:
        return [whole]
    if index is not None and index.covers(whole):
        return _split_by_index(index, whole, count)
    at_most = whole.at_most if whole.entries is None else whole.entries
    if sample is None and (at_most is None or at_most > INDEXED_ANYWAY):
        sample = credible_sample(wire, whole)
    cuts = sample.cuts(count) if sample is not None else []
    if cuts:
        return _cut(whole, [(cut, None) for cut in cuts])
    [index] = index_ranges(wire, [(whole, whole.entries if whole.entries is not None else 2**62)])
    return _split_by_index(index, whole, count)


def _split_by_index(index: RangeIndex, whole: EntryRange, count: int) -> list[EntryRange]:
    """Return parts that end where pages of the index end."""
    places = [at for at, _ in index.marks]
    cuts: list[tuple[str, int | None]] = []
    done = 0
    for number in range(1, count):
        mark = bisect_left(places, index.entries * number // count)
        if mark < len(places) - 1 and places[mark] > done:
            cuts.append((index.marks[mark][1], places[mark] - done))
            done = places[mark]
    # The number that the range must have, not the number counted now: a task then notices a loss.
    expected = index.entries if whole.entries is None else whole.entries
    return _cut(whole, cuts, last=expected - done)


def _cut(
    whole: EntryRange, cuts: Sequence[tuple[str, int | None]], last: int | None = None
) -> list[EntryRange]:
    parts = []
    after = whole.after
    for cut, entries in cuts:
        parts.append(EntryRange(whole.stream, after, cut, entries))
        after = cut
    return [*parts, EntryRange(whole.stream, after, whole.until, last)]


# --- samples --------------------------------------------------------------------------------

# KEYS[1]  the stream
# ARGV     how many entries of a part, and how many bytes in all, at most; then the first and the
#          last id of each part
# Returns, for as many parts as there were bytes for: how many entries there were, the last of their
# ids, and how many were asked for.
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


class SampledPart(NamedTuple):
    """A part of a range, its ids as numbers, and an estimate of its entries."""

    start: int
    end: int
    """Exclusive."""
    entries: float = 0.0
    seen: int | None = None
    """The last id that was sampled, if there are more entries: their number is then a guess."""

    @property
    def is_open(self) -> bool:
        """Return whether it is in one millisecond and ends with it: its last entry is unknown."""
        return self.end - self.start <= _MS and self.end % _MS == 0

    @property
    def grain(self) -> int:
        return _MS if self.end - self.start > _MS else 1

    def with_entries(self, entries: int, last: str, asked: int) -> SampledPart:
        """Return the part with the entries that were found in it."""
        if entries < asked:
            return self._replace(entries=float(entries))
        seen, first = _number(last), self.start // self.grain
        length, looked = -(-self.end // self.grain) - first, seen // self.grain - first + 1
        # From its start, not from its first entry: the gap before that counts.
        guess = entries * (1.0 if self.is_open else length / looked)
        return self._replace(entries=guess, seen=seen)

    def cut(self, count: int) -> list[SampledPart]:
        """Cut into parts of the same length; a millisecond full of entries becomes its own part."""
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
        return [SampledPart(*ends) for ends in pairwise([self.start, *inner, self.end])]

    def after(self, share: float) -> int:
        """Return the number behind such a share of its entries."""
        if self.seen is None or self.is_open:
            return self.end
        return self.start + max(1, int(share * (self.end - self.start)))


@dataclass(frozen=True, slots=True)
class Sample:
    """Where the entries of a range lie, by a look at the first entries of each of its parts.

    The time between two ids says nothing about how many entries are between them: one burst can
    outweigh a day. A part whose entries were guessed can be sampled again, in smaller parts.
    """

    stream: str
    parts: Sequence[SampledPart]

    @property
    def total(self) -> float:
        return sum(one.entries for one in self.parts)

    def refine(self, wire: Wire, entries: int = SAMPLE_ENTRIES) -> Sample:
        """Sample the largest of the guessed parts again."""
        guessed = [one for one in self.parts if one.seen is not None]
        # Of an open part it is only known that it has more entries: it may be the largest.
        guessed.sort(key=lambda one: (one.is_open, one.entries), reverse=True)
        again = set(guessed[:_MOST_PARTS])
        if not again:
            return self
        finer = [part for one in again for part in one.cut(_REFINED_INTO)]
        kept = [one for one in self.parts if one not in again]
        return Sample(self.stream, sorted([*kept, *_look_at(wire, self.stream, finer, entries)]))

    def cuts(self, count: int) -> list[str]:
        """Return the ids that end each of `count` parts with about the same number of entries."""
        reached = list(accumulate(one.entries for one in self.parts))
        if not reached or not reached[-1]:
            return []
        places = set()
        for number in range(1, count):
            wanted = reached[-1] * number / count
            at = bisect_left(reached, wanted)
            one = self.parts[at]
            places.add(one.after(1 - (reached[at] - wanted) / one.entries))
        return [_id(place - 1) for place in sorted(places) if place < self.parts[-1].end]


def credible_sample(wire: Wire, whole: EntryRange, entries: int = SAMPLE_ENTRIES) -> Sample | None:
    """Sample a range; None if the sum is not credible and the range can be indexed instead."""
    sample = take_sample(wire, whole, entries)
    for _ in range(_REFINEMENTS):
        if whole.entries is not None and _is_near(sample.total, whole.entries, _TOLERANCE):
            return sample
        sample = sample.refine(wire, entries)
    if whole.entries is None:
        return sample
    factor = _TOLERANCE if whole.entries < _MANY else _TOLERANCE_OF_MANY
    return sample if _is_near(sample.total, whole.entries, factor) else None


def _is_near(guess: float, entries: int, factor: float) -> bool:
    return entries / factor <= guess <= entries * factor


def take_sample(wire: Wire, whole: EntryRange, entries: int = SAMPLE_ENTRIES) -> Sample:
    """Take a first sample of a range."""
    [first] = first_ids(wire, [whole])
    if first is None:
        return Sample(whole.stream, ())
    everything = SampledPart(_number(first), _number(whole.until) + 1)
    count = min(_MOST_PARTS, max(_FEWEST_PARTS, entries // (4 * _LEAST_ENTRIES)))
    return Sample(whole.stream, _look_at(wire, whole.stream, everything.cut(count), entries))


def first_ids(wire: Wire, ranges: Sequence[EntryRange]) -> list[str | None]:
    """Return the first entry of each range."""
    wanted = [(one.stream, ids.next_after(one.after.encode()), one.until) for one in ranges]
    pages = _pages(wire, [(stream, first, last.encode()) for stream, first, last in wanted], 1)
    return [found[0] if found else None for found in pages]


def _look_at(
    wire: Wire, stream: str, parts: Sequence[SampledPart], entries: int
) -> list[SampledPart]:
    most = min(_MOST_ENTRIES, max(_LEAST_ENTRIES, entries // len(parts)))
    at_once = max(1, _CALL_ENTRIES // most)
    done: list[SampledPart] = []
    while len(done) < len(parts):
        some = parts[len(done) : len(done) + at_once]
        found = _probe(wire, stream, some, most)
        done += [one.with_entries(*said) for one, said in zip(some, found, strict=False)]
    return done


def _probe(
    wire: Wire, stream: str, parts: Sequence[SampledPart], most: int
) -> list[tuple[int, str, int]]:
    """Return of the first parts: how many entries, the last id, how many were asked for."""
    key = stream.encode()
    bounds = [(_id(one.start).encode(), _id(one.end - 1).encode()) for one in parts]
    ends = [end for pair in bounds for end in pair]
    [reply] = ask(wire, [(key, (b"EVAL", _PROBE, 1, key, most, _CALL_BYTES, *ends))])
    if not isinstance(reply, Exception):
        return [(entries, last.decode(), asked) for entries, last, asked in reply]
    pages = _pages(wire, [(stream, *pair) for pair in bounds], _LEAST_ENTRIES)
    return [(len(found), found[-1] if found else "", _LEAST_ENTRIES) for found in pages]


def _pages(wire: Wire, bounds: Sequence[tuple[str, bytes, bytes]], count: int) -> list[list[str]]:
    """Return the ids of the first entries between two ids of a stream, for each pair."""
    commands = [
        (stream.encode(), (b"XRANGE", stream.encode(), first, last, b"COUNT", count))
        for stream, first, last in bounds
    ]
    replies = ask(wire, commands)
    for (stream, _, _), reply in zip(bounds, replies, strict=True):
        if isinstance(reply, Exception):
            raise StoreError(f"stream {stream!r} cannot be read: {reply}") from reply
    return [[entry_id.decode() for entry_id, _ in reply] for reply in replies]


def _number(entry_id: str) -> int:
    milliseconds, sequence = ids.parse(entry_id)
    return milliseconds * _MS + sequence


def _id(number: int) -> str:
    return ids.format(*divmod(number, _MS))
