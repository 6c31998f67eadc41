"""Limiting: where a micro-batch ends that may have only so many entries."""

from __future__ import annotations

from collections.abc import Mapping

from conquiet.redis.wire import Wire
from conquiet.spark.log.counting import Walk, walk
from conquiet.spark.log.offsets import Position, entries_between
from conquiet.spark.log.piece import Piece


def limited(
    wire: Wire, starts: Mapping[str, Position], ends: Mapping[str, Position], limit: int
) -> tuple[dict[str, Position], dict[str, Walk]]:
    """The ends that are within the limit, exactly, and the ways that were walked to find them.

    Each stream has its share of what waits.
    """
    waiting = _waiting(wire, starts, ends, limit)
    total = sum(waiting.values())
    if total <= limit:
        return dict(ends), {}
    shares = _shares(waiting, limit, total)
    cut = {name: share for name, share in shares.items() if share < waiting[name]}
    wanted = [
        (Piece(name, starts[name].id, ends[name].id, waiting[name]), share)
        for name, share in cut.items()
    ]
    result = dict(ends)
    ways = {way.piece.stream: way for way in walk(wire, wanted)}
    for name, way in ways.items():
        start = starts[name]
        if way.end != ends[name].id:
            added = None if start.added is None else start.added + way.walked
            result[name] = Position(way.end, added) if way.walked else start
    return result, ways


def _waiting(
    wire: Wire, starts: Mapping[str, Position], ends: Mapping[str, Position], limit: int
) -> dict[str, int]:
    """How many entries each stream has; of those that nobody counted, no more than the limit."""
    waiting: dict[str, int] = {}
    unknown: list[Piece] = []
    for name, end in ends.items():
        start = starts[name]
        entries = entries_between(start, end) if end.is_after(start) else 0
        if entries is None:
            unknown.append(Piece(name, start.id, end.id))
        else:
            waiting[name] = entries
    for way in walk(wire, [(piece, limit + 1) for piece in unknown]):
        waiting[way.piece.stream] = way.walked
    return waiting


def _shares(waiting: Mapping[str, int], limit: int, total: int) -> dict[str, int]:
    """In proportion to what waits; what is left over by rounding goes to those who lost most."""
    exact = {name: limit * entries / total for name, entries in waiting.items()}
    shares = {name: int(share) for name, share in exact.items()}
    left = limit - sum(shares.values())
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[:left]:
        shares[name] += 1
    return shares
