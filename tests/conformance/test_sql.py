"""The conformance suite over `conquiet.sql`: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any

import psycopg
import pytest
from psycopg import sql as quoted
from sqlalchemy import Column, Engine, Insert, Integer, MetaData, Table, Text, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from tests.conformance.on_loop import OnLoop

from conquiet.embedded import PostgresServer
from conquiet.message import Message
from conquiet.sql import (
    Cleanup,
    Inbox,
    LogSource,
    Outbox,
    OutboxSource,
    Transaction,
    connection,
    schema,
)
from conquiet.sql import engine as make_engine
from conquiet.sql.dialect import begin_to_write
from conquiet.testing.contracts import (
    DelayContract,
    InboxContract,
    OutboxContract,
    PromotionContract,
    SourceContract,
    TransactionContract,
    WorkerContract,
)

COUNTS = Table(
    "counts", MetaData(), Column("key", Text, primary_key=True), Column("value", Integer)
)


class OverDatabase:
    """A storage in a database: effects are counters in a table."""

    direct: Engine
    """Looks into the database."""
    engine: Engine | AsyncEngine
    """Is tested; the same one, unless it is async."""

    def prepare(self, url: str, **options: Any) -> None:
        self.engine = self.direct = make_engine(url, **options)
        schema.init(self.direct)
        COUNTS.create(self.direct)

    def transaction(self) -> Transaction:
        return Transaction(self.engine)

    def note(self, key: str) -> None:
        with connection(self.engine) as found:
            found.execute(self.count_up, {"key": key, "value": 1})

    def read_note(self, key: str) -> int:
        with self.direct.connect() as found:
            return found.execute(select(COUNTS.c.value).where(COUNTS.c.key == key)).scalar() or 0

    def handle(self) -> Callable[[], object]:
        with connection(self.engine) as found:
            return lambda: found.execute(self.count_up, {"key": "late", "value": 1})

    @cached_property
    def count_up(self) -> Insert:
        dialect = postgresql if self.direct.name == "postgresql" else sqlite
        return dialect.insert(COUNTS).on_conflict_do_update(
            index_elements=["key"], set_={"value": COUNTS.c.value + 1}
        )

    def inbox(self, subscriber: str) -> Inbox:
        return Inbox(subscriber)

    def outbox(self, topic: str) -> Outbox:
        return Outbox(topic)

    def clean(self, retention: float) -> None:
        Cleanup(self.direct, retention=retention or 1e-6).run_once()

    def relay(self) -> OutboxSource:
        return OutboxSource(self.direct)

    def ordered_relay(self) -> OutboxSource:
        return OutboxSource(self.direct, ordered=True)

    def cancel(self, id: str) -> bool:
        with begin_to_write(self.direct) as connection:
            return self.outbox("orders").cancel(connection, id)


class OverSqlite(OverDatabase):
    @pytest.fixture(autouse=True)
    def _database(self, sqlite_url: str) -> Iterator[None]:
        self.prepare(sqlite_url, connect_args={"timeout": 1.0})
        yield
        self.direct.dispose()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Somebody else has the write lock for longer than anyone waits."""
        with closing(sqlite3.connect(str(self.direct.url.database))) as other:
            other.isolation_level = None
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")


