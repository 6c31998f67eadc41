"""Pulse: samples of all stores, and the changes between them.

Samples are taken only while a page is open. `Cached` limits how often a store is asked, however
many pages are open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from conquiet.errors import ConquietError
from conquiet.web.stores import Stores

if TYPE_CHECKING:
    from conquiet.operations.log_groups import LogGroup
    from conquiet.operations.streams import CeleryQueue, GroupInfo, StreamInfo
    from conquiet.relay.inspection import Figures

Found = TypeVar("Found")

SECONDS = 2.0
POINTS = 60
"""How many samples a sparkline has."""
_GAP_SECONDS = 60.0
"""After so long without a sample, the history is cleared."""
_RATE_SECONDS = 30.0
_REST = 10
"""A slow query is not repeated before ten times its duration."""


@dataclass(frozen=True)
class Sample:
    """The state at one moment; None where a store is not set or did not answer."""

    at: float
    outbox: Figures | None = None
    streams: tuple[StreamInfo, ...] | None = None
    logs: tuple[LogGroup, ...] = ()
    """The groups that read the outbox as a log."""
    letters: Mapping[str, int] | None = None
    """Where dead letters are, and how many."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Stores that do not answer, and the errors."""

    @property
    def is_log(self) -> bool:
        """Whether groups read the outbox itself, so that no relay has to publish it."""
        return bool(self.logs) and self.streams is None and "Redis" not in self.troubles

    def groups(self) -> list[tuple[StreamInfo, GroupInfo]]:
        return [(stream, group) for stream in self.streams or () for group in stream.groups]

    def own_groups(self) -> list[tuple[StreamInfo, GroupInfo]]:
        """Return the groups but those of Celery's queues and of messages that wait for a retry."""
        return [pair for pair in self.groups() if not _is_internal(pair[0])]

    def celery_queues(self) -> list[CeleryQueue]:
        if not self.streams:
            return []
        from conquiet.operations.streams import list_celery_queues  # needs redis-py

        return list_celery_queues(self.streams)

    def count_added(self) -> dict[Hashable, int]:
        """Return the entries ever added; before Redis 7, the present length."""
        found = [stream for stream in self.streams or () if not _is_internal(stream)]
        return {one.name: _added(one) for one in found}

    def count_handled(self) -> dict[Hashable, int]:
        """Return the entries that were delivered and acked, up to a constant of each group."""
        added = self.count_added()
        return {
            (stream.name, group.name): added[stream.name] - group.lag - group.pending
            for stream, group in self.own_groups()
            if group.lag_is_exact
        }


def _is_internal(stream: StreamInfo) -> bool:
    from conquiet.operations.streams import is_internal  # needs redis-py

    return is_internal(stream.name)


def _added(stream: StreamInfo) -> int:
    return stream.length if stream.added is None else stream.added


@dataclass(frozen=True)
class Point:
    """The values of a sample for sparklines; rates are since the previous sample."""

    at: float
    coming: float | None
    handled: float | None
    lag: float | None
    pending: float | None
    waiting: float | None


class Cached(Generic[Found]):
    """Caches the result of `take` for a few seconds; while it is renewed, returns the old one.

    >>> count = iter(range(9))
    >>> cached = Cached(lambda: next(count), seconds=60)
    >>> cached(), cached()
    (0, 0)
    """

    def __init__(self, take: Callable[[], Found], seconds: float) -> None:
        self._take = take
        self._seconds = seconds
        self._busy = threading.Lock()
        self._last: tuple[Found] | None = None
        self._until = 0.0

    def __call__(self) -> Found:
        last = self._last
        if last is not None and time.monotonic() < self._until:
            return last[0]
        if not self._busy.acquire(blocking=last is None):
            assert last is not None
            return last[0]
        try:
            if self._last is None or time.monotonic() >= self._until:
                began = time.monotonic()
                self._last = (self._take(),)
                ended = time.monotonic()
                self._until = began + max(self._seconds, _REST * (ended - began))
            return self._last[0]
        finally:
            self._busy.release()


class Pulse:
    """The newest sample, and a short history."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._cached = Cached(self._take, SECONDS)
        self._last: Sample | None = None
        self.rates: Mapping[str, float] = {}
        """Entries added per second to each stream, since the sample of half a minute ago."""
        self._counts: tuple[tuple[float, dict[Hashable, int]], ...] = ()
        self.history: tuple[Point, ...] = ()
        """Replaced, never changed: pages read it while another thread takes a sample."""

    def sample(self) -> Sample:
        return self._cached()

    def _take(self) -> Sample:
        sample = self._sample()
        before, history = self._last, self.history
        if before is not None and sample.at - before.at > _GAP_SECONDS:
            before, history = None, ()
        self.history = (*history[1 - POINTS :], _point(sample, before))
        self._last = sample
        self._note_rates(sample)
        return sample

    def _note_rates(self, sample: Sample) -> None:
        if sample.streams is None:
            return
        kept = [pair for pair in self._counts if sample.at - pair[0] <= _RATE_SECONDS]
        counts: dict[Hashable, int] = {one.name: _added(one) for one in sample.streams}
        self._counts = (*kept, (sample.at, counts))
        at, former = self._counts[0]
        if sample.at > at:
            self.rates = {
                str(name): max(0, count - former[name]) / (sample.at - at)
                for name, count in counts.items()
                if name in former
            }

    def _sample(self) -> Sample:
        troubles: dict[str, str] = {}
        outbox = found = letters = None
        logs: tuple[LogGroup, ...] = ()
        if self._stores.has_database:
            try:
                outbox = self._stores.outbox.figures()
                logs = tuple(self._stores.log_groups())
                letters = self._stores.log_letters()
            except ConquietError as error:
                troubles["Database"] = str(error)
        if self._stores.has_broker:
            from conquiet.operations import streams

            try:
                pattern = self._stores.streams
                found = tuple(streams.survey(self._stores.client, pattern))
                letters = {**self._stores.stream_letters(), **(letters or {})}
            except ConquietError as error:
                troubles["Redis"] = str(error)
        return Sample(time.monotonic(), outbox, found, logs, letters, troubles)


def _point(sample: Sample, before: Sample | None) -> Point:
    groups = sample.own_groups()
    known = sample.streams is not None
    lags = [group.lag for _, group in groups] + [group.lag for group in sample.logs]
    return Point(
        sample.at,
        _rate(sample, before, Sample.count_added) if known else None,
        _rate(sample, before, Sample.count_handled) if known else None,
        sum(lags) if known or sample.logs else None,
        sum(group.pending for _, group in groups) if known else None,
        sample.outbox.pending if sample.outbox is not None else None,
    )


def _rate(sample: Sample, before: Sample | None, counted: object) -> float | None:
    """Return the change per second of keys in both samples; new or deleted keys are ignored."""
    if before is None or before.streams is None or sample.at <= before.at:
        return None
    assert callable(counted)
    now: dict[Hashable, int] = counted(sample)
    then: dict[Hashable, int] = counted(before)
    change = sum(max(0, value - then[key]) for key, value in now.items() if key in then)
    return change / (sample.at - before.at)
