"""Splitting: cuts a large piece into parts of about the same number of entries.

By its density, if the sum of what that promises agrees with the number of entries, where that is
known. Else the entries are counted, unless counting would take longer than parts that are not even.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from conquiet.redis.wire import Wire
from conquiet.spark.log.counting import Walk, walk
from conquiet.spark.log.density import LOOK, Density, density_of, first_ids
from conquiet.spark.log.piece import Piece

_COUNTED_ANYWAY = 20_000
"""So few entries are counted in no time."""
_MANY = 200_000
"""So many take longer to count than parts cost that are somewhat uneven."""
_MORE_LOOKS = 3
"""As long as the sum is off, or if there is none to compare with."""
_BELIEVABLE, _BELIEVABLE_OF_MANY = 4 / 3, 2.5
"""By which factor the sum of the bins may be off the truth."""
_AT_ONCE = 1_000


def split(
    wire: Wire, piece: Piece, count: int, way: Walk | None = None, density: Density | None = None
) -> list[Piece]:
    """So many parts, or fewer if it has not that many entries.

    `way` leads through it, and `density` tells where its entries lie, if that is known already.
    """
    if count < 2:
        return [piece]
    if way is not None and leads_through(way, piece):
        return _along(way, piece, count)
    at_most = piece.at_most if piece.entries is None else piece.entries
    if density is None and (at_most is None or at_most > _COUNTED_ANYWAY):
        density = probed(wire, piece)
    cuts = density.cuts(count) if density is not None else []
    if cuts:
        return _between(piece, [(cut, None) for cut in cuts])
    [way] = walk(wire, [(piece, piece.entries if piece.entries is not None else 2**62)])
    return _along(way, piece, count)


def leads_through(way: Walk, piece: Piece) -> bool:
    return (way.piece.after, way.end) == (piece.after, piece.until)


def probed(wire: Wire, piece: Piece, look: int = LOOK) -> Density | None:
    """Where the entries of a piece lie; None if that cannot be believed, and can be counted."""
    density = density_of(wire, piece, look)
    for _ in range(_MORE_LOOKS):
        if piece.entries is not None and _is_near(density.total, piece.entries, _BELIEVABLE):
            return density
        density = density.finer(wire, look)
    if piece.entries is None:
        return density
    factor = _BELIEVABLE if piece.entries < _MANY else _BELIEVABLE_OF_MANY
    return density if _is_near(density.total, piece.entries, factor) else None


def _is_near(guess: float, entries: int, factor: float) -> bool:
    return entries / factor <= guess <= entries * factor


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
    """Of pieces that nobody counted, the first entries: by them it can be told that one was
    trimmed."""
    uncounted = [piece for piece in pieces if piece.entries is None]
    firsts: dict[Piece, str | None] = {}
    for at in range(0, len(uncounted), _AT_ONCE):
        some = uncounted[at : at + _AT_ONCE]
        firsts |= zip(some, first_ids(wire, some), strict=True)
    return [piece._replace(first=firsts.get(piece)) for piece in pieces]
