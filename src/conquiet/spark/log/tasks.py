"""Tasks: which task reads which pieces."""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from math import ceil

from pyspark.sql.datasource import InputPartition

from conquiet.redis.wire import Wire
from conquiet.spark.log.counting import Walk
from conquiet.spark.log.density import LOOK, Density
from conquiet.spark.log.piece import Piece
from conquiet.spark.log.splitting import leads_through, probed, split, with_firsts

WORTH_A_TASK = 20_000
"""Entries that are read in about the time that it takes to start a task."""
MOST_PER_TASK = 2_000_000
"""What a task that failed does again, at the most, and the longest that it is silent."""
_UNEVEN = 1.25


class LogPartition(InputPartition):
    """What one task reads."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(None)
        self.pieces = tuple(pieces)


def plan(
    wire: Wire,
    pieces: Sequence[Piece],
    least: int = 0,
    most_entries: int | None = None,
    ways: Mapping[str, Walk] | None = None,
) -> list[LogPartition]:
    """Tasks of about the same number of entries: large pieces are split, small ones packed.

    `least` tasks, even if they are small; no task with many more than `most_entries`. `ways`
    lead through pieces whose entries were counted already.
    """
    if not pieces:
        return []
    known = ways or {}
    sized = _sized(wire, pieces, known)
    total = sum(size for _, size, _ in sized)
    # The planner cannot see the cluster; on one machine its cores are those that will work.
    tasks = min(ceil(total / WORTH_A_TASK), os.cpu_count() or 1)
    tasks = max(1, tasks, least, ceil(total / (most_entries or MOST_PER_TASK)))
    share = total / tasks
    weights: list[float] = []
    parts: list[Piece] = []
    for piece, size, density in sized:
        count = ceil(size / share) if size > _UNEVEN * share else 1
        cut = split(wire, piece, count, known.get(piece.stream), density)
        weights.extend(part.entries or size / len(cut) for part in cut)
        parts.extend(cut)
    return _pack(list(zip(weights, with_firsts(wire, parts), strict=True)), tasks)


def _sized(
    wire: Wire, pieces: Sequence[Piece], ways: Mapping[str, Walk]
) -> list[tuple[Piece, float, Density | None]]:
    """Each piece, how many entries it has, and where they lie if they had to be looked at."""
    sized: list[tuple[Piece, float, Density | None]] = []
    unknown: list[Piece] = []
    for piece in pieces:
        way = ways.get(piece.stream)
        if way is not None and leads_through(way, piece):
            sized.append((piece, max(1, way.walked), None))
        elif piece.entries is not None:
            sized.append((piece, max(1, piece.entries), None))
        elif piece.at_most is not None and piece.at_most <= WORTH_A_TASK:
            sized.append((piece, max(1, piece.at_most), None))
        else:
            unknown.append(piece)
    for piece in unknown:
        density = probed(wire, piece, LOOK // len(unknown))
        found = density.total if density is not None else 0.0
        sized.append((piece, max(1.0, min(found, piece.at_most or found)), density))
    return sized


def _pack(weighed: Sequence[tuple[float, Piece]], tasks: int) -> list[LogPartition]:
    """The largest first, each to the task that has least."""
    bins: list[list[Piece]] = [[] for _ in range(min(tasks, len(weighed)))]
    loads = [(0.0, number) for number in range(len(bins))]
    for weight, piece in sorted(weighed, key=lambda item: item[0], reverse=True):
        load, number = heapq.heappop(loads)
        bins[number].append(piece)
        heapq.heappush(loads, (load + weight, number))
    return [LogPartition(item) for item in bins]
