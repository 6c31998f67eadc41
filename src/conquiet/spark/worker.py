"""SparkWorker: the same router as in a process, in the tasks of Spark.

    events (batch or stream) ──▶ tasks: slices ──▶ router ──▶ one commit per slice ──▶ counts

Spark retries a task, runs a copy of it, or replays a micro-batch, and so a message may reach its
handler's inbox more than once. Its effects happen once, because the inbox says so in the
transaction of the effects. Without an inbox they happen at least once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError
from conquiet.router import Router
from conquiet.sink import Sink
from conquiet.spark import checkpoint as checkpoints
from conquiet.spark.query import run_query
from conquiet.spark.worker_counts import Counts
from conquiet.spark.worker_messages import COLUMNS
from conquiet.spark.worker_task import COUNTS_DDL, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class SparkWorker:
    """Runs the events of a data frame through routers that `router` makes, one per process.

    `router` is a function of a module, or one that can be pickled; it makes the connections, so
    they are made where they are used, once. `sink` makes a sink for outputs that no outbox takes,
    `dead_letters` one for what fails `tries` times; a `DeadLetter` of the router does as well.
    `by_key` keeps the order of each key, at the price of a shuffle.
    """

    def __init__(
        self,
        router: Callable[[], Router],
        events: DataFrame,
        *,
        sink: Callable[[], Sink] | None = None,
        dead_letters: Callable[[], Sink] | None = None,
        slice_rows: int = 500,
        tries: int = 5,
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
        for name, value in (("slice_rows", slice_rows), ("tries", tries)):
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
            uuid.uuid4().hex, router, sink, dead_letters, slice_rows, tries, patience, by_key
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
        """Handle the events; gives how many ended how: (handler, outcome, count).

        Of a stream, until it ends (`trigger={"availableNow": True}`) or a signal comes.
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
        """How many messages were handled, skipped as seen, or are dead; how many tries failed."""
        return self.events.sparkSession.createDataFrame(self._counts.rows(), COUNTS_DDL)

    def close(self) -> None:
        """Let go of the checkpoint."""
        self._resources.close()

    def _handle(self, frame: DataFrame) -> None:
        known = [name for name in COLUMNS if name in frame.columns]
        frame = frame.select(*known)
        if self._by_key:
            frame = in_order(frame)
        # Collected in the one job that runs the handlers: a frame of counts that is computed
        # when somebody looks at it would run them again at every look.
        counted = frame.mapInArrow(self._work, COUNTS_DDL).collect()
        self._counts.add((row["handler"], row["outcome"], row["count"]) for row in counted)


def in_order(frame: DataFrame) -> DataFrame:
    """All rows of a key in one partition, as they stood in their stream."""
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
