"""Tasks: which task reads which pieces."""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from math import ceil

from pyspark.sql.datasource import InputPartition

from conquiet.redis.wire import Wire
from conquiet.spark.log.counting import Walk
from conquiet.spark.log.piece import Piece
from conquiet.spark.log.splitting import split

WORTH_A_TASK = 20_000
"""Entries that are read in about the time that it takes to start a task."""
MOST_PER_TASK = 2_000_000
"""What a task that failed does again, at the most, and the longest that it is silent."""
_UNKNOWN = 10_000
"""Entries of a piece of which nobody knows how many it has."""
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
    total = sum(_size(piece) for piece in pieces)
    if not pieces:
        return []
    # The planner cannot see the cluster; on one machine its cores are those that will work.
    tasks = min(ceil(total / WORTH_A_TASK), os.cpu_count() or 1)
    tasks = max(1, tasks, least, ceil(total / (most_entries or MOST_PER_TASK)))
    size = total / tasks
    weighed: list[tuple[float, Piece]] = []
    for piece in pieces:
        count = ceil(_size(piece) / size) if _size(piece) > _UNEVEN * size else 1
        cut = split(wire, piece, count, (ways or {}).get(piece.stream))
        weighed.extend((part.entries or _size(piece) / len(cut), part) for part in cut)
    return _pack(weighed, tasks)


def _pack(weighed: Sequence[tuple[float, Piece]], tasks: int) -> list[LogPartition]:
    """The largest first, each to the task that has least."""
    bins: list[list[Piece]] = [[] for _ in range(min(tasks, len(weighed)))]
    loads = [(0.0, number) for number in range(len(bins))]
    for weight, piece in sorted(weighed, key=lambda item: item[0], reverse=True):
        load, number = heapq.heappop(loads)
        bins[number].append(piece)
        heapq.heappush(loads, (load + weight, number))
    return [LogPartition(item) for item in bins]


def _size(piece: Piece) -> int:
    return _UNKNOWN if piece.entries is None else max(1, piece.entries)
