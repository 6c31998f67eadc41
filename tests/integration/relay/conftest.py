"""Databases with the outbox in them, and relay processes that are gone after the test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from tests.integration.relay.service import RelayRun

from conquiet.sql import engine as make_engine
from conquiet.sql import schema


# A process of its own each time: in `make test` on PostgreSQL, in CI on both.
@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh database with the tables, of each kind in turn."""
    name = "sqlite_url" if request.param == "sqlite" else "database_url"
    url: str = request.getfixturevalue(name)
    schema.init(url)
    return url


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    made = make_engine(database)
    yield made
    made.dispose()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RelayRun]]:
    runs: list[RelayRun] = []

    def start(database: str, sink: str, *flags: str) -> RelayRun:
        runs.append(RelayRun(tmp_path / f"relay-{len(runs)}.log", database, sink, *flags))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture
def postgres_engine(database_url: str) -> Iterator[tuple[Engine, str]]:
    schema.init(database_url)
    made = make_engine(database_url)
    yield made, database_url
    made.dispose()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def full_pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe that is never read: once it is full, a write to it never returns."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path
    os.close(reader)
