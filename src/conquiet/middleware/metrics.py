"""Count messages by outcome and time handlers, for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from conquiet.errors import Blameless, ConfigError, PermanentError
from conquiet.handler import AROUND, Process, Result
from conquiet.message import Message
from conquiet.middleware.dead_letter import IS_DEAD

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("conquiet.middleware")

SECONDS_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)
SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
NO_HANDLER = "(none)"


class Metrics:
    """Counts messages by handler and outcome, and times each call of a handler.

    `conquiet_messages_total{handler, outcome}`: outcome is `ok`, `error`, `permanent`,
    `given_back` or `dead_letter`. `conquiet_handler_seconds{handler}`: one observation per
    call. `conquiet_messages_in_flight`, `conquiet_batch_size`. Labels are names of registered
    handlers, never a text from a message, so that their number is bounded.

    Put it first: it then sees the final outcome of each message. Two on one registry share their
    metrics.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._instruments = _instruments_of(registry)

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            self._quietly(self._begin, len(batch))
            token = AROUND.set((self._time_call, *AROUND.get()))
            results: Sequence[Result] | None = None
            try:
                results = next(batch)
                return results
            finally:
                AROUND.reset(token)
                self._quietly(self._end, batch, results)

        return process

    def _begin(self, size: int) -> None:
        self._instruments.in_flight.inc(size)
        self._instruments.batch_size.observe(size)

    def _end(self, batch: Sequence[Message[Any]], results: Sequence[Result] | None) -> None:
        self._instruments.in_flight.dec(len(batch))
        counts = Counter(
            (_handler_of(message), _outcome(message, results[index] if results else None))
            for index, message in enumerate(batch)
        )
        for labels, count in counts.items():
            self._instruments.messages.labels(*labels).inc(count)

    def _time_call(
        self, messages: Sequence[Message[Any]], call: Callable[[], Sequence[Result]]
    ) -> Sequence[Result]:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self._quietly(self._observe, messages[0], time.perf_counter() - start)

    def _observe(self, message: Message[Any], seconds: float) -> None:
        self._instruments.seconds.labels(_handler_of(message)).observe(seconds)

    def _quietly(self, count: Callable[..., None], *arguments: Any) -> None:
        """Update a metric; an error must not fail the message."""
        try:
            count(*arguments)
        except Exception:
            logger.debug("a metric could not be written", exc_info=True)


def _handler_of(message: Message[Any]) -> str:
    return message.handler.name if message.handler is not None else NO_HANDLER


def _outcome(message: Message[Any], result: Result | None) -> str:
    if isinstance(result, PermanentError):
        return "permanent"
    if isinstance(result, Blameless):
        return "given_back"
    if result is None or isinstance(result, Exception):
        return "error"
    return "dead_letter" if message.has_locals and IS_DEAD in message.locals else "ok"


class _Instruments:
    """Holds the metrics of one registry."""

    def __init__(self, registry: Any) -> None:
        self.messages = _metric(
            registry,
            "Counter",
            "conquiet_messages",
            "Messages that went through the chain, by outcome.",
            ("handler", "outcome"),
        )
        self.seconds = _metric(
            registry,
            "Histogram",
            "conquiet_handler_seconds",
            "Duration of one call of a handler.",
            ("handler",),
            buckets=SECONDS_BUCKETS,
        )
        self.in_flight = _metric(
            registry,
            "Gauge",
            "conquiet_messages_in_flight",
            "Messages that are in the chain now.",
            (),
            multiprocess_mode="livesum",
        )
        self.batch_size = _metric(
            registry,
            "Histogram",
            "conquiet_batch_size",
            "Messages per batch.",
            (),
            buckets=SIZE_BUCKETS,
        )


_lock = threading.Lock()
_known: WeakKeyDictionary[Any, _Instruments] = WeakKeyDictionary()


def _instruments_of(registry: Any) -> _Instruments:
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            "Metrics needs the package prometheus-client: pip install 'prometheus-client>=0.20'"
        ) from error
    registry = registry if registry is not None else prometheus_client.REGISTRY
    with _lock:
        instruments = _known.get(registry)
        if instruments is None:
            instruments = _known[registry] = _Instruments(registry)
        return instruments


def _metric(
    registry: Any, kind: str, name: str, text: str, labels: tuple[str, ...], **options: Any
) -> Any:
    import prometheus_client

    make = getattr(prometheus_client, kind)
    try:
        return make(name, text, labels, registry=registry, **options)
    except ValueError as error:  # the name is taken; by ourselves if this module was loaded twice
        with suppress(AttributeError):  # there is no public API to look it up
            known = registry._names_to_collectors.get(name)
            if type(known) is make and known._labelnames == labels:
                return known
        raise ConfigError(
            f"the metric {name} is already registered by something else; give Metrics a"
            " registry of its own: Metrics(CollectorRegistry())"
        ) from error
