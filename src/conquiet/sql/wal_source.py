"""Read an outbox from PostgreSQL's write-ahead log, as a source of a relay.

    COMMIT ──▶ slot ──rows in commit order──▶ message ──ack──▶ the position moves behind it
                                                 │ nack: the row is deferred, which a claim retries
                                                 └ nack with a Blameless error: read again, at once

Rows are not marked: a row is published once its commit lies behind the confirmed position of the
slot, which moves when all rows before it are settled. One relay at a time reads a slot; another
waits, and takes over. A row that failed is *deferred*: `attempts` and `last_error` are stored
before the position passes it, and it is claimed and marked as without the log. An event that
was a message of the log (`Outbox(rows=False)`) becomes a row by that.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import msgspec
from sqlalchemy import URL, Engine
from sqlalchemy.exc import SQLAlchemyError

from conquiet.acking import Acking, Error
from conquiet.errors import (
    Blameless,
    ConfigError,
    GivenBack,
    InvalidMessage,
    PermanentError,
    StoreError,
)
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.claim import error_text
from conquiet.sql.outbox_source import (
    OutboxRow,
    OutboxSource,
    TableSource,
    check_attempts,
    outbox_layout,
)
from conquiet.sql.promotion import Promoter
from conquiet.sql.schema import OUTBOX_TABLE
from conquiet.sql.wal import (
    COLUMNS,
    DEFERRED,
    MESSAGES_SINCE,
    Begin,
    Commit,
    Decoder,
    Emission,
    Slot,
    WalOutbox,
)

logger = logging.getLogger("conquiet.relay")

_TAKE_OVER_SECONDS = 0.1
"""How often a relay that waits asks whether the slot is free."""
_KEEPALIVE_SECONDS = 5.0
"""PostgreSQL ends a connection that is silent for `wal_sender_timeout`, a minute by default."""
_HORIZON_SECONDS = 10.0
_BEHIND = "an earlier row of its key failed"
_STOPPED = "the relay stopped in the middle of its transaction"
_MOST_REST = 10_000
_REST_SECONDS = 1.0
_2000 = 946_684_800_000_000
_IN_USE = "55006"
Values: TypeAlias = tuple[int, bytes, bytes, bytes, bytes | None, bytes, bytes, bytes, int]
"""The columns of a row, in the order of `OutboxRow`; texts are not decoded yet.

