"""Servers for the tests: one of each kind per xdist worker, started when the first test asks."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from hypothesis import HealthCheck, settings

from conquiet import embedded
from tests import needs

# Nobody kills the shared PostgreSQL, so it may forget what a crash would lose, and is faster.
UNSAFE = ("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off")
# For relays that follow the write-ahead log; each run of a crash point has a slot of its own.
LOGICAL = ("-c", "wal_level=logical", "-c", "max_replication_slots=600")
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")

# Java compiles the code of many small queries well only after they have ended, so let it compile
# quickly. The room for compiled code is that of a JVM with its defaults.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_JAVA)

# A busy machine makes an example slow, and says nothing about the code. Decoders that face a broker
# are tried with many more in the slow tests.
settings.register_profile(
    "conquiet",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("conquiet")

if os.environ.get("CONQUIET_TEST_LOOP") == "uvloop":
    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


@pytest.fixture(scope="session")
def redis_server() -> Iterator[embedded.RedisServer]:
    """The worker's Redis; a test that kills it takes `private_redis` instead."""
    with needs.found("Redis", embedded.redis) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[embedded.PostgresServer]:
    """The worker's PostgreSQL; a test that kills it takes `private_postgres` instead."""
    with needs.found("PostgreSQL", lambda: embedded.postgres(options=UNSAFE + LOGICAL)) as server:
        yield server


@pytest.fixture
def private_redis() -> Iterator[embedded.RedisServer]:
    """A Redis for one test to kill and restart; it keeps all that it has confirmed."""
    with needs.found("Redis", lambda: embedded.redis(options=DURABLE, private=True)) as server:
        yield server


@pytest.fixture
def private_postgres() -> Iterator[embedded.PostgresServer]:
    """A PostgreSQL for one test to kill and restart; it keeps all that it has committed."""
    made = needs.found("PostgreSQL", lambda: embedded.postgres(options=LOGICAL, private=True))
    with made as server:
        yield server


@pytest.fixture(scope="session")
def _redis_database(redis_server: embedded.RedisServer) -> Iterator[tuple[str, str]]:
    """The URL of a database that is ours to flush, and the command that flushes no more than it."""
    if not redis_server.external:
        yield redis_server.url, "FLUSHALL"
        return
    import redis

    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    url = urlunsplit(urlsplit(redis_server.url)._replace(path=f"/{15 - worker}"))
    with redis.Redis.from_url(url) as client:
        if client.dbsize():
            pytest.exit(
                f"{url} holds data, and the tests flush the database that they use. Empty it with "
                f"redis-cli -u {url} FLUSHDB, or unset CONQUIET_BROKER_URL for a private server.",
                returncode=1,
            )
        yield url, "FLUSHDB"
        client.flushdb()


@pytest.fixture
def redis_url(_redis_database: tuple[str, str]) -> str:
    """The URL of an empty Redis: a worker runs one test at a time, so it may be flushed."""
    import redis

    url, flush = _redis_database
    with redis.Redis.from_url(url) as client:
        client.execute_command(flush)
    return url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Any]:
    """A client of the empty Redis, which answers in bytes."""
    import redis

    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(scope="session")
def _spare_database(
    postgres_server: embedded.PostgresServer,
) -> Iterator[list[tuple[str, int]]]:
    """The URL of an empty database, and how many tests have had it."""
    spare: list[tuple[str, int]] = []
    yield spare
    for url, _ in spare:
        postgres_server.drop_database(url)


@pytest.fixture
def database_url(
    postgres_server: embedded.PostgresServer, _spare_database: list[tuple[str, int]]
) -> Iterator[str]:
    """The libpq URL of an empty PostgreSQL database, under a name that no test had before."""
    url, uses = _spare_database.pop() if _spare_database else (postgres_server.create_database(), 0)
    yield url
    emptied = empty_database(postgres_server, url) if uses < MAX_USES else None
    if emptied is None:
        postgres_server.drop_database(url)
    else:
        _spare_database.append((emptied, uses + 1))


