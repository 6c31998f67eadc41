"""Waiting: entries in our hands that are to be delivered (again), each at its original place.

A message that failed waits a little. Whatever has its key waits with it, so that nothing
overtakes it; everything else flows on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from conquiet.redis.delivery import Delivery


@dataclass(slots=True, eq=False)
class Waiter:
    """An entry, the key whose order it keeps, from when on it may go, and as which delivery."""

    delivery: Delivery
    key: str
    not_before: float
    deliveries: int


class Waiting:
    """The waiting entries of all streams; whoever calls it holds the source's lock."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(list(self._waiters.values()))

    def add(self, waiter: Waiter) -> None:
        self._waiters[id(waiter.delivery)] = waiter

    def pop(self, delivery: Delivery) -> Waiter | None:
        return self._waiters.pop(id(delivery), None)

    def take(self, limit: int, now: float) -> list[Waiter]:
        """Up to `limit` that may go now, in the order of the log."""
        taken: list[Waiter] = []
        held_back: set[str] = set()
        for waiter in sorted(self._waiters.values(), key=lambda item: item.delivery.place):
            if waiter.not_before > now or waiter.key in held_back:
                if waiter.key:
                    held_back.add(waiter.key)
                continue
            if len(taken) == limit:
                break
            taken.append(waiter)
        for waiter in taken:
            del self._waiters[id(waiter.delivery)]
        return taken

    def keys(self) -> set[str]:
        """The keys of which something waits: later entries of theirs must wait too."""
        return {waiter.key for waiter in self._waiters.values() if waiter.key}

    def next_due(self, now: float) -> float:
        """When the next of them may go; what is due but stands behind another waits for that."""
        times = (waiter.not_before for waiter in self._waiters.values())
        return min((moment for moment in times if moment > now), default=math.inf)
