"""Read an outbox table as a source: claim rows as messages, mark them when they are settled.

    stored ──claim──▶ claimed ──ack──▶ published_at set
                         │ nack: attempts + 1 and last_error; the last attempt parks the row,
                         │       and a PermanentError parks it at once
                         │ nack with a Blameless error: stored again, costs no attempt
                         └ crash: stored again at once; the lock goes with the connection

Tables differ in their `Layout` and in how a row becomes a message; databases differ in how they
claim (`conquiet.sql.claim`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import URL, Engine

from conquiet.acking import Acking, Error
from conquiet.errors import (
    Blameless,
    ConfigError,
    GivenBack,
    InvalidMessage,
    PermanentError,
    StoreError,
)
from conquiet.message import Attributes, Message, printable
from conquiet.sql import dialect
from conquiet.sql.claim import (
    ClaimedRow,
    ClaimedRows,
    Claimer,
    Failure,
    Layout,
    PsycopgClaimer,
    RowBackoff,
    SqliteClaimer,
    error_text,
)
from conquiet.sql.notification import Wakeup, wakeup_of
from conquiet.sql.promotion import Promoter
from conquiet.sql.schema import OUTBOX_TABLE, outbox_table

logger = logging.getLogger("conquiet.relay")


class TableSource(ABC):
    """Claims rows of a table as messages; ack marks a row published, nack leaves it."""

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        *,
        max_attempts: int,
        ordered: bool,
        poll: float,
        wakeup: bool,
        hold: float,
        promotes: bool = False,
    ) -> None:
        for name, seconds in (("poll", poll), ("hold", hold)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: must be more than 0 seconds")
        self.engine = engine
        self.table = layout.table
        self.max_attempts = max_attempts
        self.ordered = ordered
        self.poll = poll
        self.hold = hold
        self.late = 0
        """How many settlements came after their claim had ended, and were ignored."""
        self.backoff = RowBackoff(by_key=ordered)
        self._claimer = self._claimer_of(layout)
        self._wakeup: Wakeup = wakeup_of(self.engine, self.table.fullname, enabled=wakeup)
        self._promoter: Promoter | None = None
        if promotes:
            self._promoter = Promoter(self.engine, self.table.fullname, self._wakeup.look)
        self._claims: set[Claim] = set()
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _message(self, row: Any, acking: Acking) -> Message[bytes]:
        """Build the message of a row; an exception parks the row."""

    @abstractmethod
    def log_fields(self, row: Any) -> dict[str, str]:
        """Return the fields that identify a row in logs: `event_id`, `event_type` and so on."""

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        while not self._closed:
            self._give_up_old_claims()
            if self._promoter is not None:
                self._promoter.promote(limit)
            messages = self._claim(limit)
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            self._wakeup.wait(min(left, self.poll, self._seconds_to_next()))
        return ()

    def _seconds_to_next(self) -> float:
        """Return the seconds until a failed row may be tried again, or a delayed one is due."""
        retry = self.backoff.seconds_to_next()
        return retry if self._promoter is None else min(retry, self._promoter.seconds_to_next())

    def stop(self) -> None:
        """Claim no more rows and end a waiting `read`; rows in flight can still be settled."""
        self._closed = True
        self._wakeup.close()

    def close(self) -> None:
        """Mark settled rows and release the others, which are claimable at once."""
        self.stop()
        with self._lock:
            claims = list(self._claims)
        for claim in claims:
            try:
                claim.release()
            except StoreError as error:
                logger.warning(
                    "could not release a claim; the database releases it with the connection: %s",
                    error,
                )
        self._claimer.close()

    def _claim(self, limit: int) -> list[Message[bytes]]:
        opened = self._claimer.claim(limit, self.backoff)
        if opened is None:
            return []
        claim = Claim(self, opened)
        with self._lock:
            self._claims.add(claim)
        try:
            if self._closed:  # close() may have been called while the claim was under way
                claim.release()
                return []
            return self._messages(opened.rows, claim)
        except BaseException:
            claim.release()  # its messages were never returned, so no caller can settle them
            raise

    def _messages(self, rows: Sequence[ClaimedRow], claim: Claim) -> list[Message[bytes]]:
        """Build messages; an unreadable row fails alone, and blocks its key if ordered."""
        messages: list[Message[bytes]] = []
        broken: list[tuple[Any, Error]] = []
        broken_keys: set[str] = set()
        for row in rows:
            if row.key in broken_keys:
                broken.append((row.id, GivenBack("an earlier row of its key failed")))
                continue
            try:
                messages.append(self._message(row, Acking(claim, row.id)))
            except Exception as error:  # noqa: BLE001 - the other rows of the claim go on
                reason = InvalidMessage(f"the row cannot be read: {error}")
                broken.append((row.id, reason))
                self.log(logging.WARNING, "not published", row, reason)
                if self.ordered and row.key is not None:
                    broken_keys.add(row.key)
        if broken:
            claim.settle((), broken)
        return messages

    def log(self, level: int, what: str, row: ClaimedRow, reason: object) -> None:
        about = {**self.log_fields(row), "attempt": row.attempts + 1}
        named = " ".join(f"{name}={value}" for name, value in about.items())
        logger.log(level, "%s: %s: %s", what, printable(named), printable(str(reason)), extra=about)

    def _give_up_old_claims(self) -> None:
        limit = time.monotonic() - self.hold
        with self._lock:
            old = [claim for claim in self._claims if claim.since < limit]
        for claim in old:
            logger.warning(
                "%d rows of %s were not settled within %g s; they will be published again",
                claim.waiting,
                self.table.fullname,
                self.hold,
            )
            claim.release()

    def count_late(self, settlements: int) -> None:
        self.late += settlements

    def remove_claim(self, claim: Claim) -> None:
        with self._lock:
            self._claims.discard(claim)

    def _claimer_of(self, layout: Layout) -> Claimer:
        kind = self.engine.dialect
        if dialect.is_sqlite(kind):
            return SqliteClaimer(self.engine, layout, self.ordered)
        if not dialect.is_postgresql(kind) or kind.is_async:
            raise ConfigError(
                f"{type(self).__name__} takes a sync Engine of PostgreSQL or SQLite, not"
                f" {kind.name}+{kind.driver}; make one from the same URL"
            )
        claimer = PsycopgClaimer if dialect.uses_psycopg(kind) else Claimer
        return claimer(self.engine, layout, self.ordered)


class Claim:
    """Settles the rows of one claim, and ends the claim when all of them are settled."""

    def __init__(self, source: TableSource, opened: ClaimedRows) -> None:
        self.since = time.monotonic()
        self._source = source
        self._opened = opened
        self._lock = threading.Lock()
        self._rows = {row.id: row for row in opened.rows}
        self._waiting = dict(self._rows)
        self._acked: list[Any] = []
        self._nacked: list[tuple[ClaimedRow, Error]] = []
        self._ended = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
        with self._lock:
            if self._ended:
                self._source.count_late(len(acked) + len(nacked))
                return
            for id_ in acked:
                if self._waiting.pop(id_, None) is not None:
                    self._acked.append(id_)
            for id_, error in nacked:
                row = self._waiting.pop(id_, None)
                if row is not None:
                    self._nacked.append((row, error))
            if not self._waiting:
                self._end()

    def release(self) -> None:
        """End the claim now: mark settled rows, leave the others claimable."""
        with self._lock:
            if not self._ended:
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._source.remove_claim(self)
        backoff = self._source.backoff
        failures = [self._failure(row, error) for row, error in self._nacked if _costs(error)]
        unmarked = self._opened.settle(self._acked, failures)
        if self._acked:
            backoff.forget(self._acked)
        parked = {failure.id for failure in failures if failure.parks}
        for row, error in self._nacked:
            # A parked row is not claimed; after an operator's retry it is published at once.
            if not isinstance(error, GivenBack) and row.id not in parked:
                backoff.add(row.id, row.key, row.attempts, costs=_costs(error))
        for id_ in unmarked:
            row = self._rows[id_]
            backoff.add(id_, row.key, row.attempts, costs=True)

    def _failure(self, row: ClaimedRow, error: Error) -> Failure:
        is_last = row.attempts + 1 >= self._source.max_attempts
        parks = is_last or isinstance(error, PermanentError)
        reason = error_text(error)
        if parks:
            self._source.log(logging.ERROR, "parked", row, reason)
        return Failure(row.id, reason, parks)


def check_attempts(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"max_attempts={count!r}: must be a whole number from 1 on")
    return count


def _costs(error: Error) -> bool:
    return not isinstance(error, Blameless)


_attributes = msgspec.json.Decoder(dict[str, Any])


class OutboxRow(NamedTuple):
    """Holds a claimed row of the generic outbox."""

    id: int
    topic: str
    event_type: str
    event_id: str
    key: str | None
    content_type: str
    data: bytes
    attributes: str
    attempts: int


def outbox_layout(table: str = OUTBOX_TABLE) -> Layout:
    return Layout(
        outbox_table(table),
        OutboxRow,
        order=("id",),
        start=("0",),
        key="key",
        first_key="",
        attempts="attempts",
        as_text=frozenset({"attributes"}),
    )


class OutboxSource(TableSource):
    """Claims rows of the generic outbox as messages; ack marks a row published, nack leaves it.

    Several sources, in threads, processes or on machines, share the rows. `ordered` publishes the
    rows of a key in the order of their ids, by one relay at a time; a row that fails or is parked
    blocks its own key only. A failed row is retried after a second, then after twice as long each
    time, up to five minutes; it is parked at `max_attempts`.

    An idle `read` polls every `poll` seconds, and at once when a writer notifies it (`wakeup`). A
    claim that is not settled within `hold` seconds is released, so that a forgotten message
    cannot keep a transaction open for ever.

    `engine` is one of SQLAlchemy's, or a URL; `table` is that of the outbox.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        table: str = OUTBOX_TABLE,
        *,
        max_attempts: int = 10,
        ordered: bool = False,
        poll: float = 0.5,
        wakeup: bool = True,
        hold: float = 300.0,
    ) -> None:
        engine = dialect.as_engine(engine)
        super().__init__(
            engine,
            outbox_layout(table),
            max_attempts=check_attempts(max_attempts),
            ordered=ordered,
            poll=poll,
            wakeup=wakeup,
            hold=hold,
            promotes=True,
        )

    def log_fields(self, row: OutboxRow) -> dict[str, str]:
        return {"event_id": row.event_id, "event_type": row.event_type, "row": str(row.id)}

    def _message(self, row: OutboxRow, acking: Acking) -> Message[bytes]:
        message = stored_message(row, acking, row.attempts + 1)
        message.topic = row.topic
        return message


def stored_message(row: Any, acking: Acking | None, deliveries: int) -> Message[bytes]:
    """Build the message of a row; attributes that are missing are taken from the columns."""
    try:
        attributes: Attributes = _attributes.decode(row.attributes)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(f"attributes is not a JSON object: {error}") from error
    attributes.setdefault("id", row.event_id)
    attributes.setdefault("type", row.event_type)
    if row.content_type != "application/json":
        attributes.setdefault("datacontenttype", row.content_type)
    message = Message(row.data, attributes, acking=acking, deliveries=deliveries)
    key = row.key
    is_subject = "partitionkey" not in attributes and attributes.get("subject") == key
    if key and not is_subject and message.key != key:
        attributes["partitionkey"] = key
    return message
