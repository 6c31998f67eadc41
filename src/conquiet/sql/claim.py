"""OutboxSource: what a relay reads. It claims rows, and settles them where it claimed them.

    stored ──claim──▶ claimed ──ack──▶ published_at set
                         │ nack: attempts + 1 and last_error; the last attempt sets parked_at
                         │ nack with a Blameless error: as before, costs nothing
                         └ crash: as before, at once; the lock went with the connection

How the databases claim is in `claim_rows`, `claim_psycopg` and `claim_sqlite`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import URL, Engine, Table

from conquiet.acking import Acking, Error
from conquiet.errors import Blameless, ConfigError, GivenBack, InvalidMessage, StoreError
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.claim_psycopg import PsycopgRows
from conquiet.sql.claim_rows import Opened, Rows
from conquiet.sql.claim_sqlite import SqliteRows
from conquiet.sql.claimed import Failure, Row, error_text
from conquiet.sql.resting import Resting
from conquiet.sql.tables import OUTBOX_TABLE, outbox_table
from conquiet.sql.wakeup import Wakeup, wakeup_of

logger = logging.getLogger("conquiet.relay")

_attributes = msgspec.json.Decoder(dict[str, Any])


class OutboxSource:
    """Claims rows of an outbox as messages; ack marks one published, nack leaves it.

    Several sources, in threads, processes or on machines, share the rows among them. `ordered`
    publishes the rows of a key in the order of their ids, by one relay at a time; a row that
    fails or is parked holds up its own key and no other. A failed row rests for a second, then
    twice as long each time, up to five minutes, while the others go on; it is parked at
    `max_attempts`.

    An idle `read` looks again every `poll` seconds, and at once when it is woken (`wakeup`).
    What is not settled within `hold` seconds is given up, so that a message which somebody
    forgot cannot keep a transaction open for ever.
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
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts!r}: must be a whole number from 1 on")
        for name, seconds in (("poll", poll), ("hold", hold)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: must be more than 0 seconds")
        self.engine = dialect.as_engine(engine)
        self.table = outbox_table(table)
        self.max_attempts = max_attempts
        self.ordered = ordered
        self.poll = poll
        self.hold = hold
        self.late = 0
        """Settlements that came after their claim had ended; they do nothing."""
        self.resting = Resting(by_key=ordered)
        self._rows = _rows_of(self.engine, self.table, ordered)
        self._wakeup: Wakeup = wakeup_of(self.engine, table, enabled=wakeup)
        self._claims: set[Claim] = set()
        self._lock = threading.Lock()
        self._closed = False

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        while not self._closed:
            self._give_up_old_claims()
            messages = self._claim(limit)
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            self._wakeup.wait(min(left, self.poll, self.resting.seconds_to_next()))
        return ()

    def close(self) -> None:
        """Mark what was settled and let go of the rest, which is claimable at once."""
        self._closed = True
        self._wakeup.close()
        with self._lock:
            claims = list(self._claims)
        for claim in claims:
            try:
                claim.release()
            except StoreError as error:
                logger.warning("a claim ended by itself: %s", error)
        self._rows.close()

    def _claim(self, limit: int) -> list[Message[bytes]]:
        opened = self._rows.claim(limit, self.resting)
        if opened is None:
            return []
        claim = Claim(self, opened)
        with self._lock:
            self._claims.add(claim)
        if self._closed:  # close() may have come while we waited for the database
            claim.release()
            return []
        messages: list[Message[bytes]] = []
        broken: list[tuple[int, Error]] = []
        for row in opened.rows:
            try:
                messages.append(_message(row, claim))
            except InvalidMessage as error:
                broken.append((row.id, error))
        if broken:
            claim.settle((), broken)
        return messages

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

    def ended(self, claim: Claim) -> None:
        with self._lock:
            self._claims.discard(claim)


class Claim:
    """The settler of the rows of one transaction; ends it when each of them is settled."""

    def __init__(self, source: OutboxSource, opened: Opened) -> None:
        self.since = time.monotonic()
        self._source = source
        self._opened = opened
        self._lock = threading.Lock()
        self._waiting = {row.id: row for row in opened.rows}
        self._acked: list[int] = []
        self._nacked: list[tuple[Row, Error]] = []
        self._ended = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def settle(self, acked: Sequence[int], nacked: Sequence[tuple[int, Error]]) -> None:
        with self._lock:
            if self._ended:
                self._source.late += len(acked) + len(nacked)
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
        """End now: what was settled is marked, the rest is claimable again."""
        with self._lock:
            if not self._ended:
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._source.ended(self)
        resting = self._source.resting
        failures = [self._failure(row, error) for row, error in self._nacked if _costs(error)]
        unmarked = self._opened.settle(self._acked, failures)
        if self._acked:
            resting.forget(self._acked)
        for row, error in self._nacked:
            if not isinstance(error, GivenBack):
                resting.add(row.id, row.key, row.attempts, costs=_costs(error))
        for id_ in unmarked:
            resting.add(id_, None, 0, costs=True)

    def _failure(self, row: Row, error: Error) -> Failure:
        parks = row.attempts + 1 >= self._source.max_attempts
        reason = error_text(error)
        if parks:
            logger.error(
                "parked %s id=%s after %d attempts, as row %d of %s: %s",
                row.event_type,
                row.event_id,
                row.attempts + 1,
                row.id,
                self._source.table.fullname,
                reason,
            )
        return Failure(row.id, reason, parks)


def _rows_of(engine: Engine, table: Table, ordered: bool) -> Rows:
    if dialect.is_sqlite(engine.dialect):
        return SqliteRows(engine, table, ordered)
    if not dialect.is_postgresql(engine.dialect) or engine.dialect.is_async:
        raise ConfigError(
            f"OutboxSource takes a sync Engine of PostgreSQL or SQLite, not {engine.dialect.name}"
            f"+{engine.dialect.driver}; make one from the same URL"
        )
    kind = PsycopgRows if dialect.uses_psycopg(engine.dialect) else Rows
    return kind(engine, table, ordered)


def _costs(error: Error) -> bool:
    return not isinstance(error, Blameless)


def _message(row: Row, claim: Claim) -> Message[bytes]:
    """The message as it was stored; what its attributes lack is taken from the columns."""
    try:
        attributes: Attributes = _attributes.decode(row.attributes)
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"the column attributes is not a JSON object: {error}") from error
    attributes.setdefault("id", row.event_id)
    attributes.setdefault("type", row.event_type)
    if row.content_type != "application/json":
        attributes.setdefault("datacontenttype", row.content_type)
    message = Message(
        row.data,
        attributes,
        acking=Acking(claim, row.id),
        topic=row.topic,
        deliveries=row.attempts + 1,
    )
    if row.key and message.key != row.key:
        attributes["partitionkey"] = row.key
    return message
