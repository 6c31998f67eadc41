"""Two relays, killed at random, over a sink that fails and hangs: every event arrives.

A few seconds in every run of the tests; a minute and 50,000 rows of each table in the slow ones.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine, func, insert, select
from tests import zygote
from tests.integration.events.samples import notification
from tests.integration.sql.claiming import OUTBOX, row
from tests.waiting import eventually

from conquiet.events import schema as events_schema
from conquiet.events.check import check
from conquiet.events.source import relay_table
from conquiet.events.table import events_table
from conquiet.sql import engine as make_engine
from conquiet.sql import schema
from marketplace.catalog import CATALOG

FLAKY_RELAY = Path(__file__).with_name("flaky_relay.py")


class Outbox:
    """The generic outbox."""

    name, stream = "outbox", "orders"
    table, event_id, parked = OUTBOX, OUTBOX.c.event_id, OUTBOX.c.parked_at.is_not(None)

    def create(self, url: str) -> None:
        schema.init(url)

    def fill(self, engine: Engine, count: int, first: int) -> None:
        with engine.begin() as connection:
            numbers = range(first, first + count)
            connection.execute(insert(OUTBOX), [row(number) for number in numbers])


class Events:
    """`outbox_events`."""

    name, stream = "outbox_events", "domain-events"
    table = relay_table("outbox_events")
    event_id, parked = table.c.id, table.c.attempt_count >= 1_000

    def create(self, url: str) -> None:
        events_schema.init(url, CATALOG)

    def fill(self, engine: Engine, count: int, first: int) -> None:
        rows = [check(notification())._asdict() for _ in range(count)]
        for one in rows:
            one["payload_json"] = json.loads(one["payload_json"])
        with engine.begin() as connection:
            connection.execute(insert(events_table(CATALOG)), rows)


class Relays:
    """Two processes, each replaced as soon as it has died."""

    def __init__(self, database: str, table: str, sink: str, logs: Path, batch: int) -> None:
        self._arguments = [
            *(sys.executable, str(FLAKY_RELAY), "--database", database, "--table", table),
            *("--sink", f"flaky+{sink}", "--max-attempts", "1000", "--health", "off"),
            *("--poll-ms", "50", "--batch-size", str(batch)),
            *(
                "--stuck-after-seconds",
                "2",
                "--publish-timeout-seconds",
                "0.5",
                "--grace-seconds",
                "10",
            ),
            *("--log-level", "warning"),
        ]
        self._logs = logs
        self.killed = self.ended = 0
        self.processes = [self._start(), self._start()]

    def _start(self) -> subprocess.Popen[bytes]:
        with self._logs.open("ab") as stream:
            return zygote.Popen(self._arguments, stderr=stream, stdin=subprocess.DEVNULL)

    def replace_the_dead(self) -> None:
        for place, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ended += 1
                self.processes[place] = self._start()

    def kill_one(self) -> None:
        process = random.choice(self.processes)
        process.kill()
        process.wait(10)
        self.killed += 1

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)


def published(engine: Engine, kind) -> dict[str, float]:
    """When each event was marked, by its id."""
    query = select(kind.event_id, kind.table.c.published_at)
    with engine.connect() as connection:
        found = connection.execute(query.where(kind.table.c.published_at.is_not(None)))
        return {str(id_): moment.timestamp() for id_, moment in found}


def count(engine: Engine, *conditions) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).where(*conditions)).scalar_one()


def confirmed(client: redis.Redis, stream: str) -> dict[str, float]:
    """When each event first came into the stream, by its id."""
    first: dict[str, float] = {}
    for entry, fields in client.xrange(stream):
        first.setdefault(fields[b"id"].decode(), int(entry.partition(b"-")[0]) / 1000)
    return first


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "rows", "seconds"),
    [
        pytest.param(Events(), 500, 2.0, id="short"),
        pytest.param(Events(), 50_000, 60.0, id="long", marks=pytest.mark.slow),
        pytest.param(Outbox(), 50_000, 60.0, id="long, generic", marks=pytest.mark.slow),
    ],
)
def test_two_relays_killed_at_random_lose_nothing_and_mark_only_what_was_confirmed(
    database_url, redis_url, redis_client, tmp_path, kind, rows, seconds
):
    kind.create(database_url)
    engine = make_engine(database_url)
    batch = max(20, rows // 200)  # a batch in twenty hangs, and each costs a process some seconds
    relays = Relays(database_url, kind.name, redis_url, tmp_path / "relays.log", batch)
    wanted_kills = 2 if rows < 1_000 else 20
    try:
        began, filled, next_kill = time.monotonic(), 0, 1.0
        while (passed := time.monotonic() - began) < seconds or relays.killed < wanted_kills:
            due = min(rows, int(rows * passed / (seconds * 0.8)) + 1)
            if due > filled:
                kind.fill(engine, due - filled, first=filled)
                filled = due
            if passed > next_kill:
                relays.kill_one()
                next_kill = passed + random.uniform(0.8, 2.0)
            marked = published(engine, kind)  # first: what is marked must have been sent before
            assert marked.keys() <= confirmed(redis_client, kind.stream).keys()
            relays.replace_the_dead()
            time.sleep(0.2 if rows < 5_000 else 1.0)

        def drained() -> bool:
            relays.replace_the_dead()
            return count(engine, kind.table.c.published_at.is_(None)) == 0

        assert eventually(drained, timeout=60 + 3 * seconds, interval=0.1)
        relays.end()
    finally:
        relays.end()
    arrived, marked = confirmed(redis_client, kind.stream), published(engine, kind)
    assert len(marked) == count(engine, kind.event_id.is_not(None)) == rows  # none lost or stuck
    assert count(engine, kind.parked) == 0
    assert arrived.keys() == marked.keys()  # every event arrived
    for event_id, moment in marked.items():
        assert moment >= arrived[event_id] - 0.001
    engine.dispose()
    print(f"{rows} rows, {redis_client.xlen(kind.stream)} entries, {relays.killed} kills")
