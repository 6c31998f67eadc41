"""Pulse: samples of all stores, and what changed from one to the next.

Taken only while somebody looks: a page, or the live stream of one.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conquiet.errors import ConquietError
from conquiet.web.look import Look
from conquiet.web.stores import Stores

if TYPE_CHECKING:
    from conquiet.operations.streams import GroupInfo, StreamInfo
    from conquiet.relay.inspection import Figures

SECONDS = 2.0
POINTS = 60
"""How many samples a sparkline has."""
_GAP_SECONDS = 60.0
"""After so long without a sample, the history begins anew."""


@dataclass(frozen=True)
class Sample:
    """What was found at one moment; None where a store was not named or did not answer."""

    at: float
    outbox: Figures | None = None
    streams: tuple[StreamInfo, ...] | None = None
    letters: Mapping[str, int] | None = None
    """Streams with dead letters, and how many."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Which store does not answer, and why."""

    def groups(self) -> list[tuple[StreamInfo, GroupInfo]]:
        return [(stream, group) for stream in self.streams or () for group in stream.groups]

    def added(self) -> dict[Hashable, int]:
        """Entries ever added; before Redis 7, those that are there."""
        found = self.streams or ()
        return {one.name: one.length if one.added is None else one.added for one in found}

    def handled(self) -> dict[Hashable, int]:
        """Entries that were delivered and acked, up to a constant of each group."""
        added = self.added()
        return {
            (stream.name, group.name): added[stream.name] - group.lag - group.pending
            for stream, group in self.groups()
            if group.lag_is_exact
        }


@dataclass(frozen=True)
class Point:
    """A sample as sparklines know it; rates are since the one before."""

    at: float
    coming: float | None
    handled: float | None
    lag: float | None
    pending: float | None
    waiting: float | None


class Pulse:
    """The newest sample, and a short history."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._look = Look(self._take, SECONDS)
        self._last: Sample | None = None
        self.history: tuple[Point, ...] = ()
        """Replaced, never changed: pages read it while another thread takes a sample."""

    def sample(self) -> Sample:
        return self._look()

    def _take(self) -> Sample:
        sample = self._sample()
        before, history = self._last, self.history
        if before is not None and sample.at - before.at > _GAP_SECONDS:
            before, history = None, ()
        self.history = (*history[1 - POINTS :], _point(sample, before))
        self._last = sample
        return sample

    def _sample(self) -> Sample:
        troubles: dict[str, str] = {}
        outbox = found = letters = None
        if self._stores.has_database:
            try:
                outbox = self._stores.outbox.figures()
            except ConquietError as error:
                troubles["Database"] = str(error)
        if self._stores.has_broker:
            from conquiet.operations import streams

            try:
                pattern = self._stores.streams
                found = tuple(streams.survey(self._stores.client, pattern))
                letters = self._stores.letter_streams()
            except ConquietError as error:
                troubles["Redis"] = str(error)
        return Sample(time.monotonic(), outbox, found, letters, troubles)


def _point(sample: Sample, before: Sample | None) -> Point:
    groups = sample.groups()
    known = sample.streams is not None
    return Point(
        sample.at,
        _rate(sample, before, Sample.added) if known else None,
        _rate(sample, before, Sample.handled) if known else None,
        sum(group.lag for _, group in groups) if known else None,
        sum(group.pending for _, group in groups) if known else None,
        sample.outbox.pending if sample.outbox is not None else None,
    )


def _rate(sample: Sample, before: Sample | None, counted: object) -> float | None:
    """Per second, over whatever was there at both times: what is new or gone is no traffic."""
    if before is None or before.streams is None or sample.at <= before.at:
        return None
    assert callable(counted)
    now: dict[Hashable, int] = counted(sample)
    then: dict[Hashable, int] = counted(before)
    change = sum(max(0, value - then[key]) for key, value in now.items() if key in then)
    return change / (sample.at - before.at)
