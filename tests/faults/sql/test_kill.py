"""kill -9 at every step: effects happen once, and no event is missing."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import redis
from sqlalchemy import text
from tests import zygote
from tests.faults.sql.service import BATCH, COMMANDS, EVENTS, GROUP, POINTS
from tests.waiting import eventually

from conquiet.sql import engine, schema

ORDERS = 30


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request):
    name = "database_url" if request.param == "postgresql" else "sqlite_url"
    url = request.getfixturevalue(name)
    made = engine(url)
    schema.init(made)
    with made.begin() as connection:
        connection.execute(
            text("CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL)")
        )
    yield url, made
    made.dispose()


@pytest.fixture
def start(database, redis_url):
    processes = []

    def start(point="-", count=1):
        script = Path(__file__).with_name("service.py")
        command = [sys.executable, str(script), database[0], redis_url, point, str(count)]
        processes.append(zygote.Popen(command))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def effects(made) -> dict[str, int]:
    with made.connect() as connection:
        return dict(connection.execute(text("SELECT id, amount FROM orders")).all())


def waiting(made) -> int:
    query = "SELECT count(*) FROM outbox WHERE published_at IS NULL"
    with made.connect() as connection:
        return connection.execute(text(query)).scalar_one()


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_service_killed_anywhere_repeats_no_effect_and_loses_no_event(
    point, database, start, redis_client: redis.Redis
):
    _, made = database
    redis_client.xgroup_create(COMMANDS, GROUP, id="0", mkstream=True)
    expected = {f"o-{number}": 1 for number in range(ORDERS)}
    for id_ in expected:
        data = msgspec.json.encode({"id": id_})
        redis_client.xadd(COMMANDS, {"id": f"c-{id_}", "data": data})

    assert start(point, count=2).wait(60) == -signal.SIGKILL
    service = start()

    def published() -> bool:
        pending = redis_client.xpending(COMMANDS, GROUP)["pending"]
        return len(effects(made)) == ORDERS and not waiting(made) and not pending

    eventually(published, timeout=60)
    service.send_signal(signal.SIGTERM)
    assert service.wait(60) == 0
    assert effects(made) == expected

    events = [fields for _, fields in redis_client.xrange(EVENTS)]
    times = Counter(msgspec.json.decode(fields[b"data"])["id"] for fields in events)
    assert set(times) == set(expected)
    ids = {fields[b"id"] for fields in events}
    assert len(ids) == ORDERS  # what was published twice carries the same id
    assert sum(times.values()) - ORDERS <= BATCH  # the relay may have been amid a batch
