"""Run a router in the tasks of Spark.

    events (frame or stream) ──▶ tasks: batches ──▶ router ──▶ one commit per batch ──▶ counts

Spark retries a task, runs a copy of it, or replays a micro-batch, so a message may reach its
handler's inbox more than once. Its effects happen once, because the inbox is part of their
transaction. Without an inbox they happen at least once.

A row is done when its handlers and the commit succeeded, when the inbox knew it, or when it is a
dead letter. After an error that is not the message's fault (the store is away, another attempt
holds the message) the task waits, then fails, and Spark runs it again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pyarrow as pa

from conquiet.backoff import Backoff
from conquiet.errors import Blameless, ConfigError, ConquietError, InvalidMessage, StoreError
from conquiet.handler import SKIPPED, Process, Result
from conquiet.message import Message, describe
from conquiet.middleware.dead_letter import IS_DEAD, DeadLetter
from conquiet.redis.dead_letter import UNREADABLE_TYPE
from conquiet.router import Handled, Router
from conquiet.sink import Sink
from conquiet.spark import checkpoint as checkpoints
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.encoder import time_text
from conquiet.spark.query import run_query
from conquiet.worker import Publish

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("conquiet.spark")

HANDLED, SKIPPED_AS_SEEN, FAILED, DEAD = "handled", "skipped", "failed", "dead"
"""`failed` counts attempts; the others count messages, each once per handler."""

COUNTS = pa.schema([("handler", pa.string()), ("outcome", pa.string()), ("count", pa.int64())])
COUNTS_DDL = "handler string, outcome string, count long"
NO_HANDLER = "(none)"

_MOST_PARTS = 8
"""Routers that one Python process keeps; the least recently used is closed first."""


class SparkWorker:
    """Runs the events of a data frame through routers that `router` makes, one per process.

    `events` has the columns of a log, as `type` and `data`. `router` is a function of a module, or
    one that can be pickled; it opens the connections, once per process. `sink` makes a sink for
    outputs that no outbox takes, `dead_letters` one for messages that failed `max_attempts` times;
    a `DeadLetter` of the router works as well. `batch_size` messages share one commit. `patience`
    is how many seconds to wait for a store that is away. `by_key` keeps the order of each key, at
    the price of a shuffle.

    A stream needs a `checkpoint`, a directory of its own; `trigger` is Spark's. Counts go to
    `registry`, by default that of prometheus_client.
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

        A stream runs until it ends (`trigger={"availableNow": True}`) or a signal comes; then the
        batch under way has `grace` seconds.
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
        self._resources.enter_context(checkpoints.lock_checkpoint(self.checkpoint))
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


# --- tasks, on the executors -----------------------------------------------------------------


