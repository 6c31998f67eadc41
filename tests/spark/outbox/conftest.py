"""Outboxes in fresh databases, with rows in them, and Spark reading them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from conquiet.spark import register
from conquiet.sql import engine as make_engine
from conquiet.sql import schema


@pytest.fixture(params=["sqlite_url", "database_url"], ids=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """Each of the two databases in turn, with nothing in it."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Each of the two databases in turn, with an outbox."""
    made = make_engine(url)
    schema.init(made)
    yield made
    made.dispose()


@pytest.fixture
def postgres(database_url: str) -> Iterator[Engine]:
    made = make_engine(database_url)
    schema.init(made)
    yield made
    made.dispose()


@pytest.fixture
def on_spark(spark):
    """spark.read of an outbox: `on_spark(url, table=…).load()`."""
    register(spark)

    def read(url: str, **options: object):
        return spark.read.format("conquiet-outbox").options(url=url, **options)

    return read