An event that is in no table has a number below 0 for an id, unique in its stream.
"""
_WAITS_TO_READ, _WAITS_TO_WRITE = 1, 2  # of psycopg.waiting.Wait


class WalSource:
    """Reads the rows of a generic outbox from the write-ahead log, in the order of their commits.

    The first relay creates a publication and a slot, from which moment on claims of this outbox
    are refused; rows that wait then are claimed once. Needs `wal_level = logical`, a user who may
    replicate and own the table, and a connection to PostgreSQL itself: PgBouncer does not pass
    the log on.

    `ordered` lets later rows of a key wait while one of it has failed or is parked. A failed row is
    retried after a second, then after twice as long each time; it is parked at `max_attempts`.

    `engine` and `table` are as with `OutboxSource`. Rows that failed are looked for every `poll`
    seconds; one that is claimed again and not settled within `hold` seconds is released.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        table: str = OUTBOX_TABLE,
        *,
        max_attempts: int = 10,
        ordered: bool = False,
        poll: float = 0.5,
        hold: float = 300.0,
    ) -> None:
        self.outbox = WalOutbox(engine, table)
        self.engine = self.outbox.engine
        self.table = self.outbox.table
        self.max_attempts = check_attempts(max_attempts)
        self.ordered = ordered
        self.poll = poll
        self.late = 0
        """How many settlements came after their connection was lost, and were ignored."""
        self._deferred = _DeferredRows(
            self.engine, table, max_attempts=max_attempts, ordered=ordered, poll=poll, hold=hold
        )
        self._promoter = Promoter(self.engine, table)
        self._driver_error: type[Exception] = self.engine.dialect.loaded_dbapi.Error
        self._claim_at = 0.0
        self._keep_at = 0.0
        self._blocked: set[str] = set()
        self._stream: Stream | None = None
        self._is_waiting = False
        self._opening = threading.Lock()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        name = self.engine.dialect.identifier_preparer.format_table(self.table)
        self._defer_sql = (
            f"UPDATE {name} AS o SET last_error = f.error, attempts = o.attempts + f.cost,"
            " parked_at = CASE WHEN f.parks THEN clock_timestamp() END"
            " FROM unnest(%s::bigint[], %s::text[], %s::integer[], %s::boolean[])"
            " AS f (id, error, cost, parks)"
            " WHERE o.id = f.id AND o.published_at IS NULL AND o.parked_at IS NULL"
        )
        texts = ", ".join(f"f.{column}" for column in COLUMNS if column != "attributes")
        self._insert_sql = (
            f"INSERT INTO {name} ({texts.replace('f.', '')}, attributes, last_error, attempts,"
            f" parked_at) SELECT {texts}, f.attributes::jsonb, f.error, f.cost,"
            " CASE WHEN f.parks THEN clock_timestamp() END"
            " FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::bytea[],"
            " %s::text[], %s::text[], %s::integer[], %s::boolean[]) WITH ORDINALITY"
            f" AS f ({', '.join(COLUMNS)}, error, cost, parks, place) ORDER BY place RETURNING id"
        )
        self._blocked_sql = (
            f"SELECT DISTINCT key FROM {name} WHERE published_at IS NULL"
            f" AND (parked_at IS NOT NULL OR {DEFERRED}) AND key IS NOT NULL"
        )

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        while not self._closed:
            self._promoter.promote(limit)
            messages = self._next(limit)
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            due = min(self._promoter.seconds_to_next(), self.poll)
            self._wait(min(left, due, max(0.0, self._claim_at - time.monotonic())))
        return ()

    def slot(self) -> Slot | None:
        """Describe the slot: its lag, and whether PostgreSQL still has what it needs."""
        return self.outbox.slot()

    def settle(self, acked: Sequence[Ticket], nacked: Sequence[tuple[Ticket, Error]]) -> None:
        again: list[Ticket] = []
        failed: list[tuple[Ticket, Error]] = []
        for ticket, error in nacked:
            if ticket[0].stream is not self._stream:
                self.late += 1
            elif isinstance(error, Blameless):
                again.append(ticket)
            else:
                failed.append((ticket, error))
        if again:
            again[0][0].stream.give_back(again)
        if failed:
            tickets = [ticket for ticket, _ in failed]
            try:
                self._defer([(place.row(id_), error) for (place, id_), error in failed])
            except BaseException:
                tickets[0][0].stream.give_back(tickets)
                raise
            acked = [*acked, *tickets]
        stream = self._stream
        current = [ticket for ticket in acked if ticket[0].stream is stream]
        self.late += len(acked) - len(current)
        if stream is not None and current:
            stream.pass_rows(current)

    def stop(self) -> None:
        """End a waiting `read` and read no more; messages in flight can still be settled."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def close(self) -> None:
        """Confirm what was settled, and free the slot for another relay.

        Unsettled rows of a transaction that was published in part are deferred, so that the
        others are not published again.
        """
        self.stop()
        with self._opening:
            stream = self._stream
            if stream is not None:
                try:
                    rest = stream.collect_rest()
                    if rest:
                        self._defer([(place.row(id_), GivenBack(_STOPPED)) for place, id_ in rest])
                        stream.pass_rows(rest)
                except (StoreError, SQLAlchemyError, OSError, self._driver_error) as error:
                    logger.warning("could not end at a commit; its rows come again: %s", error)
                self._stream = None
                stream.close(confirms=True)
        self._deferred.close()
        self._wake.close()
        self._woken.close()

    # --- rows -------------------------------------------------------------------------------

    def _next(self, limit: int) -> list[Message[bytes]]:
        stream = self._open()
        if stream is None:
            return []
        try:
            stream.confirm()
            now = time.monotonic()
            if now >= self._keep_at:
                self._keep_at = now + _HORIZON_SECONDS
                self.outbox.keep_horizon()
            if now >= self._claim_at:
                messages = self._deferred.claim(limit)
                # As long as there are as many as asked for, they come first.
                full = len(messages) >= limit
                self._claim_at = now if full else now + min(self.poll, self._deferred.pause())
                if self._blocked:
                    self._blocked = self._keys()
                if messages:
                    return messages
            return self._messages(stream.take(limit))
        except (SQLAlchemyError, OSError, self._driver_error) as error:
            self._lose(stream)
            raise dialect.store_error(self.engine, error) from error

    def _messages(self, rows: Sequence[tuple[Place, Values]]) -> list[Message[bytes]]:
        messages: list[Message[bytes]] = []
        aside: list[tuple[Ticket, Error]] = []
        blocked = self._blocked
        for place, values in rows:
            ticket = (place, values[0])
            if blocked and values[4] is not None and values[4].decode() in blocked:
                aside.append((ticket, GivenBack(_BEHIND)))
                continue
            try:
                message = _message(values, Acking(self, ticket))
                if message is None:
                    message = self._deferred.build(_row(values), Acking(self, ticket))
                messages.append(message)
            except Exception as error:  # noqa: BLE001 - the other rows go on
                reason = InvalidMessage(f"the row cannot be read: {error}")
                aside.append((ticket, reason))
                if self.ordered and values[4] is not None:
                    blocked.add(values[4].decode())
        if aside:
            tickets = [ticket for ticket, _ in aside]
            stream = tickets[0][0].stream
            try:
                self._defer([(place.row(id_), error) for (place, id_), error in aside])
            except BaseException:
                stream.give_back([(place, values[0]) for place, values in rows])
                raise
            stream.pass_rows(tickets)
        return messages

    def _defer(self, failed: Sequence[tuple[OutboxRow, Error]]) -> None:
        """Store why rows were not published, so that the position may pass them."""
        values: list[tuple[int, str, int, bool]] = []
        for row, error in failed:
            costs = not isinstance(error, Blameless)
            is_last = row.attempts + 1 >= self.max_attempts
            parks = costs and (is_last or isinstance(error, PermanentError))
            reason = error_text(error)
            values.append((row.id, reason, int(costs), parks))
            if parks:
                self._deferred.log(logging.ERROR, "parked", row, reason)
        rows = [row for row, _ in failed]
        ids = self._store_failures(rows, values)
        for row, id_, (_, _, costs_one, parks) in zip(rows, ids, values, strict=True):
            if self.ordered and row.key is not None:
                self._blocked.add(row.key)
            if costs_one and not parks:
                self._deferred.backoff.add(id_, row.key, row.attempts, costs=True)
        self._claim_at = min(self._claim_at, time.monotonic() + self._deferred.pause())

    def _store_failures(
        self, rows: Sequence[OutboxRow], values: Sequence[tuple[int, str, int, bool]]
    ) -> list[int]:
        """Note why rows failed, and make rows of events that were none; return the ids of all."""
        stored = [value for value in values if value[0] >= 0]
        new = [
            (*row[1:-1], *value[1:])
            for row, value in zip(rows, values, strict=True)
            if value[0] < 0
        ]
        made: list[int] = []
        with dialect.raise_store_errors(self.engine), self.engine.begin() as connection:
            if stored:
                arrays = tuple(list(column) for column in zip(*stored, strict=True))
                connection.exec_driver_sql(self._defer_sql, arrays)
            if new:
                arrays = tuple(list(column) for column in zip(*new, strict=True))
                made += connection.exec_driver_sql(self._insert_sql, arrays).scalars()
        ids = iter(made)
        return [value[0] if value[0] >= 0 else next(ids) for value in values]

    def _keys(self) -> set[str]:
        """Return the keys whose rows must wait behind a row that failed."""
        if not self.ordered:
            return set()
        with dialect.raise_store_errors(self.engine), self.engine.connect() as connection:
            return set(connection.exec_driver_sql(self._blocked_sql).scalars())

    # --- the connection ---------------------------------------------------------------------

    def _open(self) -> Stream | None:
        """Return the stream of rows; None while another relay reads it."""
        if self._stream is not None:
            return self._stream
        with self._opening:
            if self._closed:
                return None
            try:
                self._stream = self._connect()
            except (SQLAlchemyError, OSError, self._driver_error) as error:
                raise dialect.store_error(self.engine, error) from error
        if self._stream is not None:
            self._claim_at = 0.0
            self._blocked = self._keys()
        return self._stream

    def _connect(self) -> Stream | None:
        connection = connect_for_replication(self.engine)
        try:
            slot = self.outbox.enter(connection, self._may_wait)
            if slot.active:
                self._stand_by(connection, slot.name)
                return None
            publication = self.outbox.publication()
            try:
                stream = Stream(connection, slot.name, publication)
            except self._driver_error as error:
                if getattr(error, "sqlstate", None) != _IN_USE:
                    raise
                self._stand_by(connection, slot.name)
                return None
        except BaseException:
            connection.close()
            raise
        self._is_waiting = False
        logger.info("reading slot %s", slot.name)
        return stream

    def _stand_by(self, connection: Any, slot: str) -> None:
        connection.close()
        if not self._is_waiting:
            logger.info("slot %s is read by another relay; waiting to take over", slot)
            self._is_waiting = True

    def _wait(self, seconds: float) -> None:
        stream = self._stream
        if stream is None:
            seconds = min(max(seconds, 0.001), _TAKE_OVER_SECONDS)
        poller = select.poll()
        with contextlib.suppress(ValueError):  # another thread has closed this source
            poller.register(self._woken, select.POLLIN)
            if stream is not None:
                poller.register(stream.file, select.POLLIN)
            poller.poll(seconds * 1000)

    def _may_wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return not self._closed

    def _lose(self, stream: Stream) -> None:
        with self._opening:
            if self._stream is stream:
                self._stream = None
            stream.close(confirms=False)


class _DeferredRows(OutboxSource):
    """Claims rows that are not published by the position of the slot."""

    def __init__(
        self,
        engine: Engine,
        table: str,
        *,
        max_attempts: int,
        ordered: bool,
        poll: float,
        hold: float,
    ) -> None:
        TableSource.__init__(
            self,
            engine,
            replace(outbox_layout(table), only=DEFERRED),
            max_attempts=max_attempts,
            ordered=ordered,
            poll=poll,
            wakeup=False,
            hold=hold,
        )

    def claim(self, limit: int) -> list[Message[bytes]]:
        self._give_up_old_claims()
        return self._claim(limit)

    def pause(self) -> float:
        """Return in how many seconds a failed row may be claimed; infinity if none waits."""
        return self.backoff.seconds_to_next()

    def build(self, row: OutboxRow, acking: Acking) -> Message[bytes]:
        return self._message(row, acking)


class Place:
    """Counts the rows of one transaction of the stream, and those that are settled."""

    __slots__ = ("end", "is_begun", "number", "stream", "unsettled")

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self.number = number
        self.unsettled: dict[int, Values] = {}
        """The rows that have come and are not settled, by id."""
        self.is_begun = False
        """Whether a row of it was settled."""
        self.end: int | None = None
        """The position behind the transaction; None until its last row has come."""

    def row(self, id_: int) -> OutboxRow:
        return _row(self.unsettled[id_])


Ticket: TypeAlias = tuple[Place, int]
"""Names a row by its transaction and its id."""


class Stream:
    """Receives rows of a slot, and confirms the position behind which all are settled."""

    def __init__(self, connection: Any, slot: str, publication: str) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._lock = threading.Lock()
        """Of the connection: another thread keeps it alive while a batch is published."""
        self._counting = threading.Lock()
        self._decoder = Decoder((*OutboxRow._fields, "last_error"))
        self._slot = slot
        self._emitted = 0
        self._places: deque[Place] = deque()
        self._open: Place | None = None
        self._given_back: list[Ticket] = []
        self._received: deque[tuple[Place, Values]] = deque()
        self._ahead = 0
        """How many rows the other thread shall receive while a batch is published."""
        self._failure: Exception | None = None
        """What it met, for the next reader."""
        self._is_plain = False
        """Whether the columns are those of a table that `schema` has made, in its order."""
        self._transactions = 0
        self._position = 0
        self._seen = 0
        self._told = -1
        self._told_at = 0.0
        self._asked = False
        self._ended = False
        self._woken = threading.Event()
        version = connection.info.server_version
        self._is_binary = version >= _BINARY_SINCE
        options = f"(proto_version '1', publication_names '{publication}'"
        options += ", binary 'true'" if self._is_binary else ""
        options += ", messages 'true')" if version >= MESSAGES_SINCE else ")"
        command = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 {options}"
        connection.wait(_start(connection, command.encode()))
        self.file: int = self._pgconn.socket
        self._poller = select.poll()
        self._poller.register(self.file, select.POLLIN)
        threading.Thread(target=self._assist, name="conquiet-wal", daemon=True).start()

    def take(self, limit: int) -> list[tuple[Place, Values]]:
        """Return up to `limit` rows that have come; those that were given back come first."""
        if self._given_back:
            with self._counting:
                given = self._given_back
                given.sort(key=lambda ticket: (ticket[0].number, ticket[1]))
                taken, self._given_back = given[:limit], given[limit:]
            return [(place, place.unsettled[id_]) for place, id_ in taken]
        received = self._received
        if len(received) < limit:
            with self._lock:
                self._ahead = 0  # else it could take rows whose arrival this thread waits for
                self._receive(limit)
        rows = [received.popleft() for _ in range(min(limit, len(received)))]
        if len(rows) == limit:
            self._ahead = limit
            self._woken.set()
        return rows

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        with self._counting:
            self._given_back.extend(tickets)

    def pass_rows(self, tickets: Iterable[Ticket]) -> None:
        """Note that rows are settled; the position moves over transactions that are whole."""
        with self._counting:
            for place, id_ in tickets:
                place.unsettled.pop(id_, None)
                place.is_begun = True
            self._advance()

    def collect_rest(self) -> list[Ticket]:
        """Return the unsettled rows of transactions of which other rows are settled.

        Waits a moment for the rest of one that has not come to its end, unless it is very long.
        """
        with self._lock:
            self._ahead = 0
        deadline = time.monotonic() + _REST_SECONDS
        while (
            (place := self._open) is not None
            and (place.is_begun or not place.unsettled)
            and len(place.unsettled) < _MOST_REST
            and time.monotonic() < deadline
        ):
            with self._lock:
                self._receive(len(self._received) + 1)
            time.sleep(0.001)
        with self._counting:
            begun = [one for one in self._places if one.is_begun and one.end is not None]
            return [(one, id_) for one in begun for id_ in one.unsettled]

    def confirm(self) -> None:
        """Send the position, if it has moved or PostgreSQL has asked."""
        if self._position > self._told or self._asked:
            with self._lock:
                self._tell()

    def close(self, *, confirms: bool) -> None:
        self._ended = True
        self._woken.set()
        with self._lock:
            with contextlib.suppress(Exception):  # what is not confirmed comes again
                if confirms:
                    self._tell()
            self._connection.close()

    def _advance(self) -> None:
        places = self._places
        while places and places[0].end is not None and not places[0].unsettled:
            self._position = max(self._position, places.popleft().end or 0)
        if not places:
            self._position = max(self._position, self._seen)

    def _receive(self, limit: int) -> None:
        """Receive until `limit` rows wait, or no more have come; the lock is held."""
        if self._failure is not None:
            raise self._failure
        receive, add = self._pgconn.get_copy_data, self._received.append
        is_fresh = False
        # Beyond the last row, up to the commit: it lets the position move.
        while len(self._received) < limit or (
            self._open is not None and len(self._received) == limit
        ):
            count, view = receive(1)
            if count > 0:
                data = bytes(view)
                if data[0] == 119 and data[25] == 73:  # w, I: a row
                    place, values = self._open, self._values(data)
                    if values is not None:
                        assert place is not None
                        place.unsettled[values[0]] = values
                        add((place, values))
                else:
                    self._take_message(data)
            elif count < 0:
                self._connection.wait(_finish(self._connection))
            elif is_fresh:
                return
            else:
                is_fresh = self._read()

    def _values(self, data: bytes) -> Values | None:
        """Return the columns of a row; None if it was deferred when it was inserted."""
        values = _plain_values(data) if self._is_plain else None
        if values is None:
            *found, error = cast(tuple[Any, ...], self._decoder.decode(data[25:]))
            if error is not None:
                return None
            values = _values_from_binary(*found) if self._is_binary else _values_from_text(*found)
        return values

    def _take_emission(self, emission: Emission) -> None:
        place = self._open
        assert place is not None
        for topic, kind, id_, key, content_type, data, attributes in emission.events(self._slot):
            self._emitted -= 1
            event = topic, kind, id_, key or None, content_type, data, attributes
            values: Values = (self._emitted, *event, 0)
            place.unsettled[self._emitted] = values
            self._received.append((place, values))

    def _read(self) -> bool:
        """Read from the socket; return whether there was nothing to read."""
        if not self._poller.poll(0):
            return True
        self._pgconn.consume_input()  # which does not block, like all of psycopg's connections
        return False

    def _take_message(self, data: bytes) -> None:
        kind = data[0]
        if kind == 107:  # k: keepalive
            seen, _, asks = _keepalive(data, 1)
            with self._counting:
                # All rows before this position have come.
                self._seen = max(self._seen, seen)
                self._advance()
            self._asked = self._asked or bool(asks)
            return
        if kind != 119:  # w: a message of pgoutput
            return
        found = self._decoder.decode(data[25:])
        if found is None:
            self._is_plain = self._is_binary and self._decoder.types[: len(_PLAIN)] == _PLAIN
        elif isinstance(found, Begin):
            self._transactions += 1
            self._open = Place(self, self._transactions)
            with self._counting:
                self._places.append(self._open)
        elif isinstance(found, Emission):
            self._take_emission(found)
        elif isinstance(found, Commit):
            assert self._open is not None
            with self._counting:
                self._open.end = found.end
                self._seen = max(self._seen, found.end)
                self._open = None
                self._advance()

    def _tell(self) -> None:
        position = self._position
        now = int(time.time() * 1_000_000) - _2000
        data = _status(b"r", self._seen, position, position, now, 0)
        self._connection.wait(_send(self._pgconn, data))
        self._told, self._told_at, self._asked = position, time.monotonic(), False

    def _assist(self) -> None:
        """Receive rows while a batch is published, and keep the connection alive."""
        while not self._ended:
            self._woken.wait(_KEEPALIVE_SECONDS)
            self._woken.clear()
            with self._lock:
                if self._ended:
                    return
                try:
                    if self._ahead:
                        limit, self._ahead = self._ahead, 0
                        self._receive(limit)
                    if time.monotonic() - self._told_at >= _KEEPALIVE_SECONDS:
                        self._tell()
                except Exception as error:  # noqa: BLE001 - the reader raises it
                    self._failure = error
                    return


_keepalive = struct.Struct("!QqB").unpack_from
_status = struct.Struct("!cQQQqB").pack

# --- rows -----------------------------------------------------------------------------------------

_BINARY_SINCE = 140_000
_PLAIN = (
    *(("id", 20), ("created_at", 1184), ("topic", 25), ("event_type", 25), ("event_id", 25)),
    *(("key", 25), ("content_type", 25), ("data", 17), ("attributes", 3802), ("attempts", 23)),
    ("last_error", 25),
)
"""The columns of an outbox up to the last that is read, and their types."""
_first = struct.Struct("!33xBIqBIqBI").unpack_from
_head = struct.Struct("!BI").unpack_from
_end = struct.Struct("!BIiB").unpack_from


def _plain_values(data: bytes) -> Values | None:
    """Read the columns `_PLAIN` in binary, quicker than any columns.

    None if one is NULL, or if `last_error` is not.
    """
    try:
        k1, _, id_, k2, _, _, k3, size = _first(data)
        at = 64 + size
        topic = data[64:at]
        k4, size = _head(data, at)
        start, at = at + 5, at + 5 + size
        event_type = data[start:at]
        k5, size = _head(data, at)
        start, at = at + 5, at + 5 + size
        event_id = data[start:at]
        key = None
        if data[at] == 110:  # n: NULL
            at += 1
        else:
            size = _head(data, at)[1]
            start, at = at + 5, at + 5 + size
            key = data[start:at]
        k6, size = _head(data, at)
        start, at = at + 5, at + 5 + size
        content_type = data[start:at]
        k7, size = _head(data, at)
        start, at = at + 5, at + 5 + size
        body = data[start:at]
        k8, size = _head(data, at)
        start, at = at + 6, at + 5 + size  # behind the version of jsonb
        attributes = data[start:at]
        k9, _, attempts, k10 = _end(data, at)
    except (struct.error, IndexError):
        return None
    if not k1 == k2 == k3 == k4 == k5 == k6 == k7 == k8 == k9 == 98 or k10 != 110:
        return None  # b: in binary; n: NULL
    return id_, topic, event_type, event_id, key, content_type, body, attributes, attempts


def _values_from_binary(
    id_: bytes,
    topic: bytes,
    event_type: bytes,
    event_id: bytes,
    key: bytes | None,
    content_type: bytes,
    data: bytes,
    attributes: bytes,
    attempts: bytes,
) -> Values:
    numbers = int.from_bytes(id_), int.from_bytes(attempts)
    attributes = attributes.removeprefix(b"\x01")  # the version of jsonb
    return numbers[0], topic, event_type, event_id, key, content_type, data, attributes, numbers[1]


def _values_from_text(
    id_: bytes,
    topic: bytes,
    event_type: bytes,
    event_id: bytes,
    key: bytes | None,
    content_type: bytes,
    data: bytes,
    attributes: bytes,
    attempts: bytes,
) -> Values:
    body = bytes.fromhex(data[2:].decode())
    numbers = int(id_), int(attempts)
    return numbers[0], topic, event_type, event_id, key, content_type, body, attributes, numbers[1]


def _message(values: Values, acking: Acking) -> Message[bytes] | None:
    """Build the message of a row whose attributes are all in their column; None if they are not."""
    _, topic, _, _, key, content_type, data, stored, attempts = values
    attributes: Attributes = _attributes(stored)
    if "id" not in attributes or "type" not in attributes:
        return None
    if content_type != b"application/json" and "datacontenttype" not in attributes:
        return None
    if key is not None:
        own = attributes.get("partitionkey") or attributes.get("subject")
        if own != key.decode():
            return None
    return Message(data, attributes, acking=acking, topic=topic.decode(), deliveries=attempts + 1)


_attributes = msgspec.json.Decoder(dict[str, Any]).decode


def _row(values: Values) -> OutboxRow:
    id_, topic, event_type, event_id, key, content_type, data, attributes, attempts = values
    return OutboxRow(
        id_,
        topic.decode(),
        event_type.decode(),
        event_id.decode(),
        None if key is None else key.decode(),
        content_type.decode(),
        data,
        attributes.decode(),
        attempts,
    )


def connect_for_replication(engine: Engine) -> Any:
    """Open a connection in replication mode, with the parameters of the engine's own."""
    import psycopg

    with dialect.raise_store_errors(engine), engine.connect() as plain:
        info = dialect.driver_connection(plain).info
        given = {**info.get_parameters(), "replication": "database"}
        if info.password:
            given["password"] = info.password
    given["options"] = f"{given.get('options', '')} -c timezone=UTC -c bytea_output=hex".strip()
    given["client_encoding"] = "UTF8"
    try:
        return psycopg.connect(**given, autocommit=True, prepare_threshold=None)
    except psycopg.OperationalError as error:
        text = str(error)
        if "unsupported startup parameter" in text or "pgbouncer" in text.lower():
            raise ConfigError(
                "PgBouncer does not pass the write-ahead log on: connect the relay to PostgreSQL"
                f" itself, or claim the rows, --from claim ({dialect.one_line(error)})"
            ) from error
        raise dialect.store_error(engine, error) from error


