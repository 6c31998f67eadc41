"""Engines over fresh databases with the tables of conquiet in them, and sources over those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from tests import needs
from tests.integration.sql.bouncer import PgBouncer

from conquiet.embedded import PostgresServer
from conquiet.sql import engine as make_engine
from conquiet.sql import schema
from conquiet.sql.outbox_source import OutboxSource

ORDERS = "CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL DEFAULT 0)"


def prepared(url: str) -> Engine:
    made = make_engine(url)
    schema.init(made)
    with made.begin() as connection:
        connection.execute(text(ORDERS))
    return made


@pytest.fixture
def sqlite(sqlite_url: str) -> Iterator[Engine]:
    made = prepared(sqlite_url)
    yield made
    made.dispose()


@pytest.fixture
def postgres(database_url: str) -> Iterator[Engine]:
    made = prepared(database_url)
    yield made
    made.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each of the two databases in turn."""
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def open_source(engine: Engine) -> Iterator[Callable[..., OutboxSource]]:
    """Opens sources of a relay; any setting may differ. All are closed at the end."""
    opened: list[OutboxSource] = []

    def make(**options: Any) -> OutboxSource:
        opened.append(OutboxSource(engine, **{"poll": 0.05, "wakeup": False, **options}))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


@pytest.fixture(scope="session")
def pgbouncer(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """A PgBouncer in front of the worker's PostgreSQL; each database has a pool of its own."""
    with needs.found("PgBouncer", lambda: PgBouncer(postgres_server.url)) as server:
        yield server


@pytest.fixture
def bounced_url(pgbouncer: PgBouncer, database_url: str) -> str:
    """The URL of a fresh database, through PgBouncer in transaction mode."""
    return pgbouncer.in_front_of(database_url)
