"""Run the rows of a Spark task through a router, in batches of one commit each.

A row is done when its handlers and the commit succeeded, when the inbox knew it, or when it is a
dead letter. After an error that is not the message's fault (the store is away, another attempt
holds the message) the task waits, then fails, and Spark runs it again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from conquiet.backoff import Backoff
from conquiet.errors import Blameless, ConfigError, ConquietError, InvalidMessage, StoreError
from conquiet.handler import SKIPPED, Process, Result
from conquiet.message import Message, describe
from conquiet.middleware.dead_letter import IS_DEAD, DeadLetter
from conquiet.redis.dead_letter import UNREADABLE_TYPE
from conquiet.router import Handled, Router
from conquiet.sink import Sink
from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.encoder import time_text
from conquiet.worker import Publish

logger = logging.getLogger("conquiet.spark")


HANDLED, SKIPPED_AS_SEEN, FAILED, DEAD = "handled", "skipped", "failed", "dead"
"""`failed` counts attempts; the others count messages, each once per handler."""

COUNTS = pa.schema([("handler", pa.string()), ("outcome", pa.string()), ("count", pa.int64())])
COUNTS_DDL = "handler string, outcome string, count long"
NO_HANDLER = "(none)"

_MOST_PARTS = 8
"""Routers that one Python process keeps; the least recently used is closed first."""


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
        router = _made(work.make_router)
        if not isinstance(router, Router):
            raise ConfigError(f"the router factory made {router!r:.80}; it must return a Router")
        if router.ack != "on_success":
            raise ConfigError(
                f"Router(ack={router.ack!r}): on Spark the checkpoint is the position, and there is"
                " nothing to ack; use ack='on_success'"
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


def _made(factory: Callable[[], Router]) -> Router:
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
