"""Run a router in the tasks of Spark.

    events (frame or stream) ──▶ tasks: batches ──▶ router ──▶ one commit per batch ──▶ counts

Spark retries a task, runs a copy of it, or replays a micro-batch, so a message may reach its
handler's inbox more than once. Its effects happen once, because the inbox is part of their
transaction. Without an inbox they happen at least once.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from conquiet.errors import ConfigError
from conquiet.router import Router
from conquiet.sink import Sink
from conquiet.spark import checkpoint as checkpoints
from conquiet.spark.query import run_query
from conquiet.spark.worker_task import COLUMNS, COUNTS_DDL, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class SparkWorker:
    """Runs the events of a data frame through routers that `router` makes, one per process.

    `router` is a function of a module, or one that can be pickled; it opens the connections, once
    per process. `sink` makes a sink for outputs that no outbox takes, `dead_letters` one for
    messages that failed `max_attempts` times; a `DeadLetter` of the router works as well.
    `batch_size` messages share one commit. `patience` is how many seconds to wait for a store that
    is away. `by_key` keeps the order of each key, at the price of a shuffle.
    """

    def __init__(
        self,
        router: Callable[[], Router],
        events: DataFrame,
        *,
        sink: Callable[[], Sink] | None = None,
        dead_letters: Callable[[], Sink] | None = None,
        batch_size: int = 500,
        max_attempts: int = 5,
        patience: float = 30.0,
        by_key: bool = False,
        checkpoint: str | None = None,
        trigger: Mapping[str, Any] | None = None,
        registry: Any = None,
    ) -> None:
        if not callable(router) or isinstance(router, Router):
            raise ConfigError(
                "SparkWorker takes a function that makes a router: a router itself holds"
                " connections, and cannot travel to the executors"
            )
        for name, value in (("batch_size", batch_size), ("max_attempts", max_attempts)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least 1")
        if isinstance(patience, bool) or not isinstance(patience, int | float) or patience < 0:
            raise ConfigError(f"patience={patience!r}: must be a number of seconds")
        if not {"type", "data"} & set(events.columns):
            raise ConfigError(
                f"a frame of events has columns such as type and data, not {events.columns!r:.200}"
            )
        self.events = events
        self.checkpoint = checkpoint
        self._trigger = dict(trigger or {})
        self._by_key = by_key
        self._work = Work(
            uuid.uuid4().hex, router, sink, dead_letters, batch_size, max_attempts, patience, by_key
        )
        self._counts = Counts(registry)
        self._resources = ExitStack()
        if events.isStreaming:
            self._check_stream()

    def _check_stream(self) -> None:
        from pyspark.sql.utils import is_remote

        if self.checkpoint is None:
            raise ConfigError("a stream needs SparkWorker(checkpoint='…'): a directory of its own")
        if is_remote():
            raise ConfigError(
                "a SparkWorker over a stream needs its driver on the cluster: Spark Connect runs"
                " foreachBatch on the server, from where no counts come back. Use --master, or a"
                " frame that is no stream"
            )

    def run(self, *, grace: float = 60.0) -> DataFrame:
        """Handle the events; return the number of messages by handler and outcome.

        A stream runs until it ends (`trigger={"availableNow": True}`) or a signal comes.
        """
        if self.events.isStreaming:
            query = self.start()
            try:
                run_query(query, grace=grace)
            finally:
                query.stop()
                self.close()
        else:
            self._handle(self.events)
        return self.counts()

    def start(self) -> StreamingQuery:
        """Start the query of a stream, and return; call `close` after its end."""
        if not self.events.isStreaming:
            raise ConfigError("start() is for streams; run() handles a frame that is none")
        assert self.checkpoint is not None
        self._resources.enter_context(checkpoints.held(self.checkpoint))
        try:
            writing = self.events.writeStream.foreachBatch(lambda frame, _: self._handle(frame))
            if self._trigger:
                writing = writing.trigger(**self._trigger)
            return writing.option("checkpointLocation", self.checkpoint).start()
        except BaseException:
            self.close()
            raise

    def counts(self) -> DataFrame:
        """Return how many messages were handled, skipped or dead, and how many attempts failed."""
        return self.events.sparkSession.createDataFrame(self._counts.rows(), COUNTS_DDL)

    def close(self) -> None:
        """Release the lock of the checkpoint."""
        self._resources.close()

    def _handle(self, frame: DataFrame) -> None:
        known = [name for name in COLUMNS if name in frame.columns]
        frame = frame.select(*known)
        if self._by_key:
            frame = in_order(frame)
        # Collected in the one job that runs the handlers: a lazy frame of counts would run them
        # again at every use.
        counted = frame.mapInArrow(self._work, COUNTS_DDL).collect()
        self._counts.add((row["handler"], row["outcome"], row["count"]) for row in counted)


def in_order(frame: DataFrame) -> DataFrame:
    """Put all rows of a key into one partition, in the order of their stream."""
    from pyspark.sql import functions as f

    key = [f.col(name) for name in ("key", "event_id") if name in frame.columns]
    if "key" not in frame.columns or "entry_id" not in frame.columns:
        raise ConfigError("by_key needs the columns key and entry_id, as the sources give them")
    time, number = (
        f.expr(f"try_cast(substring_index(entry_id, '-', {side}) AS decimal(20, 0))")
        for side in (1, -1)
    )
    place = [f.col("stream")] if "stream" in frame.columns else []
    return frame.repartition(f.coalesce(*key)).sortWithinPartitions(
        *place, time, number, f.col("entry_id")
    )


_METRIC = "conquiet_spark_messages"
_lock = threading.Lock()
_known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Counts:
    """Counts outcomes by handler, on the driver and for Prometheus; safe for threads."""

    def __init__(self, registry: Any = None) -> None:
        self._totals: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._metric = _metric_of(registry)

    def add(self, rows: Iterable[tuple[str, str, int]]) -> None:
        with self._lock:
            for handler, outcome, count in rows:
                self._totals[handler, outcome] += count
                if self._metric is not None:
                    self._metric.labels(handler, outcome).inc(count)

    def rows(self) -> list[tuple[str, str, int]]:
        with self._lock:
            found = sorted(self._totals.items())
        return [(handler, outcome, count) for (handler, outcome), count in found]


def _metric_of(registry: Any) -> Any:
    """Return the counter of a registry; None without prometheus-client."""
    try:
        import prometheus_client
    except ImportError:
        return None
    registry = registry if registry is not None else prometheus_client.REGISTRY
    with _lock:
        if registry not in _known:
            _known[registry] = prometheus_client.Counter(
                _METRIC,
                "Messages that went through a router on Spark, by outcome.",
                ("handler", "outcome"),
                registry=registry,
            )
        return _known[registry]
