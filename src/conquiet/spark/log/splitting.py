"""Splitting: cuts a large piece into parts of about the same number of entries.

The time between ids says nothing about how many entries there are: one burst can outweigh a day.
So the density is probed at many places, and the sum of what that promises is compared with the
number of entries, which is known. If they agree, the probes were good enough; else it is counted.
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
from conquiet.spark.log.piece import Piece, id_of, parts

_COUNTED_ANYWAY = 20_000
"""So few entries are counted in no time."""
_PROBES_PER_PART, _PROBE_ENTRIES = 64, 8
_BELIEVABLE = 0.75, 1.33
"""How far the sum of the probes may be from the truth."""


def split(wire: Wire, piece: Piece, count: int, way: Walk | None = None) -> list[Piece]:
    """So many parts, or fewer if it has not that many entries. `way` leads through it, if known."""
    if count < 2:
        return [piece]
    if way is not None and (way.piece.after, way.end) == (piece.after, piece.until):
        return _along(way, piece, count)
    if piece.entries is None or piece.entries > _COUNTED_ANYWAY:
        cuts = _probed(wire, piece, count)
        if cuts:
            return _with_firsts(wire, _between(piece, [(cut, None) for cut in cuts]))
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
    return _between(piece, cuts, last=way.walked - done)


def _between(
    piece: Piece, cuts: Sequence[tuple[str, int | None]], last: int | None = None
) -> list[Piece]:
    pieces = []
    after = piece.after
    for cut, entries in cuts:
        pieces.append(Piece(piece.stream, after, cut, entries))
        after = cut
    return [*pieces, Piece(piece.stream, after, piece.until, last)]


def _with_firsts(wire: Wire, pieces: Sequence[Piece]) -> list[Piece]:
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
    step = (last - first) // (_PROBES_PER_PART * count)
    if step < 1:
        return []
    places = list(range(first, last, step))
    weights = _weights(wire, piece, places, step)
    total = sum(weights)
    if piece.entries is not None:
        low, high = _BELIEVABLE
        if not low * piece.entries <= total <= high * piece.entries:
            return []
    if not total:
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
    found = _ask(wire, piece, [parts(piece.after)[0]], 1)
    return parts(found[0][0])[0] if found[0] else 0


def _weights(wire: Wire, piece: Piece, places: Sequence[int], step: int) -> list[float]:
    """About how many entries there are from each place to the next."""
    weights = []
    for place, ids in zip(places, _ask(wire, piece, places, _PROBE_ENTRIES), strict=True):
        inside = [ms for ms, _ in map(parts, ids) if ms < place + step]
        if len(inside) < _PROBE_ENTRIES:
            weights.append(float(len(inside)))
        else:
            # From the place itself, not from the first entry: the gap before it counts.
            weights.append(step * len(inside) / max(1, inside[-1] - place + 1))
    return weights


def _ask(wire: Wire, piece: Piece, places: Sequence[int], count: int) -> list[list[str]]:
    """The ids of the first entries after each place."""
    until = piece.until.encode()
    return _ids(wire, piece.stream, [(b"%d-0" % place, until) for place in places], count)


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