MAX_USES = 50
"""Tests per database: catalogs keep the rows of dropped tables until they are vacuumed."""
END_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()"""
SCHEMAS = r"SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_|^information_schema$'"
LASTS = """
SELECT EXISTS (SELECT FROM pg_publication) OR EXISTS (SELECT FROM pg_subscription)
    OR EXISTS (SELECT FROM pg_event_trigger) OR EXISTS (SELECT FROM pg_largeobject_metadata)
    OR EXISTS (SELECT FROM pg_foreign_data_wrapper) OR EXISTS (SELECT FROM pg_default_acl)
    OR EXISTS (SELECT FROM pg_extension WHERE extname <> 'plpgsql')
    OR EXISTS (SELECT FROM pg_replication_slots WHERE database = current_database())
    OR EXISTS (SELECT FROM pg_database d WHERE d.datname = current_database()
        AND (datacl IS NOT NULL OR NOT datallowconn
             OR EXISTS (SELECT FROM pg_db_role_setting WHERE setdatabase = d.oid)))"""
"""Whether the database has something that outlives its schemas."""


def empty_database(server: embedded.PostgresServer, url: str) -> str | None:
    """Empty and rename a database, a quarter of the work of a new one; None if it cannot be."""
    import psycopg
    from psycopg import sql

    parts = urlsplit(url)
    name = f"test_{uuid.uuid4().hex}"
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(END_OTHERS)
            if connection.execute(LASTS).fetchone() != (False,):
                return None
            for (schema,) in connection.execute(SCHEMAS).fetchall():
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
            is_new = connection.info.server_version >= 150000
            owner, right = ("pg_database_owner", "USAGE") if is_new else ("CURRENT_USER", "ALL")
            connection.execute(f"CREATE SCHEMA public AUTHORIZATION {owner}")
            connection.execute(f"GRANT {right} ON SCHEMA public TO PUBLIC")
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f'ALTER DATABASE "{parts.path[1:]}" RENAME TO "{name}"')
    except psycopg.Error:
        return None
    return urlunsplit(parts._replace(path=f"/{name}"))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The SQLAlchemy URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'test.sqlite'}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is no UTF-8 in a captured log: xdist cannot send it, and would end the run."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


TOGETHER = (
    "tests/spark/",
    "tests/web/test_browser.py",
    "tests/integration/sinks/test_rabbitmq",
    "tests/integration/kombu/test_celery_tasks.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all Spark tests to one worker, so that there is one JVM; and those with a browser,
    with RabbitMQ and with a Celery worker, which take seconds to start.

    By their path, since xdist 3.8 ignores the mark xdist_group on pytest 9.2 (pytest-xdist #1386).
    """
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for beginning in TOGETHER:
                if nodeid.startswith(beginning):
                    return beginning
            return super()._split_scope(nodeid)

    return Together(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have counted, and in one line which were left out for want of something.

    That line goes to the file that LEFT_OUT names, if it is set: make prints it at its very end.
    """
    _print_counts(terminalreporter)
    reasons = (
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    line = needs.left_out(reasons)
    if line and (path := os.environ.get("LEFT_OUT")):
        Path(path).write_text(f"==> {line}\n")
    elif line:
        terminalreporter.write_line(line)


def _print_counts(terminal: pytest.TerminalReporter) -> None:
    """Print the user properties of tests by heading, such as the number of crash points."""
    counted: dict[str, list[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminal.stats.get(outcome, []):
            for heading, line in report.user_properties:
                counted.setdefault(heading, []).append(str(line))
    for heading, lines in counted.items():
        terminal.section(heading)
        for line in sorted(lines):
            terminal.write_line(line)


@pytest.fixture
def untraced() -> Iterator[None]:
    """No coverage in this thread and those it starts: a Deadline interrupts only without."""
    tracing, in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    yield
    sys.settrace(tracing)
    threading.settrace(in_threads)  # type: ignore[arg-type]