# Generators of I/O, as psycopg's own: `Connection.wait` runs them.


def _start(connection: Any, command: bytes) -> Generator[int, int, None]:
    pgconn = connection.pgconn
    pgconn.send_query(command)
    yield from _flush(pgconn)
    while True:
        yield _WAITS_TO_READ
        pgconn.consume_input()
        if not pgconn.is_busy():
            break
    result = pgconn.get_result()
    _check(connection, result)


def _finish(connection: Any) -> Generator[int, int, None]:
    """Raise why the server ended the stream."""
    pgconn = connection.pgconn
    while pgconn.is_busy():
        yield _WAITS_TO_READ
        pgconn.consume_input()
    _check(connection, pgconn.get_result())
    raise OSError("the server ended the stream of the write-ahead log")


def _check(connection: Any, result: Any) -> None:
    from psycopg import errors, pq

    if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
        raise errors.error_from_result(result, encoding=connection.info.encoding)


def _send(pgconn: Any, data: bytes) -> Generator[int, int, None]:
    pgconn.put_copy_data(data)
    yield from _flush(pgconn)


def _flush(pgconn: Any) -> Generator[int, int, None]:
    while pgconn.flush():
        ready = yield _WAITS_TO_READ | _WAITS_TO_WRITE
        if ready & _WAITS_TO_READ:
            pgconn.consume_input()
