"""Resting: rows that failed a moment ago are left alone for a while."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

_FIRST_REST_SECONDS = 1.0
_LONGEST_REST_SECONDS = 300.0
_LONGEST_OUTAGE_SECONDS = 10.0
"""The longest rest by nobody's fault: what an outage's end may go unnoticed for."""
_MOST_RESTING = 10_000


class Resting:
    """Rows that failed here a moment ago; claims leave them alone until their rest is over.

    It is kept in memory, since a restart may well be what cures them. Rows that failed by
    nobody's fault come back as soon as anything is published again, and not all at once: those
    that fail by themselves then stand among others that do not.
    """

    def __init__(self, *, by_key: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_key = by_key
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[Hashable, _Rest] = {}
        self._blameless = 0

    def add(self, id_: Hashable, key: str | None, attempts: int, *, costs: bool) -> None:
        with self._lock:
            former = self._pop(id_)
            times = max(attempts, former.times + 1 if former else 0)
            longest = _LONGEST_REST_SECONDS if costs else _LONGEST_OUTAGE_SECONDS
            seconds = min(longest, _FIRST_REST_SECONDS * 2.0 ** min(times, 60))
            until = self._clock() + seconds * random.uniform(0.5, 1.0)
            if len(self._rows) >= _MOST_RESTING:
                self._pop(next(iter(self._rows)))
            self._rows[id_] = _Rest(until, times, key, costs)
            self._blameless += not costs

    def forget(self, published: Iterable[Hashable]) -> None:
        """These went out: whatever else was held up by an outage may try again."""
        if not self._rows:
            return
        with self._lock:
            for id_ in published:
                self._pop(id_)
            if self._blameless:
                soon = self._clock()
                for id_, rest in self._rows.items():
                    if not rest.costs:
                        until = min(rest.until, soon + random.uniform(0, _FIRST_REST_SECONDS))
                        self._rows[id_] = rest._replace(until=until, costs=True)
                self._blameless = 0

    def _pop(self, id_: Hashable) -> _Rest | None:
        rest = self._rows.pop(id_, None)
        if rest is not None:
            self._blameless -= not rest.costs
        return rest

    def ids(self) -> list[Any]:
        """The rows that a claim must leave alone now."""
        if not self._rows:
            return []
        now = self._clock()
        with self._lock:
            return [
                id_
                for id_, rest in self._rows.items()
                if rest.until > now and not (self._by_key and rest.key is not None)
            ]

    def keys(self) -> list[str]:
        """The keys that an ordered claim must leave alone now."""
        if not self._rows:
            return []
        now = self._clock()
        with self._lock:
            resting = (rest for rest in self._rows.values() if rest.until > now)
            return list({rest.key for rest in resting if rest.key is not None})

    def seconds_to_next(self) -> float:
        if not self._rows:
            return math.inf
        now = self._clock()
        with self._lock:
            times = (rest.until - now for rest in self._rows.values() if rest.until > now)
            return min(times, default=math.inf)


class _Rest(NamedTuple):
    until: float
    times: int
    key: str | None
    costs: bool
