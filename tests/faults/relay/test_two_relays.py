"""Two relays, killed at random, over a sink that fails and hangs: every event arrives.

Short by default; CONQUIET_FAULT_SECONDS=60 CONQUIET_FAULT_ROWS=50000 is the long form.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from sqlalchemy import select
from tests.integration.sql.claiming import OUTBOX, fill, rows, unpublished
from tests.waiting import eventually

from conquiet.sql import engine as make_engine
from conquiet.sql import schema

SECONDS = float(os.environ.get("CONQUIET_FAULT_SECONDS", "8"))
ROWS = int(os.environ.get("CONQUIET_FAULT_ROWS", "2000"))
BATCH = max(20, ROWS // 500)  # a batch in twenty hangs, and each costs a process some seconds
FLAKY_RELAY = Path(__file__).with_name("flaky_relay.py")


class Relays:
    """Two processes, each replaced as soon as it has died."""

    def __init__(self, database: str, sink: str, logs: Path) -> None:
        self._arguments = [
            *(sys.executable, str(FLAKY_RELAY), "--database", database),
            *("--sink", f"flaky+{sink}", "--max-attempts", "1000", "--health", "off"),
            *(
                "--poll-ms",
                "50",
                "--batch-size",
                str(BATCH),
                "--stuck-after-s",
                "2",
                "--grace-s",
                "10",
            ),
            *("--log-level", "warning"),
        ]
        self._logs = logs
        self.killed = self.ended = 0
        self.processes = [self._start(), self._start()]

    def _start(self) -> subprocess.Popen[bytes]:
        with self._logs.open("ab") as stream:
            return subprocess.Popen(self._arguments, stderr=stream, stdin=subprocess.DEVNULL)

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


def published(engine) -> dict[str, object]:
    query = select(OUTBOX.c.event_id, OUTBOX.c.published_at).where(
        OUTBOX.c.published_at.is_not(None)
    )
    with engine.connect() as connection:
        return dict(tuple(row) for row in connection.execute(query))


def confirmed(client: redis.Redis) -> dict[str, float]:
    """When each event first came into the stream, by its id."""
    first: dict[str, float] = {}
    for entry, fields in client.xrange("orders"):
        first.setdefault(fields[b"id"].decode(), int(entry.partition(b"-")[0]) / 1000)
    return first


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 4 + 120)
def test_two_relays_killed_at_random_lose_nothing_and_mark_only_what_was_confirmed(
    database_url, redis_url, redis_client, tmp_path
):
    schema.init(database_url)
    engine = make_engine(database_url)
    relays = Relays(database_url, redis_url, tmp_path / "relays.log")
    try:
        began, filled, next_kill = time.monotonic(), 0, 2.0
        while (passed := time.monotonic() - began) < SECONDS or filled < ROWS:
            due = min(ROWS, int(ROWS * passed / (SECONDS * 0.8)) + 1)
            if due > filled:
                fill(engine, due - filled, first=filled)
                filled = due
            if passed > next_kill:
                relays.kill_one()
                next_kill = passed + random.uniform(0.8, 2.0)
            marked = published(engine)  # first: what is marked must have been sent before
            assert marked.keys() <= confirmed(redis_client).keys()
            relays.replace_the_dead()
            time.sleep(0.2 if ROWS <= 5_000 else 2.0)

        def drained() -> bool:
            relays.replace_the_dead()
            return unpublished(engine) == 0

        assert eventually(drained, timeout=60 + SECONDS, interval=0.1)
        relays.end()
        arrived, found = confirmed(redis_client), rows(engine)
    finally:
        relays.end()
        engine.dispose()
    assert relays.killed >= 3
    assert len(found) == ROWS  # no row lost
    assert arrived.keys() == {row.event_id for row in found}  # every event arrived
    for row in found:
        assert row.published_at is not None
        assert row.parked_at is None
        assert row.published_at.timestamp() >= arrived[row.event_id] - 0.001
    print(f"{ROWS} rows, {redis_client.xlen('orders')} entries, {relays.killed} kills")
