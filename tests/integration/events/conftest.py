"""Engines over fresh databases with the marketplace's `outbox_events` in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from conquiet.events import schema
from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG


@pytest.fixture(params=["sqlite_url", "database_url"], ids=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each of the two databases in turn, with nothing in it."""
    made = make_engine(request.getfixturevalue(request.param))
    yield made
    made.dispose()


@pytest.fixture
def engine(empty: Engine) -> Engine:
    """Each of the two databases in turn, with the table."""
    schema.init(empty, CATALOG)
    return empty


@pytest.fixture
def postgres(database_url: str) -> Iterator[Engine]:
    made = make_engine(database_url, pool_size=20)
    schema.init(made, CATALOG)
    yield made
    made.dispose()