class OverPostgresql(OverDatabase):
    @pytest.fixture(autouse=True)
    def _database(self, database_url: str, postgres_server: PostgresServer) -> Iterator[None]:
        self.server = postgres_server
        self.prepare(database_url)
        yield
        self.direct.dispose()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The database throws everybody out and lets nobody in."""
        name = quoted.Identifier(str(self.direct.url.database))
        allow = quoted.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        with psycopg.connect(self.server.url, autocommit=True) as admin:
            admin.execute(allow.format(name, quoted.SQL("false")))
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                (self.direct.url.database,),
            )
            yield
            admin.execute(allow.format(name, quoted.SQL("true")))


class TestSqliteTransaction(OverSqlite, TransactionContract):
    pass


class TestSqliteInbox(OverSqlite, InboxContract):
    pass


class TestSqliteDelays(OverSqlite, PromotionContract):
    pass


class TestSqliteOutbox(OverSqlite, OutboxContract):
    one_relay_at_a_time = True


class TestPostgresqlTransaction(OverPostgresql, TransactionContract):
    pass


class TestPostgresqlTransactionWithoutPipeline(OverPostgresql, TransactionContract):
    def transaction(self) -> Transaction:
        return Transaction(self.engine, queue_statements=False)


class TestPostgresqlTransactionWithSavepoints(OverPostgresql, TransactionContract):
    def transaction(self) -> Transaction:
        return Transaction(self.engine, isolate="savepoint")


class TestSqliteTransactionWithSavepoints(OverSqlite, TransactionContract):
    def transaction(self) -> Transaction:
        return Transaction(self.engine, isolate="savepoint")


class TestPostgresqlInbox(OverPostgresql, InboxContract):
    pass


class TestPostgresqlInboxWithSavepoints(OverPostgresql, InboxContract):
    def transaction(self) -> Transaction:
        return Transaction(self.engine, isolate="savepoint")


class TestPostgresqlDelays(OverPostgresql, PromotionContract):
    pass


class TestPostgresqlOutbox(OverPostgresql, OutboxContract):
    pass


class TestPostgresqlInboxUnderSerializable(OverPostgresql, InboxContract):
    """A conflict is a retryable error there, and in the end the same."""

    def transaction(self) -> Transaction:
        return Transaction(self.engine, isolation_level="SERIALIZABLE")


class OverAsyncDatabase(OnLoop):
    """The same database by an async engine; to look into it stays the part of a sync one."""

    direct: Engine
    driver = "postgresql+asyncpg"

    def prepare(self, url: str, **options: Any) -> None:
        # An outage of the tested one breaks its connections too.
        super().prepare(url, pool_pre_ping=True, **options)  # type: ignore[misc]
        address = self.direct.url.set(drivername=self.driver)
        self.engine = create_async_engine(address, **options)

    async def disconnect(self) -> None:
        await self.engine.dispose()


class TestAsyncpgTransaction(OverAsyncDatabase, OverPostgresql, TransactionContract):
    pass


@pytest.mark.slow
class TestAsyncpgTransactionWithSavepoints(TestAsyncpgTransaction):
    def transaction(self) -> Transaction:
        return Transaction(self.engine, isolate="savepoint")


class TestAsyncpgInbox(OverAsyncDatabase, OverPostgresql, InboxContract):
    pass


@pytest.mark.slow
class TestAsyncpgInboxUnderSerializable(TestAsyncpgInbox):
    def transaction(self) -> Transaction:
        return Transaction(self.engine, isolation_level="SERIALIZABLE")


@pytest.mark.slow
class TestAsyncpgOutbox(OverAsyncDatabase, OverPostgresql, OutboxContract):
    pass


@pytest.mark.slow
class TestAsyncpgDelays(OverAsyncDatabase, OverPostgresql, PromotionContract):
    pass


@pytest.mark.slow
class TestAsyncPsycopgTransaction(TestAsyncpgTransaction):
    driver = "postgresql+psycopg_async"


@pytest.mark.slow
class TestAsyncPsycopgInbox(TestAsyncpgInbox):
    driver = "postgresql+psycopg_async"


@pytest.mark.slow
class TestAsyncPsycopgOutbox(TestAsyncpgOutbox):
    driver = "postgresql+psycopg_async"


class OverAiosqlite(OverAsyncDatabase, OverSqlite):
    driver = "sqlite+aiosqlite"


@pytest.mark.slow
class TestAiosqliteTransaction(OverAiosqlite, TransactionContract):
    pass


@pytest.mark.slow
class TestAiosqliteInbox(OverAiosqlite, InboxContract):
    pass


@pytest.mark.slow
class TestAiosqliteOutbox(OverAiosqlite, OutboxContract):
    one_relay_at_a_time = True


class OverLog:
    """The log of a database; no pause after a nack, so that what failed comes back in its place."""

    lease = 0.5
    direct: Engine

    def open(self, lease: float, group: str = "billing", partitions: int = 1) -> LogSource:
        settings: dict[str, Any] = {"lease": lease, "poll": 0.02, "backoff": 0.0}
        return LogSource(self.direct, "orders", group, partitions=partitions, **settings)

    def open_other_group(self) -> LogSource:
        return self.open(60.0, "shipping")

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        with Transaction(self.direct).scope(messages):
            Outbox("orders").store(messages)


class LogContract(OverLog, SourceContract):
    @pytest.mark.slow
    def test_any_sequence_of_settlements_loses_nothing_and_repeats_nothing(self) -> None:
        super().test_any_sequence_of_settlements_loses_nothing_and_repeats_nothing()


class TestSqliteLog(OverSqlite, LogContract):
    pass


class TestPostgresqlLog(OverPostgresql, LogContract):
    pass


class OverPartitions(OverLog):
    """Events without a key have no order then."""

    def open(self, lease: float, group: str = "billing", partitions: int = 8) -> LogSource:
        return super().open(lease, group, partitions)


class TestSqliteLogUnderWorker(OverPartitions, OverSqlite, WorkerContract):
    pass


class TestPostgresqlLogUnderWorker(OverPartitions, OverPostgresql, WorkerContract):
    pass


@pytest.mark.slow
class TestPostgresqlLogUnderAsyncWorker(TestPostgresqlLogUnderWorker):
    on_loop = True  # which reads the log in threads


class TestSqliteLogDelays(OverPartitions, OverSqlite, DelayContract):
    pass


class TestPostgresqlLogDelays(OverPartitions, OverPostgresql, DelayContract):
    pass