class Undeliverable(ConquietError):
    """A message failed at every attempt, and there is no dead letter queue."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sent to the executors: how to make a router, and how to run it."""

    token: str
    """Identifies a SparkWorker, for which a process makes its router once."""
    make_router: Callable[[], Router]
    make_sink: Callable[[], Sink] | None
    make_dead_letters: Callable[[], Sink] | None
    batch_size: int
    max_attempts: int
    patience: float
    ordered: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Handle the rows of a partition and yield its counts, for `mapInArrow`."""
        part = _part_of(self)
        counts: Counter[tuple[str, str]] = Counter()
        for batch in batches:
            for rows in slices(batch, self.batch_size):
                part.handle(rows, counts)
        totals = [
            {"handler": handler, "outcome": outcome, "count": count}
            for (handler, outcome), count in sorted(counts.items())
        ]
        yield pa.RecordBatch.from_pylist(totals, COUNTS)


_parts: dict[tuple[int, str], _Part] = {}


def _part_of(work: Work) -> _Part:
    """Return the router of this process; the first task makes it."""
    key = os.getpid(), work.token  # Spark forks its workers; a connection belongs to one process
    part = _parts.pop(key, None)
    if part is None:
        part = _Part(work)
        while len(_parts) >= _MOST_PARTS:
            _parts.pop(next(iter(_parts))).close()
    _parts[key] = part
    return part


class _Part:
    """A started router, its chain, and its dead letters."""

    def __init__(self, work: Work) -> None:
        router = _make(work.make_router)
        if not isinstance(router, Router):
            raise ConfigError(f"the router factory made {router!r:.80}; it must return a Router")
        if router.ack != "on_success":
            raise ConfigError(
                f"Router(ack={router.ack!r}): on Spark the checkpoint is the position, and there is"
                " nothing to ack; use ack='on_success'"
            )
        if any(getattr(item, "delays", ()) for item in router.middlewares):
            raise ConfigError(
                "Retry(delays=…): on Spark a batch is done when each of its events is, and none can"
                " wait for a later one; use Retry(max_attempts=…), which waits within the batch, or"
                " dead letters, and replay them"
            )
        self._work = work
        self._router = router
        self._sinks = [make() for make in (work.make_sink, work.make_dead_letters) if make]
        chain = router.start(Publish(self._sinks[0] if work.make_sink else None, router))
        self._letters = _letters_of(router)
        if work.make_dead_letters is not None:
            self._letters = DeadLetter(self._sinks[-1], max_attempts=work.max_attempts)
            chain = self._letters(chain)
        self._chain = chain

    def handle(self, batch: pa.RecordBatch, counts: Counter[tuple[str, str]]) -> None:
        """Run a batch until every row of it is done."""
        messages = messages_of(batch, ordered=self._work.ordered)
        bad = {row: why for row, why in enumerate(reasons_of(batch)) if why is not None}
        if bad:
            self._run([messages[row] for row in bad], self._refusing(bad), counts)
        good = [message for row, message in enumerate(messages) if row not in bad]
        if good:
            self._run(good, lambda left: self._router.run(left, self._chain), counts)

    def _run(
        self,
        messages: list[Message[Any]],
        run: Callable[[list[Message[Any]]], Handled],
        counts: Counter[tuple[str, str]],
    ) -> None:
        """Retry the messages that failed, as a source would redeliver them."""
        pauses, outages = Backoff(first=0.02, cap=2.0), Backoff(first=0.05, cap=5.0)
        end = time.monotonic() + self._work.patience
        done: set[tuple[int, str]] = set()
        while messages:
            handled = run(messages)
            self._router.settle(handled)  # acks nothing, and logs what failed
            failures = _account(handled, counts, done)
            if not failures:
                return
            blameless = [error for error in failures.values() if isinstance(error, Blameless)]
            if len(blameless) == len(failures) and time.monotonic() > end:
                raise StoreError(
                    f"{len(failures)} messages could not be handled within"
                    f" {self._work.patience:g} s and were given back: {blameless[0]}"
                ) from blameless[0]
            messages = [message for message in messages if message.locals[ROW] in failures]
            for message in messages:
                self._count_attempt(message, failures[message.locals[ROW]])
            time.sleep((outages if blameless else pauses).next())

    def _count_attempt(self, message: Message[Any], error: Exception) -> None:
        if isinstance(error, Blameless):
            return
        if message.deliveries >= self._work.max_attempts:
            raise Undeliverable(
                f"{describe(message.attributes)} failed {message.deliveries} times and has no dead"
                f" letter queue: {type(error).__name__}: {error}. Give the router a"
                f" DeadLetter(max_attempts={self._work.max_attempts} or less), or"
                " SparkWorker(dead_letters=…); nothing was lost"
            ) from error
        message.deliveries += 1

    def _refusing(
        self, reasons: Mapping[int, Exception]
    ) -> Callable[[list[Message[Any]]], Handled]:
        """Return a function that sends malformed entries to the dead letters, past the handlers."""

        def refuse(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            return [reasons[message.locals[ROW]] for message in batch]

        chain: Process = refuse if self._letters is None else self._letters(refuse)
        return lambda batch: Handled(batch, chain(batch))

    def close(self) -> None:
        items: list[Sink | Router] = [*self._sinks, self._router]
        for item in items:
            try:
                item.close()
            except Exception:
                logger.exception("closing %r failed", item)


def _make(factory: Callable[[], Router]) -> Router:
    try:
        return factory()
    except ConfigError as error:
        called = getattr(factory, "func", factory)
        if getattr(called, "__module__", None) != "__main__":
            raise
        # A function pickled by value includes the names that its code uses, not those that only
        # its annotations use.
        raise ConfigError(
            f"{error}. The router factory is part of the script itself: put it into a module that"
            " the script imports"
        ) from error


def _letters_of(router: Router) -> DeadLetter | None:
    return next((item for item in router._middlewares if isinstance(item, DeadLetter)), None)


def _account(
    handled: Handled, counts: Counter[tuple[str, str]], done: set[tuple[int, str]]
) -> dict[int, Exception]:
    """Count outcomes; return the rows that are not done, and their errors.

    A message with several handlers runs again with all of them when one has failed; successes that
    were counted are not counted again.
    """
    failures: dict[int, Exception] = {}
    for message, result in zip(handled.messages, handled.results, strict=True):
        row = message.locals[ROW]
        handler = message.handler.name if message.handler is not None else NO_HANDLER
        if isinstance(result, Exception):
            if not isinstance(result, Blameless):
                counts[handler, FAILED] += 1
            if row not in failures or isinstance(failures[row], Blameless):
                failures[row] = result
        elif (row, handler) not in done:
            done.add((row, handler))
            counts[handler, _outcome(message, result)] += 1
    return failures


def _outcome(message: Message[Any], result: Result) -> str:
    if IS_DEAD in message.locals:
        return DEAD
    return SKIPPED_AS_SEEN if result is SKIPPED else HANDLED


COLUMNS = (
    "stream",
    "entry_id",
    "key",
    "event_id",
    "type",
    "source",
    "subject",
    "time",
    "content_type",
    "attributes",
    "data",
    MALFORMED,
)
"""The columns that are read of a frame."""

ROW = "conquiet.spark.row"
"""Key in a message's locals: its row, which its copies for other handlers share."""

