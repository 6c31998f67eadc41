"""Publish an outbox from PostgreSQL's write-ahead log: its publication, its slot, and the change.

    claims ──enter──▶ log: a publication of the table exists, and claims of its rows are refused
      ▲                │  a row is published once its commit is behind the slot's position
      └─────leave──────┘  a row with `last_error` is *deferred*: it is claimed and marked, as before

Whether an outbox is published from the log is a fact of the database, not of a process: relays that
claim see the publication, and stop. `enter` defers the rows of the snapshot at which the slot
begins, `leave` marks the rows behind the slot's position; so each row is published one way.

Events of `Outbox(rows=False)` are *messages* of the log: they are in no table, unless one fails,
and is then inserted as a deferred row. They are written only while there is a slot to receive
them; `leave` makes rows of those behind its position.

The *horizon* is a transaction id below which all transactions had ended at a position that was
confirmed: rows below it are published. It is the `catalog_xmin` of the slot, which PostgreSQL
moves by this rule, and it is kept in a table as well, in case the slot is lost.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import URL, Connection, Engine

from conquiet.errors import ConfigError, StoreError
from conquiet.sql import dialect
from conquiet.sql.schema import OUTBOX_TABLE, outbox_table, split_name

logger = logging.getLogger("conquiet.relay")

DEFERRED = "last_error IS NOT NULL"
"""The condition of rows that are claimed although their outbox is published from the log."""
UNMARKED = "published_at IS NULL AND parked_at IS NULL AND last_error IS NULL"
"""The condition of rows that are published, or not, by the position of the slot."""
MESSAGES_SINCE = 140_000
"""The version of PostgreSQL whose slots send messages of the log."""
COLUMNS = ("topic", "event_type", "event_id", "key", "content_type", "data", "attributes")
"""Of an event in a message of the log, in this order; texts are in UTF-8."""
_REASON = "committed before the relay followed the write-ahead log; claimed"
_MARK_ROWS = 10_000
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Slot:
    """Describes the slot of an outbox that is published from the log."""

    name: str
    status: str
    """`reserved`, `extended`, `unreserved`, as PostgreSQL names it; `lost`, or `missing`."""
    active: bool
    lag_bytes: int
    """How much log was written behind the confirmed position; PostgreSQL keeps it."""
    kept_bytes: int | None
    """How much log PostgreSQL keeps for it at most (`max_slot_wal_keep_size`); None: any."""
    horizon: int
    """Rows of transactions below it are published."""

    @property
    def is_lost(self) -> bool:
        return self.status in ("lost", "missing")

    @property
    def share(self) -> float:
        """Return how much of what PostgreSQL keeps for it is in use; 0 if there is no limit."""
        return self.lag_bytes / self.kept_bytes if self.kept_bytes else 0.0


class WalOutbox:
    """Changes one outbox between claims and the write-ahead log, and describes its slot."""

    def __init__(self, engine: Engine | str | URL, table: str = OUTBOX_TABLE) -> None:
        self.engine = dialect.as_engine(engine)
        if not dialect.uses_psycopg(self.engine.dialect):
            kind = self.engine.dialect
            raise ConfigError(
                f"the write-ahead log is read from PostgreSQL by psycopg, not from"
                f" {kind.name}+{kind.driver}; claim the rows instead: --from claim, OutboxSource"
            )
        self.table = outbox_table(table)
        self.name = self.engine.dialect.identifier_preparer.format_table(self.table)
        schema, plain = split_name(table)
        self._state = f"{schema}.{plain}_wal" if schema else f"{plain}_wal"
        self._lock = lock_key(self.name)

    def is_entered(self) -> bool:
        """Return whether the outbox is published from the log."""
        with self._connect() as connection:
            return bool(connection.exec_driver_sql(f"SELECT {entered(self.name)}").scalar())

    def publication(self) -> str:
        """Return the name of the publication."""
        with self._connect() as connection:
            return str(connection.exec_driver_sql(f"SELECT {publication_of(self.name)}").scalar())

    def slot(self) -> Slot | None:
        """Describe the slot; None if the outbox is not published from the log."""
        with self._connect() as connection:
            return find_slot(connection, self.name, self._state)

    def reason_against(self) -> str | None:
        """Return why rows cannot or should not be published from the log here, or None."""
        with self._connect() as connection:
            level, senders, keeps, may = connection.exec_driver_sql(_SETTINGS).one()
        if level != "logical":
            return f"wal_level is {level}, not logical"
        if not may:
            return "the user of the database may not replicate (ALTER ROLE … REPLICATION)"
        if int(senders) == 0:
            return "max_wal_senders is 0"
        if int(keeps) < 0:
            return (
                "max_slot_wal_keep_size is not set, and a relay that is away would fill the disk"
                " with log"
            )
        return None

    def check(self) -> None:
        """Raise if the server does not let this user follow the log."""
        with self._connect() as connection:
            check_settings(connection)

    # --- from claims to the log -------------------------------------------------------------

    def enter(self, replication: Any, may_wait: Callable[[float], bool]) -> Slot:
        """Create publication and slot, or what is missing of them; return the slot.

        `replication` is a connection in replication mode; `may_wait` sleeps and returns False if
        the caller was stopped, which raises `StoreError`.
        """
        publication = self._publish()
        while not _ask(replication, f"SELECT pg_try_advisory_lock({self._lock})"):
            if not may_wait(_POLL_SECONDS):  # for claims that are under way
                raise StoreError(f"{self.name}: stopped while claims were under way")
        try:
            found = self.slot()
            system = str(replication.execute("IDENTIFY_SYSTEM").fetchone()[0])
            if found is not None and not found.is_lost and self._is_valid(found.name, system):
                return found
            self._create_slot(replication, publication, system)
        finally:
            replication.execute(f"SELECT pg_advisory_unlock({self._lock})")
        found = self.slot()
        assert found is not None
        return found

    def _publish(self) -> str:
        """Create the publication, from which moment on claims are refused; return its name."""
        with self._connect(lock=True) as connection:
            check_settings(connection)
            name = connection.exec_driver_sql(f"SELECT {publication_of(self.name)}").scalar()
            connection.exec_driver_sql(_CREATE_STATE.format(self._state))
            if name is None:
                place, plain = connection.exec_driver_sql(_NAMES, (self.name,)).one()
                name = _name(plain, place)
                roots = ", publish_via_partition_root = true"
                connection.exec_driver_sql(
                    f"CREATE PUBLICATION {name} FOR TABLE {self.name}"
                    f" WITH (publish = 'insert'{roots})"
                )
                logger.info("%s is published from the write-ahead log from now on", self.name)
            return str(name)

    def _is_valid(self, slot: str, system: str) -> bool:
        """Return whether the slot was created to its end, and on this cluster."""
        with self._connect() as connection:
            query = f"SELECT system FROM {self._state} WHERE slot = %s"
            return bool(connection.exec_driver_sql(query, (slot,)).scalar() == system)

    def _create_slot(self, replication: Any, publication: str, system: str) -> None:
        """Create the slot, and defer the rows that are visible in the snapshot where it begins."""
        with self._connect() as connection:
            database = connection.exec_driver_sql("SELECT current_database()").scalar_one()
            plain = publication.removeprefix("conquiet_").rpartition("_")[0]
            name = _name(plain, publication, database)
            known = find_slot(connection, self.name, self._state)
            state = connection.exec_driver_sql(f"SELECT system FROM {self._state}").scalar()
        horizon = known.horizon if known is not None and state == system else 0
        if known is not None and state is not None:
            logger.error(
                "slot %s is %s: rows of %s from transaction %d on are claimed, and those that were"
                " published already are published again; events of Outbox(rows=False) that it had"
                " still to send are lost",
                *(name, known.status if state == system else "of another server"),
                *(self.name, horizon),
            )
        self._drop_slot(name)
        is_new = replication.info.server_version >= 170000
        options = "(SNAPSHOT 'export', FAILOVER true)" if is_new else "EXPORT_SNAPSHOT"
        created = f"CREATE_REPLICATION_SLOT {name} LOGICAL pgoutput {options}"
        snapshot = replication.execute(created).fetchone()[2]
        with self._connect() as opened:
            connection = opened.execution_options(isolation_level="REPEATABLE READ")
            connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            connection.exec_driver_sql(
                f"UPDATE {self.name} SET last_error = %s"
                f" WHERE {UNMARKED} AND xid >= %s::text::xid8",
                (_REASON, str(horizon)),
            )
            connection.exec_driver_sql(f"DELETE FROM {self._state}")
            connection.exec_driver_sql(
                f"INSERT INTO {self._state} (slot, system, horizon)"
                " VALUES (%s, %s, %s::text::xid8)",
                (name, system, str(horizon)),
            )
            connection.commit()
        logger.info("slot %s was created; the log is followed from here", name)

    def keep_horizon(self) -> None:
        """Store the horizon, so that it outlives the slot."""
        with self._connect(lock=False) as connection:
            found = find_slot(connection, self.name, self._state)
            if found is not None and not found.is_lost:
                connection.exec_driver_sql(
                    f"UPDATE {self._state} SET horizon = %s::text::xid8, noted_at = now()"
                    " WHERE slot = %s AND horizon < %s::text::xid8",
                    (str(found.horizon), found.name, str(found.horizon)),
                )
                connection.commit()

    # --- and back ---------------------------------------------------------------------------

    def leave(self, may_wait: Callable[[float], bool]) -> None:
        """Mark the rows that were published from the log, and remove publication and slot.

        Rows behind the position of the slot stay unmarked, and are claimed. Waits for a relay that
        reads the slot.
        """
        says = True
        while (found := self.slot()) is not None and found.active:
            if says:
                logger.warning("slot %s is in use: stop the relay that reads it", found.name)
                says = False
            if not may_wait(_POLL_SECONDS):
                return
        with self._connect(lock=True) as holder:  # until the end: no relay enters meanwhile
            holder.exec_driver_sql(f"SELECT pg_advisory_xact_lock({self._lock})")
            found = self.slot()
            if found is not None:
                self._mark(found)
                logger.info("%s is claimed from now on", self.name)
        self._drop_leftovers()

    def _mark(self, slot: Slot) -> None:
        mark = f"UPDATE {self.name} SET published_at = clock_timestamp() WHERE {UNMARKED}"
        below = f"AND xid < '{slot.horizon}'::xid8 ORDER BY xid, id LIMIT {_MARK_ROWS}"
        some = f"{mark} AND id IN (SELECT id FROM {self.name} WHERE {UNMARKED} {below})"
        marked = _MARK_ROWS
        while marked == _MARK_ROWS:
            with self._connect() as connection:
                marked = connection.exec_driver_sql(some).rowcount
                connection.commit()
        level = {"isolation_level": "REPEATABLE READ"}
        with self._connect() as plain:
            connection = plain.execution_options(**level)
            # Waits for writers of messages, and is not part of the snapshot.
            connection.exec_driver_sql(f"LOCK TABLE {self._state} IN ACCESS EXCLUSIVE MODE")
            publication = connection.exec_driver_sql(f"SELECT {publication_of(self.name)}").scalar()
            if not slot.is_lost:
                waiting, events = self._waiting(connection, slot.name, str(publication))
                connection.exec_driver_sql(f"{mark} AND id <> ALL(%s::bigint[])", (waiting,))
                for event in events:
                    connection.exec_driver_sql(insert_event(self.name), event)
            connection.exec_driver_sql(f"DROP PUBLICATION {publication}")
            # Not DELETE: a writer with an older snapshot would still see the slot.
            connection.exec_driver_sql(f"TRUNCATE {self._state}")
            connection.commit()

    def _waiting(
        self, connection: Connection, slot: str, publication: str
    ) -> tuple[list[int], list[Event]]:
        """Return what is behind the position of the slot: ids of rows, and events of messages.

        The ids are those of all rows that this snapshot sees, and maybe of more.
        """
        with self._connect() as other:  # commits may be visible before they are on disk
            other.exec_driver_sql("SET LOCAL synchronous_commit = local")
            other.exec_driver_sql("SELECT pg_logical_emit_message(true, 'conquiet', 'flush')")
            other.commit()
        version = dialect.driver_connection(connection).info.server_version
        more = ", 'messages', 'true'" if version >= MESSAGES_SINCE else ""
        peek = (
            "SELECT data FROM pg_logical_slot_peek_binary_changes("
            f"%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s{more})"
        )
        decoder = Decoder(("id",))
        ids: list[int] = []
        events: list[Event] = []
        for (data,) in connection.exec_driver_sql(peek, (slot, publication)):
            found = decoder.decode(bytes(data))
            if isinstance(found, Emission):
                events += found.events(slot)
            elif isinstance(found, tuple):
                ids.append(int(found[0]))
        return ids, events

    def _drop_leftovers(self) -> None:
        """Drop slots of this outbox that a change left behind when it was interrupted."""
        with self._connect() as connection:
            if connection.exec_driver_sql(f"SELECT {entered(self.name)}").scalar():
                return
            place, plain = connection.exec_driver_sql(_NAMES, (self.name,)).one()
            database = connection.exec_driver_sql("SELECT current_database()").scalar_one()
        self._drop_slot(_name(plain, _name(plain, place), database))

    def _drop_slot(self, name: str) -> None:
        with self._connect() as connection:
            connection.exec_driver_sql(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s AND database = current_database()",
                (name,),
            )
            connection.commit()

    @contextmanager
    def _connect(self, *, lock: bool = False) -> Iterator[Connection]:
        with dialect.raise_store_errors(self.engine), self.engine.connect() as connection:
            if lock:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({self._lock} + 1)")
            yield connection
            if lock:
                connection.commit()


def lock_key(table: str) -> str:
    """Return the SQL of the advisory lock that claims share, and that a change excludes."""
    return f"hashtextextended('conquiet wal', CAST('{table}'::regclass AS bigint))"


def publication_of(table: str) -> str:
    """Return the SQL of the name of the publication of an outbox; NULL if there is none."""
    return (
        "(SELECT p.pubname FROM pg_publication_rel AS r JOIN pg_publication AS p"
        f" ON p.oid = r.prpubid WHERE r.prrelid = '{table}'::regclass"
        " AND starts_with(p.pubname::text, 'conquiet_') LIMIT 1)"
    )


def entered(table: str) -> str:
    """Return the SQL of whether an outbox is published from the log."""
    return f"({publication_of(table)} IS NOT NULL)"


def refusal(table: str) -> StoreError:
    return StoreError(
        f"{table} is published from the write-ahead log, and not claimed: conquiet relay run"
        " --from wal (or WalSource) publishes it; --from claim changes back"
    )


def emit_events(table: str) -> str:
    """Return the SQL that writes events into the log, as one message of the transaction.

    Without a slot that will send it, the message would be lost: then the statement fails.
    """
    slot = _RECEIVER.format(state=f"{table}_wal", since=MESSAGES_SINCE)
    refused = f"CAST(concat('{table} {NOT_FOLLOWED}') AS integer)::text"
    return f"SELECT pg_logical_emit_message(true, coalesce(({slot}), {refused}), %b::bytea)"


def insert_event(table: str) -> str:
    """Return the SQL that makes a row of an event, from its columns as bytes."""
    values = (
        "%b::bytea"
        if column == "data"
        else "nullif(convert_from(%b::bytea, 'UTF8'), '')"
        if column == "key"
        else "convert_from(%b::bytea, 'UTF8')" + ("::jsonb" if column == "attributes" else "")
        for column in COLUMNS
    )
    return f"INSERT INTO {table} ({', '.join(COLUMNS)}) VALUES ({', '.join(values)})"


def find_slot(connection: Connection, table: str, state: str | None = None) -> Slot | None:
    """Describe the slot of an outbox; None if the outbox is not published from the log."""
    if not connection.exec_driver_sql(f"SELECT {entered(table)}").scalar():
        return None
    state = state or f"{table}_wal"
    row = connection.exec_driver_sql(_SLOT.format(state)).one()
    kept = None if int(row.kept) < 0 else int(row.kept) << 20
    horizon = int(row.horizon or 0)
    if row.catalog_xmin is not None:
        upcoming = int(row.upcoming)
        horizon = max(horizon, upcoming - (upcoming - int(row.catalog_xmin)) % (1 << 32))
    status = row.wal_status or "missing"
    return Slot(row.slot or "", status, bool(row.active), int(row.lag or 0), kept, horizon)


def check_settings(connection: Connection) -> None:
    """Raise if the server does not let this user follow the log."""
    level, senders, _, may = connection.exec_driver_sql(_SETTINGS).one()
    if level != "logical":
        raise ConfigError(
            f"wal_level is {level}: to publish from the write-ahead log, ALTER SYSTEM SET wal_level"
            " = logical and restart PostgreSQL; or claim the rows: --from claim"
        )
    if int(senders) == 0:
        raise ConfigError("max_wal_senders is 0: set it to 1 or more and restart PostgreSQL")
    if not may:
        raise ConfigError(
            "the user of the database may not replicate: ALTER ROLE … REPLICATION; or claim the"
            " rows: --from claim"
        )


def _name(plain: str, *scope: str) -> str:
    """Return a name that is unique in its scope and fits PostgreSQL's 63 characters."""
    return f"conquiet_{plain[:40]}_{zlib.crc32('.'.join(scope).encode()):08x}"


