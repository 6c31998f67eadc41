"""Limiting: where a micro-batch ends that may have only so many entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from conquiet.redis.wire import Wire
from conquiet.spark.log.counting import Walk, walk
from conquiet.spark.log.offsets import Position, entries_between
from conquiet.spark.log.piece import Piece, parts


class Limited(NamedTuple):
    """The ends that are within a limit, and the ways that were walked to find them."""

    ends: dict[str, Position]
    ways: dict[str, Walk]


def limited(
    wire: Wire, starts: Mapping[str, Position], ends: Mapping[str, Position], limit: int
) -> Limited:
    """The ends that are within the limit, exactly.

    Each stream has its share of what waits, and none waits for ever.
    """
    waiting = _waiting(wire, starts, ends, limit)
    total = sum(waiting.values())
    if total <= limit:
        return Limited(dict(ends), {})
    shares = _shares(waiting, limit, starts)
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
    return Limited(result, ways)


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


def _shares(
    waiting: Mapping[str, int], limit: int, starts: Mapping[str, Position]
) -> dict[str, int]:
    """One for each stream, so that none starves, and more in proportion to what waits.

    What rounding leaves over goes to those who lost most by it.
    """
    busy = {name: entries - 1 for name, entries in waiting.items() if entries}
    left = limit - len(busy)
    if left <= 0:  # those whose turn was longest ago
        turns = sorted(busy, key=lambda name: (parts(starts[name].id), name))
        return dict.fromkeys(waiting, 0) | dict.fromkeys(turns[:limit], 1)
    exact = {name: left * entries / sum(busy.values()) for name, entries in busy.items()}
    shares = {name: int(share) for name, share in exact.items()}
    left -= sum(shares.values())
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[:left]:
        shares[name] += 1
    return dict.fromkeys(waiting, 0) | {name: share + 1 for name, share in shares.items()}
