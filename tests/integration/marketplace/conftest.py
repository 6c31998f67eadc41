"""Databases with the marketplace's tables in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from conquiet.sql import engine as make_engine
from marketplace.service import init


@pytest.fixture(params=["sqlite_url", "database_url"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make_engine(request.getfixturevalue(request.param))
    init(made)
    yield made
    made.dispose()
