"""A relay that is watched: counted, logged event by event, and patient when nothing comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from conquiet.acking import Error
from conquiet.backoff import Backoff
from conquiet.errors import Blameless
from conquiet.message import Message
from conquiet.relay.logs import fields
from conquiet.relay.metrics import RelayMetrics
from conquiet.relay.relay import Outcome, Relay
from conquiet.sink import Sink
from conquiet.source import Source

logger = logging.getLogger("conquiet.relay")

_MOST_UNMARKED = 10_000
_IDLE_FACTOR = 4


class WatchedRelay(Relay):
    """Tells metrics and logs what becomes of each event.

    While nothing comes, it looks less and less often, down to a quarter as often as `poll`.
    """

    def __init__(
        self,
        source: Source,
        sink: Sink,
        metrics: RelayMetrics,
        *,
        batch_size: int = 50,
        ordered: bool = False,
        poll: float = 0.5,
        longest_pause: float = 10.0,
        publish_seconds: float = 10.0,
    ) -> None:
        super().__init__(
            source,
            sink,
            batch_size=batch_size,
            ordered=ordered,
            longest_pause=longest_pause,
            publish_seconds=publish_seconds,
            observe=self._observed,
        )
        self._metrics = metrics
        self._idle = Backoff(first=poll, cap=poll * _IDLE_FACTOR)
        self._confirmed: list[Message[Any]] = []
        self._unmarked: dict[str, None] = {}
        """Events that went out and could not be marked: the next time is a duplicate."""
        self._busy_since: float | None = None
        self._wait(poll)

    @property
    def busy_seconds(self) -> float:
        """How long the batch under way has taken; 0 between batches, and while it waits for one."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    def run_once(self, timeout: float = 0.0) -> Outcome:
        self._confirmed = []
        try:
            outcome = super().run_once(timeout)
        finally:
            self._busy_since = None
        if outcome.outage is not None:
            self._metrics.outages.inc()
            self._remember_unmarked(outcome.outage)
        if outcome == Outcome():
            self._wait(self._idle.next())
        else:
            self._idle.reset()
        return outcome

    def _read(self, timeout: float) -> Sequence[Message[Any]]:
        self._busy_since = time.monotonic() + timeout  # until then it may well wait
        messages = super()._read(timeout)
        self._busy_since = time.monotonic()
        return messages

    def _wait(self, seconds: float) -> None:
        self.read_seconds = seconds
        if hasattr(self.source, "poll"):  # the source of a table; a stream blocks by itself
            self.source.poll = seconds

    def _observed(
        self,
        messages: Sequence[Message[Any]],
        answers: Sequence[Error],
        outage: Exception | None,
        seconds: float,
    ) -> None:
        self._metrics.publish_seconds.observe(seconds)
        for message, answer in zip(messages, answers, strict=True):
            if answer is None:
                self._published(message)
            elif outage is None and not isinstance(answer, Blameless):
                self._metrics.failed.labels(type(answer).__name__).inc()

    def _published(self, message: Message[Any]) -> None:
        self._confirmed.append(message)
        self._metrics.published.inc()
        self._metrics.attempts.observe(message.deliveries)
        if message.id in self._unmarked:
            del self._unmarked[message.id]
            self._metrics.duplicates.inc()
            logger.warning("published again", extra=fields(message, duplicate=True))
        elif logger.isEnabledFor(logging.INFO):
            logger.info("published", extra=fields(message, topic=message.topic))

    def _remember_unmarked(self, error: Exception) -> None:
        for message in self._confirmed:
            logger.warning(
                "published, but not marked, so it will be published again: %s",
                error,
                extra=fields(message),
            )
            self._unmarked[message.id] = None
        while len(self._unmarked) > _MOST_UNMARKED:
            del self._unmarked[next(iter(self._unmarked))]
