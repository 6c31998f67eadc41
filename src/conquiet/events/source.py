"""EventSource: what a relay reads from `outbox_events`.

    stored ──claim──▶ claimed ──ack──▶ published_at set
                         │ nack: attempt_count + 1 and last_error; at max_attempts it is *parked*:
                         │       unpublished, and claimed no more
                         │ nack with a Blameless error: as before, costs nothing
                         └ crash: as before, at once; the lock went with the connection

It knows no catalog: types are text to it, and a row of a type that it has never heard of goes
out like any other. How the two databases claim is in `claim`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import URL, Engine

from conquiet.acking import Acking, Error
from conquiet.codec import SPEC_VERSION
from conquiet.errors import Blameless, ConfigError, GivenBack, InvalidMessage, StoreError
from conquiet.events.check import canonical
from conquiet.events.claim import Claimed, Failure, Row, claims_of
from conquiet.events.resting import Rests
from conquiet.events.table import EVENTS_TABLE
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.wakeup import Wakeup, wakeup_of

logger = logging.getLogger("conquiet.relay")

TOPIC = "pf-domain-events"
MAX_ERROR_CHARACTERS = 2_000
"""How much of an error is kept in `last_error`."""


class EventSource:
    """Claims rows of `outbox_events` as messages; ack marks one published, nack leaves it.

    Several sources, in threads, processes or on machines, share the rows among them, and keep no
    order among each other. A failed row rests for a second, then twice as long each time, up to
    five minutes, while the others go on.

    A message has the attributes `event_id`, `event_type`, `aggregate_type`, `aggregate_id` and
    `created_at`, besides CloudEvents' own. CloudEvents allows no `_` in a name, and sinks that
    write binary CloudEvents (Redis Streams, HTTP) refuse it: with `cloudevents=True` the same
    five are `id`, `type`, `aggregatetype`, `subject` and `time` alone.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        table: str = EVENTS_TABLE,
        *,
        topic: str = TOPIC,
        source: str = "/outbox_events",
        max_attempts: int = 10,
        poll: float = 0.5,
        wakeup: bool = True,
        hold: float = 300.0,
        cloudevents: bool = False,
    ) -> None:
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts!r}: must be a whole number from 1 on")
        for name, seconds in (("poll", poll), ("hold", hold)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds!r}: must be more than 0 seconds")
        self.engine = dialect.as_engine(engine)
        self.table = table
        self.topic = topic
        self.source = source
        self.max_attempts = max_attempts
        self.poll = poll
        self.hold = hold
        self.cloudevents = cloudevents
        self.late = 0
        """Settlements that came after their claim had ended; they do nothing."""
        self.resting = Rests()
        self._claims_of = claims_of(self.engine, table, max_attempts)
        self._wakeup: Wakeup = wakeup_of(self.engine, table, enabled=wakeup)
        self._claims: set[_Claim] = set()
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
        self._claims_of.close()

    def _claim(self, limit: int) -> list[Message[bytes]]:
        claimed = self._claims_of.claim(limit, self.resting.ids())
        if claimed is None:
            return []
        claim = _Claim(self, claimed)
        with self._lock:
            self._claims.add(claim)
        if self._closed:  # close() may have come while we waited for the database
            claim.release()
            return []
        messages: list[Message[bytes]] = []
        broken: list[tuple[UUID, Error]] = []
        for row in claimed.rows:
            try:
                messages.append(self._message(row, claim))
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
                self.table,
                self.hold,
            )
            claim.release()

    def _message(self, row: Row, claim: _Claim) -> Message[bytes]:
        try:
            # JSONB has its own spaces and order of keys; what goes out is the same everywhere.
            data = canonical(msgspec.json.decode(row.payload_json))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidMessage(f"the column payload_json is not JSON: {error}") from error
        return Message(
            data,
            self._attributes(row),
            acking=Acking(claim, row.id),
            topic=self.topic,
            deliveries=row.attempt_count + 1,
        )

    def _attributes(self, row: Row) -> Attributes:
        event_id, aggregate_id, created_at = (
            str(row.id),
            str(row.aggregate_id),
            _text(row.created_at),
        )
        attributes: Attributes = {
            "specversion": SPEC_VERSION,
            "id": event_id,
            "type": row.event_type,
            "source": self.source,
            "subject": aggregate_id,
            "time": created_at,
            "datacontenttype": "application/json",
        }
        if self.cloudevents:
            attributes["aggregatetype"] = row.aggregate_type
            return attributes
        attributes.update(
            event_id=event_id,
            event_type=row.event_type,
            aggregate_type=row.aggregate_type,
            aggregate_id=aggregate_id,
            created_at=created_at,
        )
        return attributes

    def ended(self, claim: _Claim) -> None:
        with self._lock:
            self._claims.discard(claim)


class _Claim:
    """The settler of the rows of one claim; ends it when each of them is settled."""

    def __init__(self, source: EventSource, claimed: Claimed) -> None:
        self.since = time.monotonic()
        self._source = source
        self._claimed = claimed
        self._lock = threading.Lock()
        self._waiting = {row.id: row for row in claimed.rows}
        self._acked: list[UUID] = []
        self._nacked: list[tuple[Row, Error]] = []
        self._ended = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
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
        unmarked = self._claimed.settle(self._acked, failures)
        resting.forget(self._acked)
        for row, error in self._nacked:
            if not isinstance(error, GivenBack):
                resting.add(row.id, row.attempt_count, costs=_costs(error))
        for id_ in unmarked:
            resting.add(id_, 0, costs=True)

    def _failure(self, row: Row, error: Error) -> Failure:
        reason = error_text(error)
        attempts = row.attempt_count + 1
        if attempts >= self._source.max_attempts:
            logger.error(
                "parked event_id=%s event_type=%s aggregate_type=%s aggregate_id=%s"
                " after attempt=%d: %s",
                row.id,
                row.event_type,
                row.aggregate_type,
                row.aggregate_id,
                attempts,
                reason,
            )
        return Failure(row.id, reason)


def error_text(error: Error) -> str:
    """An error as `last_error` keeps it: cut on a character, and text that databases take."""
    if error is None:
        return "nacked without a reason"
    reason = f"{type(error).__name__}: {error}"[: MAX_ERROR_CHARACTERS + 1]
    reason = reason.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if len(reason) > MAX_ERROR_CHARACTERS:
        reason = reason[: MAX_ERROR_CHARACTERS - 1] + "…"
    return reason


def _costs(error: Error) -> bool:
    return not isinstance(error, Blameless)


def _text(moment: datetime) -> str:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat().replace("+00:00", "Z")
