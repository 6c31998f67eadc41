"""Count messages by outcome and time handlers, for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias
from weakref import WeakKeyDictionary

from conquiet.errors import Blameless, ConfigError, PermanentError
from conquiet.handler import AROUND, Process, Result
from conquiet.message import Message
from conquiet.middleware.dead_letter import IS_DEAD

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from conquiet.worker import Worker

P = ParamSpec("P")
logger = logging.getLogger("conquiet.middleware")

SECONDS_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)
SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
NO_HANDLER = "(none)"
ANY_TYPE = "(any)"
"""The label of a handler that is registered for no single type."""


class Metric(NamedTuple):
    """Describes a metric, for the documentation and the tests of dashboards and rules."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


_BY_HANDLER = ("handler", "type")
METRICS: tuple[Metric, ...] = (
    Metric(
        "conquiet_messages_total",
        "counter",
        (*_BY_HANDLER, "outcome"),
        "messages that went through the chain: ok, error, permanent, given_back or dead_letter",
    ),
    Metric(
        "conquiet_handler_seconds", "histogram", _BY_HANDLER, "duration of one call of a handler"
    ),
    Metric(
        "conquiet_retries_total",
        "counter",
        _BY_HANDLER,
        "calls with a message that had failed before, in this delivery or in an earlier one",
    ),
    Metric("conquiet_messages_in_flight", "gauge", _BY_HANDLER, "messages in the chain now"),
    Metric(
        "conquiet_oldest_in_flight_seconds",
        "gauge",
        _BY_HANDLER,
        "how long the oldest of them has been in the chain",
    ),
    Metric("conquiet_batch_size", "histogram", (), "messages per batch"),
    Metric(
        "conquiet_source_dead_letters_total",
        "counter",
        _BY_HANDLER,
        "messages that the source has put among its dead letters, by the handler that failed last",
    ),
    Metric(
        "conquiet_source_failed_reads", "gauge", (), "failed reads since the last successful one"
    ),
)
_by_name = {metric.name: metric for metric in METRICS}

Labels: TypeAlias = tuple[str, str]
"""Names of a handler and of its type."""


