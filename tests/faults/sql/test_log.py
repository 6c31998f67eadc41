"""Workers over the log of a database: killed, replaced, cut off; each message takes effect once."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, text
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.sql import LogSource, Outbox, Transaction, connection, engine, schema

UPSERT = text(
    "INSERT INTO effects (id, times) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET times = effects.times + 1"
)
SUMS = text("SELECT count(*), coalesce(sum(times), 0), coalesce(max(times), 0) FROM effects")
MESSAGES = int(os.environ.get("CONQUIET_LOG_MESSAGES", "20000"))


def prepare(made: Engine, count: int) -> None:
    schema.init(made)
    with made.begin() as opened:
        opened.execute(text("CREATE TABLE effects (id TEXT PRIMARY KEY, times INTEGER)"))
    for first in range(0, count, 1_000):
        batch = [
            Message(b"{}", {"id": f"m-{n}", "type": "t", "source": "/s", "subject": f"k{n % 97}"})
            for n in range(first, min(count, first + 1_000))
        ]
        with made.begin() as opened:
            Outbox("orders").add(opened, batch)


def make_worker(made: Engine, lease: float) -> Worker:
    options = {"exactly_once": "position", "producers_repeat": False}
    source = LogSource(made, "orders", "billing", lease=lease, poll=0.1, **options)
    router = Router()
    router.use(Transaction(made))

    @router.raw(name="count")
    def count(message: Message[Any]) -> None:
        with connection(made) as found:
            found.execute(UPSERT, {"id": message.id})

    return Worker(source, router, batch_size=200, threads=2)


def serve(url: str) -> None:
    """Run as a child process, until it is killed."""
    make_worker(engine(url), lease=1.5).run()


def sums(made: Engine) -> tuple[int, int, int]:
    with made.connect() as opened:
        return tuple(opened.execute(SUMS).one())  # type: ignore[return-value]


@pytest.mark.slow
def test_a_database_that_restarts_and_hangs_up_repeats_no_effect(private_postgres: Any) -> None:
    made = engine(private_postgres.url)
    watch = engine(private_postgres.url, poolclass=NullPool)  # has no connection to hang up
    prepare(made, 3_000)
    worker = make_worker(made, lease=30.0)
    worker.start()
    eventually(lambda: sums(watch)[0] >= 400, timeout=60)
    with watch.connect() as opened:
        hang_up = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
        opened.execute(text(f"{hang_up} pg_backend_pid() AND datname = current_database()"))
    eventually(lambda: sums(watch)[0] >= 1_000, timeout=60)
    private_postgres.kill()
    private_postgres.restart()
    eventually(lambda: sums(watch)[0] == 3_000, timeout=60)
    assert worker.stop(20)
    assert sums(watch) == (3_000, 3_000, 1)
    made.dispose()


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("store", ["database_url", "sqlite_url"])
def test_members_that_are_killed_and_replaced_handle_each_message_once(
    request: pytest.FixtureRequest, store: str
) -> None:
    database_url = request.getfixturevalue(store)
    made = engine(database_url)
    prepare(made, MESSAGES)
    context = multiprocessing.get_context("spawn")
    chance = random.Random(7)
    members = [context.Process(target=serve, args=(database_url,), daemon=True) for _ in "ab"]
    for member in members:
        member.start()
    kills = 0
    while sums(made)[0] < MESSAGES:
        time.sleep(chance.uniform(1.0, 4.0))  # no condition: a kill at any moment
        if kills < 20 and sums(made)[0]:
            place = chance.randrange(2)
            os.kill(members[place].pid or 0, signal.SIGKILL)
            members[place].join()
            members[place] = context.Process(target=serve, args=(database_url,), daemon=True)
            members[place].start()
            kills += 1
    for member in members:
        member.terminate()
        member.join(30)
    assert kills
    assert sums(made) == (MESSAGES, MESSAGES, 1)
    made.dispose()
