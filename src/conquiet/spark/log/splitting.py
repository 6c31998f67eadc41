"""Splitting: cuts a large piece into parts of about the same number of entries.

The time between ids says nothing about how many entries there are: one burst can outweigh a day.
So the density is probed at many places, and the sum of what that promises is compared with the
number of entries, which is known. If they agree, the probes were good enough; else it is counted,
unless counting would take longer than parts that are not even.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from conquiet.errors import StoreError
from conquiet.redis.delivery import id_after
from conquiet.redis.wire import Wire
from conquiet.spark.log.asking import ask
from conquiet.spark.log.counting import Walk, walk
from conquiet.spark.log.piece import LARGEST, Piece, id_of, parts

_COUNTED_ANYWAY = 20_000
"""So few entries are counted in no time."""
_MANY = 200_000
"""So many take longer to count than parts cost that are somewhat uneven."""
_PROBES_PER_PART, _MOST_PROBES = 64, 512
_PROBED_ENTRIES = 64_000
"""Of all probes together; a burst has hundreds of entries in a millisecond."""
_PROBES_PER_CALL = 16
_PLAIN_PROBE_ENTRIES = 8
"""Of one probe, where its entries must be sent."""
_BELIEVABLE, _BELIEVABLE_OF_MANY = 4 / 3, 2.5
"""By which factor the sum of the probes may be off the truth."""

# KEYS[1]  the stream
# ARGV     how many entries at most, then the first and the last id of each probe
# Answers with how many entries there were, and the last of their ids, for each.
_PROBE = b"""
local found = {}
for at = 2, #ARGV, 2 do
  local entries = redis.call('XRANGE', KEYS[1], ARGV[at], ARGV[at + 1], 'COUNT', ARGV[1])
  local last = entries[#entries]
  found[#found + 1] = {#entries, last and last[1] or ''}
end
return found
"""


def split(wire: Wire, piece: Piece, count: int, way: Walk | None = None) -> list[Piece]:
    """So many parts, or fewer if it has not that many entries. `way` leads through it, if known."""
    if count < 2:
        return [piece]
    if way is not None and (way.piece.after, way.end) == (piece.after, piece.until):
        return _along(way, piece, count)
    if piece.entries is None or piece.entries > _COUNTED_ANYWAY:
        cuts = _probed(wire, piece, count)
        if cuts:
            return with_firsts(wire, _between(piece, [(cut, None) for cut in cuts]))
    [way] = walk(wire, [(piece, piece.entries if piece.entries is not None else 2**62)])
    return _along(way, piece, count)


def _along(way: Walk, piece: Piece, count: int) -> list[Piece]:
    """Parts that end where pages end."""
    places = [at for at, _ in way.marks]
    cuts: list[tuple[str, int | None]] = []
    done = 0
    for number in range(1, count):
        mark = bisect_left(places, way.walked * number // count)
        if mark < len(places) - 1 and places[mark] > done:
            cuts.append((way.marks[mark][1], places[mark] - done))
            done = places[mark]
    # What the piece should have, not what is left of it now: then the last part is found short.
    expected = way.walked if piece.entries is None else piece.entries
    return _between(piece, cuts, last=expected - done)


def _between(
    piece: Piece, cuts: Sequence[tuple[str, int | None]], last: int | None = None
) -> list[Piece]:
    pieces = []
    after = piece.after
    for cut, entries in cuts:
        pieces.append(Piece(piece.stream, after, cut, entries))
        after = cut
    return [*pieces, Piece(piece.stream, after, piece.until, last)]


def with_firsts(wire: Wire, pieces: Sequence[Piece]) -> list[Piece]:
    """Nobody counted these parts: by their first entries it can be told that one was trimmed."""
    ranges = [(id_after(piece.after.encode()), piece.until.encode()) for piece in pieces]
    found = _ids(wire, pieces[0].stream, ranges, 1)
    return [
        piece._replace(first=ids[0] if ids else None)
        for piece, ids in zip(pieces, found, strict=True)
    ]


# --- probes ---------------------------------------------------------------------------------


def _probed(wire: Wire, piece: Piece, count: int) -> list[str]:
    """Where to cut, by the density of ids; nothing if the probes cannot be believed."""
    first, last = max(parts(piece.after)[0], _first_ms(wire, piece)), parts(piece.until)[0]
    step = (last - first) // min(_PROBES_PER_PART * count, _MOST_PROBES)
    if step < 1:
        return []
    places = list(range(first, last + 1, step))
    weights = _weights(wire, piece, places, step)
    total = sum(weights)
    if not total:
        return []
    if piece.entries is not None:
        factor = _BELIEVABLE if piece.entries < _MANY else _BELIEVABLE_OF_MANY
        if not piece.entries / factor <= total <= piece.entries * factor:
            return []
    reached = list(accumulate(weights))
    cuts: list[str] = []
    for number in range(1, count):
        at = bisect_left(reached, total * number / count)
        cut = id_of(places[at] + step)
        if parts(cut) < parts(piece.until) and (not cuts or cut != cuts[-1]):
            cuts.append(cut)
    return cuts


def _first_ms(wire: Wire, piece: Piece) -> int:
    start = id_of(parts(piece.after)[0]).encode()
    [found] = _ids(wire, piece.stream, [(start, piece.until.encode())], 1)
    return parts(found[0])[0] if found else 0


def _weights(wire: Wire, piece: Piece, places: Sequence[int], step: int) -> list[float]:
    """About how many entries there are from each place to the next."""
    most = max(_PLAIN_PROBE_ENTRIES, _PROBED_ENTRIES // len(places))
    weights: list[float] = []
    for start in range(0, len(places), _PROBES_PER_CALL):
        some = places[start : start + _PROBES_PER_CALL]
        ranges = [(b"%d-0" % place, b"%d" % min(place + step - 1, LARGEST)) for place in some]
        limit, found = most, _probe(wire, piece.stream, ranges, most)
        if found is None:
            limit = _PLAIN_PROBE_ENTRIES
            pages = _ids(wire, piece.stream, ranges, limit)
            found = [(len(ids), ids[-1] if ids else "") for ids in pages]
        for place, (entries, last) in zip(some, found, strict=True):
            # From the place itself, not from the first entry: the gap before it counts.
            share = 1.0 if entries < limit else step / (parts(last)[0] - place + 1)
            weights.append(entries * share)
    return weights


def _probe(
    wire: Wire, stream: str, ranges: Sequence[tuple[bytes, bytes]], most: int
) -> list[tuple[int, str]] | None:
    """How many entries each range has, up to so many, and their last id; None without scripts."""
    key = stream.encode()
    ends = [end for pair in ranges for end in pair]
    [reply] = ask(wire, [(key, (b"EVAL", _PROBE, 1, key, most, *ends))])
    if isinstance(reply, Exception):
        return None
    return [(entries, last.decode()) for entries, last in reply]


def _ids(
    wire: Wire, stream: str, ranges: Sequence[tuple[bytes, bytes]], count: int
) -> list[list[str]]:
    """The ids of the first entries of each range."""
    key = stream.encode()
    commands = [(key, (b"XRANGE", key, *ends, b"COUNT", count)) for ends in ranges]
    replies = ask(wire, commands)
    for reply in replies:
        if isinstance(reply, Exception):
            raise StoreError(f"stream {stream!r} cannot be read: {reply}") from reply
    return [[entry_id.decode() for entry_id, _ in reply] for reply in replies]