_ATTRIBUTES = (
    ("event_id", "id"),
    ("type", "type"),
    ("source", "source"),
    ("subject", "subject"),
    ("time", "time"),
    ("content_type", "datacontenttype"),
)


class Malformed(InvalidMessage):
    """A source could not decode an entry as an event."""


def slices(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def messages_of(batch: pa.RecordBatch, *, ordered: bool = False) -> list[Message[Any]]:
    """Return a message per row; with `ordered`, each waits for failed ones of its key."""
    columns = {name: _values(batch, name) for name in COLUMNS}
    found: list[Message[Any]] = []
    for row in range(batch.num_rows):
        message = _message(columns, row)
        message.locals[ROW] = row
        if ordered:
            message.order_key = columns["key"][row] or None
        found.append(message)
    return found


def reasons_of(batch: pa.RecordBatch) -> list[Malformed | None]:
    """Return the error of each malformed row, and None for the others."""
    streams, entries = _values(batch, "stream"), _values(batch, "entry_id")
    return [
        None if why is None else Malformed(f"entry {entry} of {stream!r} is not an event: {why}")
        for why, stream, entry in zip(_values(batch, MALFORMED), streams, entries, strict=True)
    ]


def _values(batch: pa.RecordBatch, name: str) -> Sequence[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(name)
    if name == "time" and pa.types.is_timestamp(column.type):
        column = time_text(column).cast(pa.string())
    elif name == "data":
        column = column.cast(pa.binary())
    values: list[Any] = column.to_pylist()
    return values


def _message(columns: dict[str, Sequence[Any]], row: int) -> Message[Any]:
    if columns[MALFORMED][row] is not None:
        place = f"{columns['stream'][row]} {columns['entry_id'][row]}"
        about = {"id": place, "type": UNREADABLE_TYPE, "source": "conquiet:unknown"}
        return Message(columns["data"][row], about, topic=columns["stream"][row])
    attributes = {
        name: value for column, name in _ATTRIBUTES if (value := columns[column][row]) is not None
    }
    attributes.update(columns["attributes"][row] or ())
    key = columns["key"][row]
    if key is not None and key != attributes.get("subject"):
        attributes["partitionkey"] = key
    return Message(columns["data"][row], attributes, topic=columns["stream"][row])