class Metrics:
    """Counts messages by handler, type and outcome, and times each call of a handler.

    `METRICS` lists what it exports. Labels are names and types of registered handlers, never a text
    from a message, so that their number is bounded.

    Put it first: it then sees the final outcome of each message. Two on one registry share their
    metrics.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._instruments = instruments_of(registry)

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            began = self._instruments.begin(batch)
            failed: set[int] = set()
            token = AROUND.set(
                (partial(time_call, self._instruments.observe, failed), *AROUND.get())
            )
            results: Sequence[Result] | None = None
            try:
                results = next(batch)
                return results
            finally:
                AROUND.reset(token)
                self._instruments.end(began, batch, results)

        return process


def time_call(
    observe: Callable[[Message[Any], float, int], object],
    failed: set[int],
    messages: Sequence[Message[Any]],
    call: Callable[[], Sequence[Result]],
) -> Sequence[Result]:
    """Tell `observe` a message of a call, its seconds, and how many had failed before.

    `failed` holds the messages of calls of the same batch that raised.
    """
    again = sum(message.deliveries > 1 or id(message) in failed for message in messages)
    start = time.perf_counter()
    try:
        return call()
    except BaseException:
        failed.update(map(id, messages))
        raise
    finally:
        observe(messages[0], time.perf_counter() - start, again)


def labels_of(message: Message[Any]) -> Labels:
    """Return the labels of a message: its handler, and the type that the handler is for."""
    handler = message.handler
    return (NO_HANDLER, ANY_TYPE) if handler is None else (handler.name, handler.type or ANY_TYPE)


def _types_of(worker: Worker) -> dict[str, str]:
    """Return the types that the handlers of a worker are for, by their names."""
    return {handler.name: handler.type or ANY_TYPE for handler in worker.router.handlers}


def _outcome(message: Message[Any], result: Result | None) -> str:
    if isinstance(result, PermanentError):
        return "permanent"
    if isinstance(result, Blameless):
        return "given_back"
    if result is None or isinstance(result, Exception):
        return "error"
    return "dead_letter" if message.has_locals and IS_DEAD in message.locals else "ok"


def _quietly(count: Callable[P, Any]) -> Callable[P, Any]:
    """Let a metric fail without failing the message."""

    @wraps(count)
    def counted(*arguments: P.args, **options: P.kwargs) -> Any:
        try:
            return count(*arguments, **options)
        except Exception:
            logger.debug("a metric could not be written", exc_info=True)
            return None

    return counted


class Instruments:
    """Holds the metrics of one registry, and what is in flight."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        make = partial(_metric, registry)
        self._messages = make("conquiet_messages_total")
        self._seconds = make("conquiet_handler_seconds", buckets=SECONDS_BUCKETS)
        self._retries = make("conquiet_retries_total")
        self._in_flight = make("conquiet_messages_in_flight", multiprocess_mode="livesum")
        self._oldest = make("conquiet_oldest_in_flight_seconds", multiprocess_mode="livemax")
        self._batch_size = make("conquiet_batch_size", buckets=SIZE_BUCKETS)
        self._dead = make("conquiet_source_dead_letters_total")
        self._failed_reads = make("conquiet_source_failed_reads", multiprocess_mode="livemax")
        self._lock = threading.Lock()
        self._running: dict[object, tuple[float, Collection[Labels]]] = {}
        """When each batch began, and what it holds, the oldest first."""
        self._known: set[Labels] = set()
        self._workers: WeakKeyDictionary[Worker, Counter[str]] = WeakKeyDictionary()
        """Workers whose source is watched, and which of its dead letters are counted."""

    @_quietly
    def begin(self, batch: Sequence[Message[Any]]) -> object:
        """Note that a batch has begun; return what `end` takes."""
        counts = Counter(map(labels_of, batch))
        for labels, count in counts.items():
            self._in_flight.labels(*labels).inc(count)
        self._batch_size.observe(len(batch))
        began = object()
        with self._lock:
            self._running[began] = time.monotonic(), counts
            self._known.update(counts)
        return began

    @_quietly
    def end(
        self, began: object, batch: Sequence[Message[Any]], results: Sequence[Result] | None
    ) -> None:
        with self._lock:
            self._running.pop(began, None)
        for labels, count in Counter(map(labels_of, batch)).items():
            self._in_flight.labels(*labels).dec(count)
        outcomes = Counter(
            (*labels_of(message), _outcome(message, results[index] if results else None))
            for index, message in enumerate(batch)
        )
        for each, count in outcomes.items():
            self._messages.labels(*each).inc(count)

    @_quietly
    def observe(self, message: Message[Any], seconds: float, retries: int) -> None:
        """Note one call of a handler."""
        labels = labels_of(message)
        self._seconds.labels(*labels).observe(seconds)
        if retries:
            self._retries.labels(*labels).inc(retries)

    def watch(self, worker: Worker) -> None:
        """Export what the source of a worker counts, too.

        Counters begin at 0: `increase()` does not see that a series begins with its first letter.
        """
        self._dead.labels(NO_HANDLER, ANY_TYPE)
        for labels in _types_of(worker).items():
            self._dead.labels(*labels)
            for outcome in ("error", "dead_letter"):
                self._messages.labels(*labels, outcome)
        self._workers.setdefault(worker, Counter())

    @_quietly
    def refresh(self) -> None:
        """Set what changes by itself: ages, and figures of sources."""
        now = time.monotonic()
        oldest: dict[Labels, float] = {}
        with self._lock:
            running, known = list(self._running.values()), list(self._known)
        for began, counts in running:
            for labels in counts:
                oldest.setdefault(labels, now - began)
        for labels in known:
            self._oldest.labels(*labels).set(oldest.get(labels, 0.0))
        failures = 0
        for worker, counted in list(self._workers.items()):
            failures = max(failures, worker.health().failures_in_a_row)
            dead = Counter(getattr(worker.source, "dead_by_handler", ()))
            types = _types_of(worker)
            for handler, count in (dead - counted).items():
                labels = handler or NO_HANDLER, types.get(handler, ANY_TYPE)
                self._dead.labels(*labels).inc(count)
            self._workers[worker] = dead
        self._failed_reads.set(failures)


def exposition(registry: CollectorRegistry | None = None) -> bytes:
    """Return the body of `/metrics` for a registry; by default for that of the process."""
    import prometheus_client

    registry = registry if registry is not None else prometheus_client.REGISTRY
    if (found := _known.get(registry)) is not None:
        found.refresh()
    return prometheus_client.generate_latest(registry)


_lock = threading.Lock()
_known: WeakKeyDictionary[Any, Instruments] = WeakKeyDictionary()


def instruments_of(registry: Any = None) -> Instruments:
    """Return the metrics of a registry; by default of that of the process."""
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(
            "Metrics needs the package prometheus-client: pip install 'conquiet[metrics]'"
        ) from error
    registry = registry if registry is not None else prometheus_client.REGISTRY
    with _lock:
        instruments = _known.get(registry)
        if instruments is None:
            instruments = _known[registry] = Instruments(registry)
        return instruments


def _metric(registry: Any, name: str, **options: Any) -> Any:
    import prometheus_client

    about = _by_name[name]
    make = getattr(prometheus_client, about.kind.capitalize())
    plain = name.removesuffix("_total")
    try:
        return make(plain, about.meaning, about.labels, registry=registry, **options)
    except ValueError as error:  # the name is taken; by ourselves if this module was loaded twice
        with suppress(AttributeError):  # there is no public API to look it up
            known = registry._names_to_collectors.get(plain)
            if type(known) is make and known._labelnames == about.labels:
                return known
        raise ConfigError(
            f"the metric {plain} is already registered by something else; give Metrics a"
            " registry of its own: Metrics(CollectorRegistry())"
        ) from error