def _ask(connection: Any, query: str) -> Any:
    return connection.execute(query).fetchone()[0]


_SETTINGS = """
SELECT current_setting('wal_level'), current_setting('max_wal_senders'),
       (SELECT setting FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user)
"""
_NAMES = """
SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.oid = %s::text::regclass
"""
_CREATE_STATE = """
CREATE TABLE IF NOT EXISTS {} (
    slot text PRIMARY KEY, system text NOT NULL, horizon xid8 NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT now())
"""
NOT_FOLLOWED = (
    "is not published from the write-ahead log, so events of Outbox(rows=False) would be lost:"
    " start conquiet relay run --from wal, on PostgreSQL 14 or newer"
)
# A writer holds the table of the state until it commits, and `leave` waits for it.
_RECEIVER = """\
SELECT w.slot FROM {state} AS w JOIN pg_replication_slots AS s ON s.slot_name = w.slot
 WHERE s.database = current_database() AND s.wal_status <> 'lost'
   AND current_setting('server_version_num')::integer >= {since}"""
_SLOT = """
SELECT w.slot, w.horizon::text AS horizon, s.wal_status, s.active, s.catalog_xmin::text,
       pg_snapshot_xmax(pg_current_snapshot())::text AS upcoming,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn) AS lag,
       (SELECT setting FROM pg_settings WHERE name = 'max_slot_wal_keep_size') AS kept
  FROM (SELECT 1) AS one
  LEFT JOIN {} AS w ON true
  LEFT JOIN pg_replication_slots AS s ON s.slot_name = w.slot AND s.database = current_database()
"""


