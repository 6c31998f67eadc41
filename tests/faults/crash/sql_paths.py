"""Worker and relay over SQL, on PostgreSQL and on SQLite."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import psycopg
import redis.asyncio
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.faults import invariants
from tests.faults.crash.scenario import (
    COMMANDS,
    DEAD,
    GROUP,
    HOPELESS,
    LEASE,
    SENT,
    Place,
    Scenario,
    answer,
    commands_settled,
    fail_at_first,
    judge_ticks,
    prepare_schedule,
    send_commands,
    until,
    write_ticks,
)
from tests.faults.invariants import Event, Facts
from tests.faults.seam import Seam

from conquiet import Message, Router, Worker
from conquiet.middleware import DeadLetter, Retry
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.sql import (
    Inbox,
    LogSource,
    Outbox,
    OutboxSource,
    Transaction,
    WalSource,
    async_connection,
    connection,
    engine,
    schema,
)
from conquiet.sql.promotion import Promoter

EVENTS = "events"
UPSERT = text(
    "INSERT INTO orders (id, amount) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET amount = orders.amount + 1"
)
ORDERS = "CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL)"
INSERT = (
    'INSERT INTO outbox (topic, event_type, event_id, "key", content_type, data, attributes)'
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
DELAY = (
    'INSERT INTO outbox_delayed (topic, event_type, event_id, "key", content_type, data,'
    " attributes, due_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)


@cache
def ddl(dialect: str) -> str:
    return schema.ddl(dialect) + "\n" + ORDERS


class OnSql(Scenario):
    """What the scenarios need of a database."""

    open: Any
    create: Any
    engine: Any
    locked: Any
    fill: Any


class OnPostgres:
    """The stores of a scenario in a schema of its own."""

    needs_postgres = True

    def open(self, place: Place) -> Any:
        return psycopg.connect(place.postgres, autocommit=True)

    def create(self, place: Place) -> Any:
        opened = self.open(place)
        opened.execute("CREATE SCHEMA " + opened.execute("SHOW search_path").fetchone()[0])
        opened.execute(ddl("postgresql"))
        return opened

    def engine(self, place: Place) -> Any:
        return engine(place.postgres)

    def locked(self, place: Place) -> list[str]:
        return []  # looked for once all are done: the sessions of a database are everybody's

    def fill(self, opened: Any, row: tuple[Any, ...]) -> None:
        opened.execute(INSERT.replace("?", "%s"), row)


class OnSqlite:
    """The stores of a scenario in a file of its own."""

    def open(self, place: Place) -> Any:
        return sqlite3.connect(place.sqlite, isolation_level=None)

    def create(self, place: Place) -> Any:
        opened = self.open(place)
        opened.execute("PRAGMA journal_mode=WAL")
        opened.executescript(ddl("sqlite"))
        return opened

    def engine(self, place: Place) -> Any:
        return engine(f"sqlite:///{place.sqlite}")

    def locked(self, place: Place) -> list[str]:
        return invariants.locks_left(place.sqlite)

    def fill(self, opened: Any, row: tuple[Any, ...]) -> None:
        opened.execute(INSERT, row)


class WorkerOverSql(OnSql):
    """Commands of a stream take effect in a table, and leave events in the outbox."""

    lease = LEASE

    def prepare(self, place: Place) -> None:
        self.create(place).close()
        with place.client() as client:
            send_commands(client)

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        made = self.engine(place)
        client = redis.Redis.from_url(place.redis)
        router = Router()
        router.use(DeadLetter(StreamSink(client), topic=DEAD))
        router.use(Transaction(made), *self.inbox(), Outbox(EVENTS))

        @router.raw(type="place.order", source="/shop", name="place_order")
        def place_order(message: Message[bytes]) -> Message[Any]:
            order = msgspec.json.decode(message.data)
            with connection(made) as found:
                found.execute(UPSERT, {"id": order["command"]})
            return answer(order)

        kind = until(StreamSource, commands_settled(place), seam)
        source = kind(client, COMMANDS, GROUP, lease=LEASE)
        worker = Worker(source, router, batch_size=2)
        worker.run()
        made.dispose()
        client.close()

    def inbox(self) -> tuple[Any, ...]:
        return (Inbox("billing"),)

    def facts(self, place: Place) -> Facts:
        facts = Facts(frozenset(SENT), HOPELESS, Counter())
        opened = self.open(place)
        invariants.read_sql(opened, facts)
        opened.close()
        with place.client() as client:
            facts.unsettled = invariants.unsettled_entries(client, COMMANDS, GROUP)
            dead = {fields[b"id"].decode() for _, fields in client.xrange(DEAD)}
        stored = Counter(event.command for event in facts.rows)
        facts.unsettled += [
            f"{command}, which has {stored[command]} events in the outbox,"
            for command in set(SENT) - HOPELESS
            if stored[command] != 1
        ]
        facts.unsettled += [f"{c}, no dead letter," for c in HOPELESS - dead]
        facts.locked = self.locked(place)
        return facts


class AsyncWorkerOverPostgres(OnPostgres, WorkerOverSql):
    """The same on an event loop, with two groups in flight; the stream is read there too."""

    driver: str

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        asyncio.run(self.work(place, seam))

    async def work(self, place: Place, seam: Seam) -> None:
        made = self.async_engine(place)
        client = redis.asyncio.Redis.from_url(place.redis)
        router = Router()
        router.use(DeadLetter(StreamSink(client), topic=DEAD))
        router.use(Transaction(made), *self.inbox(), Outbox(EVENTS))

        @router.raw(type="place.order", source="/shop", name="place_order")
        async def place_order(message: Message[bytes]) -> Message[Any]:
            order = msgspec.json.decode(message.data)
            async with async_connection(made) as found:
                await found.execute(UPSERT, {"id": order["command"]})
            return answer(order)

        kind = until(StreamSource, commands_settled(place), seam)
        source = kind(client, COMMANDS, GROUP, lease=LEASE)
        await Worker(source, router, batch_size=2, concurrency=2).run_async()
        await made.dispose()
        await client.aclose()

    def async_engine(self, place: Place) -> Any:
        url = make_url(place.postgres).set(drivername=self.driver)
        if self.driver.endswith("psycopg_async"):
            return create_async_engine(url)
        path = str(url.query["options"]).partition("=")[2]
        settings = {"server_settings": {"search_path": path}}
        return create_async_engine(url.set(query={}), connect_args=settings)


class RelayOverSql(OnSql):
    """Rows of the outbox are published to a stream."""

    ordered = False
    read_seconds = 0.02

    def prepare(self, place: Place) -> None:
        opened = self.create(place)
        self.insert(opened)
        opened.close()

    def insert(self, opened: Any) -> None:
        for number, (command, key) in enumerate(SENT.items()):
            data = json.dumps({"command": command, "number": number}).encode()
            about = {"id": f"e-{number}", "type": "placed", "source": "/shop", "subject": key}
            row = (EVENTS, "placed", f"e-{number}", key, "application/json", data)
            self.fill(opened, (*row, json.dumps(about)))

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        def drained() -> bool:
            facts = Facts()
            opened = self.open(place)
            invariants.read_sql(opened, facts)
            opened.close()
            return self.is_drained(facts)

        made = self.engine(place)
        client = redis.Redis.from_url(place.redis)
        kind = until(OutboxSource, drained, seam, self.read_seconds)
        source = kind(made, poll=1.0, ordered=self.ordered)
        Relay(source, self.sink(client), batch_size=2, ordered=self.ordered).run()
        made.dispose()
        client.close()

    def is_drained(self, facts: Facts) -> bool:
        return all(event.published for event in facts.rows)

    def sink(self, client: redis.Redis) -> Any:
        return StreamSink(client)

    def facts(self, place: Place) -> Facts:
        facts = Facts(ordered=self.ordered)
        opened = self.open(place)
        invariants.read_sql(opened, facts)
        opened.close()
        with place.client() as client:
            facts.log = invariants.read_log(client, EVENTS)
        facts.locked = self.locked(place)
        return facts


class DelayedOverSql(RelayOverSql):
    """Delayed events that are due are moved to the outbox, and published to a stream."""

    def fill(self, opened: Any, row: tuple[Any, ...]) -> None:
        opened.execute(self.write_marks(DELAY), (*row, "2026-01-31 12:00:00"))

    def write_marks(self, statement: str) -> str:
        return statement

    def is_drained(self, facts: Facts) -> bool:
        return len(facts.rows) >= len(SENT) and super().is_drained(facts)

    def facts(self, place: Place) -> Facts:
        facts = super().facts(place)
        opened = self.open(place)
        delayed = opened.execute("SELECT event_id FROM outbox_delayed").fetchall()
        opened.close()
        found = Counter([*(row.id for row in facts.rows), *(id_ for (id_,) in delayed)])
        for number in range(len(SENT)):
            if (times := found[f"e-{number}"]) != 1 or delayed:
                facts.unsettled.append(f"e-{number} was not moved to the outbox once, but {times}")
        return facts


class LogOverSql(OnSql):
    """Commands of the log take effect in a table; the position moves in their transaction."""

    lease = LEASE
    mode: Any = "position"

    def prepare(self, place: Place) -> None:
        opened = self.create(place)
        for number, (command, key) in enumerate(SENT.items()):
            data = json.dumps({"command": command, "key": key, "number": number}).encode()
            about = {"id": command, "type": "place.order", "source": "/web", "subject": key}
            row = (COMMANDS, "place.order", command, key, "application/json", data)
            self.fill(opened, (*row, json.dumps(about)))
        opened.close()

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        made = self.engine(place)
        source = self.source(place, seam, made)
        router = Router()
        router.use(*self.retry(), Transaction(made), *self.inbox(), Outbox(EVENTS))

        @router.raw(type="place.order", source="/shop", name="place_order")
        def place_order(message: Message[bytes]) -> Message[Any]:
            order = msgspec.json.decode(message.data)
            with connection(made) as found:
                found.execute(UPSERT, {"id": order["command"]})
            self.check(message)
            return answer(order)

        Worker(source, router, batch_size=2).run()
        made.dispose()

    def retry(self) -> tuple[Any, ...]:
        return ()

    def check(self, message: Message[Any]) -> None:
        """Fail after the effects, where a scenario wants that."""

    def source(self, place: Place, seam: Seam, made: Any) -> LogSource:
        kind = until(LogSource, lambda: not self.unsettled(place), seam)
        times = {"lease": LEASE, "poll": 0.02, "backoff": 0.0, "wakeup": False}
        mode = {"exactly_once": self.mode, "producers_repeat": False}
        return kind(made, COMMANDS, GROUP, partitions=1, **times, **mode)

    def inbox(self) -> tuple[Any, ...]:
        return () if self.mode == "position" else (Inbox("billing"),)

    def unsettled(self, place: Place) -> list[str]:
        opened = self.open(place)
        left = [row[0] for row in opened.execute(UNREAD).fetchall()]
        left += [row[0] for row in opened.execute(RETRIED).fetchall()]
        opened.close()
        return left

    def facts(self, place: Place) -> Facts:
        facts = Facts(frozenset(SENT), HOPELESS, Counter())
        opened = self.open(place)
        invariants.read_sql(opened, facts)
        facts.rows = []
        found = opened.execute(f"SELECT data FROM outbox WHERE topic = '{EVENTS}'").fetchall()
        stored = Counter(json.loads(bytes(row[0]))["command"] for row in found)
        dead = opened.execute("SELECT count(*) FROM outbox_retries WHERE dead_at IS NOT NULL")
        facts.unsettled = [*self.unsettled(place)]
        if dead.fetchone()[0] != len(HOPELESS):
            facts.unsettled.append("a dead letter")
        opened.close()
        facts.unsettled += [
            f"{command}, which has {stored[command]} events in the outbox,"
            for command in set(SENT) - HOPELESS
            if stored[command] != 1
        ]
        facts.locked = self.locked(place)
        return facts


UNREAD = (
    f"SELECT event_id FROM outbox AS o WHERE topic = '{COMMANDS}' AND NOT EXISTS (SELECT 1 FROM"
    " outbox_positions AS p WHERE (p.xid, p.id) >= (CAST(CAST(o.xid AS text) AS bigint), o.id))"
)
RETRIED = "SELECT CAST(id AS text) FROM outbox_retries WHERE dead_at IS NULL"


class LogOverPostgres(OnPostgres, LogOverSql):
    name = "log over PostgreSQL"


class LogOverSqlite(OnSqlite, LogOverSql):
    name = "log over SQLite"


class LogOverPostgresWithInbox(LogOverPostgres):
    name = "log over PostgreSQL, with an inbox"
    mode = "inbox"


class LogOverSqliteWithInbox(LogOverSqlite):
    name = "log over SQLite, with an inbox"
    mode = "inbox"


class LaterOverSql(LogOverSql):
    """Each command fails at first, waits in the table of retries, and comes back by itself."""

    def retry(self) -> tuple[Any, ...]:
        return (Retry(delays=[0.05] * 20),)

    def check(self, message: Message[Any]) -> None:
        fail_at_first(message)


class LaterOverPostgres(OnPostgres, LaterOverSql):
    name = "later, over PostgreSQL"


class LaterOverSqlite(OnSqlite, LaterOverSql):
    name = "later, over SQLite"


class ScheduleOverSql(OnSql):
    """Ticks that are due are written into the outbox; the schedule moves on with them."""

    url: Any

    def prepare(self, place: Place) -> None:
        self.create(place).close()
        prepare_schedule(self.url(place), place)

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        write_ticks(self.url(place))

    def facts(self, place: Place) -> Facts:
        opened = self.open(place)
        ids = [row[0] for row in opened.execute("SELECT event_id FROM outbox ORDER BY id")]
        opened.close()
        return Facts(unsettled=judge_ticks(place, ids), locked=self.locked(place))


class ScheduleOverPostgres(OnPostgres, ScheduleOverSql):
    name = "schedule, over PostgreSQL"

    def url(self, place: Place) -> str:
        return place.postgres


class ScheduleOverSqlite(OnSqlite, ScheduleOverSql):
    name = "schedule, over SQLite"

    def url(self, place: Place) -> str:
        return f"sqlite:///{place.sqlite}"


class WorkerOverPostgres(OnPostgres, WorkerOverSql):
    name = "worker over PostgreSQL"


class WorkerOverAsyncpg(AsyncWorkerOverPostgres):
    name = "async worker over PostgreSQL, asyncpg"
    driver = "postgresql+asyncpg"


class WorkerOverAsyncPsycopg(AsyncWorkerOverPostgres):
    name = "async worker over PostgreSQL, psycopg"
    driver = "postgresql+psycopg_async"


class WorkerOverSqlite(OnSqlite, WorkerOverSql):
    name = "worker over SQLite"


class RelayOverPostgres(OnPostgres, RelayOverSql):
    name = "relay over PostgreSQL"
    read_seconds = 0.2  # also a slow machine comes to LISTEN within it


class RelayOverSqlite(OnSqlite, RelayOverSql):
    name = "relay over SQLite"


class OrderedRelayOverPostgres(RelayOverPostgres):
    name = "relay over PostgreSQL, ordered"
    ordered = True


class RelayFromTheLog(RelayOverPostgres):
    """The relay follows the write-ahead log; the rows come when its slot exists."""

    name = "relay over PostgreSQL, from the log"

    def prepare(self, place: Place) -> None:
        self.create(place).close()
        self.enter(place)
        opened = self.open(place)
        self.insert(opened)
        opened.close()

    def enter(self, place: Place) -> None:
        made = self.engine(place)
        source = WalSource(made)
        source.read(1, 0.0)
        source.close()
        made.dispose()

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        made = self.engine(place)
        client = redis.Redis.from_url(place.redis)
        kind = until(WalSource, lambda: not self.waiting(place), seam, self.read_seconds)
        Relay(kind(made, poll=0.1), StreamSink(client), batch_size=2).run()
        made.dispose()
        client.close()

    def waiting(self, place: Place) -> list[str]:
        """Events that are not in the stream, or that the slot would give again."""
        with place.client() as client:
            told = {event.id for event in invariants.read_log(client, EVENTS)}
        return [f"e-{number}" for number in range(len(SENT)) if f"e-{number}" not in told]

    def facts(self, place: Place) -> Facts:
        facts = super().facts(place)
        facts.rows = [replace(event, published=True) for event in facts.rows]  # none is marked
        opened = self.open(place)
        [(slot, publication)] = opened.execute(
            "SELECT slot, (SELECT pubname FROM pg_publication_rel AS r JOIN pg_publication AS p"
            " ON p.oid = r.prpubid WHERE r.prrelid = 'outbox'::regclass) FROM outbox_wal"
        ).fetchall()
        peek = (
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', %s, 'messages', 'true')"
            " WHERE get_byte(data, 0) = ascii('I') OR position(convert_to(%s, 'UTF8') IN data) > 0"
        )
        for _ in range(200):  # the relay has ended, and its slot is free in a moment
            try:
                [(rows,)] = opened.execute(peek, (slot, publication, slot)).fetchall()
                break
            except psycopg.errors.ObjectInUse:
                time.sleep(0.05)
        facts.unsettled += [f"{rows} rows of the slot"] if rows else []
        opened.close()
        return facts


class RelayFromTheLogWithoutRows(RelayFromTheLog):
    """The events are messages of the log; those of a transaction that was cut become rows."""

    name = "relay over PostgreSQL, from the log without rows"

    def fill(self, opened: Any, row: tuple[Any, ...]) -> None:
        *_, data, about = row
        event = Message(data, json.loads(about), topic=EVENTS)
        with opened.transaction():
            Outbox(EVENTS, rows=False).add(opened, [event])

    def facts(self, place: Place) -> Facts:
        facts = super().facts(place)
        facts.rows = [
            Event(f"e-{number}", command, key, number, published=True)
            for number, (command, key) in enumerate(SENT.items())
        ]
        return facts


class RelayChangingToTheLog(RelayFromTheLog):
    """Rows that wait when the relay changes from claims to the log."""

    name = "relay over PostgreSQL, changing to the log"

    def enter(self, place: Place) -> None:
        """Not before the run."""


# --- to be found out --------------------------------------------------------------------------


class DelayedOverPostgres(OnPostgres, DelayedOverSql):
    name = "delayed, over PostgreSQL"
    fill = DelayedOverSql.fill

    def write_marks(self, statement: str) -> str:
        return statement.replace("?", "%s")


class DelayedOverSqlite(OnSqlite, DelayedOverSql):
    name = "delayed, over SQLite"
    fill = DelayedOverSql.fill


class MovingTwice(DelayedOverSqlite):
    """Broken on purpose: inserts into the outbox and deletes in two transactions."""

    name = "delayed, over SQLite, that moves in two transactions"

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        move = Promoter._promote_sqlite

        def move_in_two(promoter: Any, connection: Any, limit: int) -> Any:
            execute = connection.execute

            def commit_each(statement: Any, *given: Any) -> Any:
                result = execute(statement, *given)
                if str(statement).startswith("INSERT"):
                    connection.commit()
                return result

            connection.execute = commit_each
            return move(promoter, connection, limit)

        Promoter._promote_sqlite = move_in_two  # type: ignore[method-assign]
        super().run(place, seam, attempt)


class WithoutInbox(WorkerOverSqlite):
    """What was committed and not acked takes effect again."""

    name = "worker over SQLite, without an inbox"

    def inbox(self) -> tuple[Any, ...]:
        return ()


class MarkingFirst(RelayOverSqlite):
    """A sink that says yes, and sends a batch with the next: a crash in between loses it."""

    name = "relay over SQLite, that marks before it publishes"

    def sink(self, client: redis.Redis) -> Any:
        return Late(StreamSink(client))


class Late:
    keeps_order = True

    def __init__(self, sink: StreamSink) -> None:
        self._sink = sink
        self._kept: list[Any] = []

    def publish_each(self, messages: Any) -> Any:
        self._sink.publish(self._kept)
        self._kept = [
            Message(bytes(one.data), dict(one.attributes), topic=EVENTS) for one in messages
        ]
        return [None] * len(messages)

    def close(self) -> None:
        self._sink.publish(self._kept)
        self._sink.close()