# --- the output of pgoutput -----------------------------------------------------------------------

_begin = struct.Struct("!QqI").unpack_from
_commit = struct.Struct("!BQQq").unpack_from
_length = struct.Struct("!I").unpack_from
_count = struct.Struct("!H").unpack_from


@dataclass(frozen=True, slots=True)
class Begin:
    """Begins a transaction, which is committed already."""

    xid: int
    at: int
    """When it committed: microseconds since 2000."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Ends a transaction."""

    end: int
    """The position behind it."""


Event: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
"""An event in a message of the log, by `COLUMNS`."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Event]).decode


def pack_events(events: list[Event]) -> bytes:
    """Pack the events of one statement for a message of the log."""
    return _encode(events)


@dataclass(frozen=True, slots=True)
class Emission:
    """Is a message of the log, of this outbox or of anybody else."""

    prefix: bytes
    content: bytes

    def events(self, slot: str) -> list[Event]:
        """Return the events that are for a slot; none if it is for another."""
        return _decode(self.content) if self.prefix == slot.encode() else []


class Decoder:
    """Decodes messages of pgoutput, protocol 1, of one table, into rows of the wanted columns."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._places: tuple[int, ...] = ()
        self._read = 0
        """How many columns of a row are read: up to the last that is wanted."""
        self.types: tuple[tuple[str, int], ...] = ()
        """Name and type of each column, as the last description of the table has them."""

    def decode(self, data: bytes) -> tuple[Any, ...] | Begin | Commit | Emission | None:
        """Return a row, of bytes and None; or what else it is; None for what is not of interest."""
        kind = data[0]
        if kind == 73:  # I
            return self._row(data)
        if kind == 66:  # B
            _, at, xid = _begin(data, 1)
            return Begin(xid, at)
        if kind == 67:  # C
            return Commit(_commit(data, 1)[2])
        if kind == 77 and data[1] & 1:  # M, in a transaction
            end = data.index(0, 10)
            return Emission(data[10:end], data[end + 5 :])
        if kind == 82:  # R
            self._learn(data)
        return None

    def _row(self, data: bytes) -> tuple[bytes | None, ...]:
        values: list[bytes | None] = []
        at = 8  # behind the kind, the table and the number of columns
        for _ in range(self._read):
            if data[at] in (116, 98):  # t: as text, b: in binary
                start = at + 5
                at = start + _length(data, at + 1)[0]
                values.append(data[start:at])
            else:
                at += 1
                values.append(None)
        return tuple([values[place] for place in self._places])

    def _learn(self, data: bytes) -> None:
        """Note where the wanted columns are; the message comes first, and after ALTER TABLE."""
        at = data.index(0, 5) + 1
        at = data.index(0, at) + 2
        (count,) = _count(data, at)
        at += 2
        types = []
        for _ in range(count):
            end = data.index(0, at + 1)
            types.append((data[at + 1 : end].decode(), _length(data, end + 1)[0]))
            at = end + 9
        names = [name for name, _ in types]
        try:
            self._places = tuple(names.index(column) for column in self._columns)
        except ValueError as error:
            raise ConfigError(f"the published table lacks a column: {error}") from error
        self._read = max(self._places) + 1
        self.types = tuple(types)
