"""kill -9 at every step: effects happen once, and no event is missing."""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import redis
from sqlalchemy import Engine, text
from tests import zygote
from tests.faults.sql.async_service import EFFECTS, IN_FLIGHT, OUTBOX
from tests.faults.sql.service import BATCH, COMMANDS, EVENTS, GROUP, POINTS
from tests.waiting import eventually

from conquiet.sql import engine, schema

ROOT = Path(__file__).resolve().parents[3]
ORDERS = 30


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request):
    name = "database_url" if request.param == "postgresql" else "sqlite_url"
    url = request.getfixturevalue(name)
    made = prepared(url)
    yield url, made
    made.dispose()


def prepared(url: str) -> Engine:
    made = engine(url)
    schema.init(made)
    with made.begin() as connection:
        connection.execute(
            text("CREATE TABLE orders (id TEXT PRIMARY KEY, amount INTEGER NOT NULL)")
        )
    return made


@pytest.fixture
def spawn():
    """Start a module of this folder; it is killed at the end."""
    processes = []

    def spawn(module, *arguments):
        command = [sys.executable, "-m", f"tests.faults.sql.{module}", *arguments]
        processes.append(zygote.Popen(command, cwd=ROOT))
        return processes[-1]

    yield spawn
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def start(database, redis_url, spawn):
    def start(point="-", count=1):
        return spawn("service", database[0], redis_url, point, str(count))

    return start


def effects(made) -> dict[str, int]:
    with made.connect() as connection:
        return dict(connection.execute(text("SELECT id, amount FROM orders")).all())


def waiting(made) -> int:
    query = "SELECT count(*) FROM outbox WHERE published_at IS NULL"
    with made.connect() as connection:
        return connection.execute(text(query)).scalar_one()


def send(client: redis.Redis, count: int) -> dict[str, int]:
    """Send commands; return how often each has to take effect."""
    client.xgroup_create(COMMANDS, GROUP, id="0", mkstream=True)
    expected = {f"o-{number}": 1 for number in range(count)}
    with client.pipeline() as sending:
        for id_ in expected:
            about = {"specversion": "1.0", "id": f"c-{id_}", "type": "place.order"}
            data = msgspec.json.encode({"id": id_})
            sending.xadd(COMMANDS, {**about, "source": "/web", "data": data})
        sending.execute()
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_service_killed_anywhere_repeats_no_effect_and_loses_no_event(
    point, database, start, redis_client: redis.Redis
):
    _, made = database
    expected = send(redis_client, ORDERS)

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


# --- on an event loop, with 100 in flight ---------------------------------------------------------


class InDatabase:
    """What the async service leaves in PostgreSQL."""

    def __init__(self, url: str, redis_client: redis.Redis) -> None:
        self.made = prepared(url)

    def effects(self) -> dict[str, int]:
        return effects(self.made)

    def events(self) -> list[bytes]:
        with self.made.connect() as looking:
            return list(looking.execute(text("SELECT data FROM outbox")).scalars())

    def close(self) -> None:
        self.made.dispose()


class InRedis:
    """What the async service leaves in Redis."""

    def __init__(self, url: str, redis_client: redis.Redis) -> None:
        self.client = redis_client

    def effects(self) -> dict[str, int]:
        return {id_.decode(): int(n) for id_, n in self.client.hgetall(EFFECTS).items()}

    def events(self) -> list[bytes]:
        return [fields[b"data"] for _, fields in self.client.xrange(OUTBOX)]

    def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("store", ["asyncpg", "psycopg", "redis"])
def test_kills_with_100_in_flight_repeat_no_effect_and_lose_no_event(
    store, spawn, database_url, redis_client: redis.Redis, redis_url, tmp_path
):
    stored = (InRedis if store == "redis" else InDatabase)(database_url, redis_client)
    expected = send(redis_client, 4_000)
    moments = random.Random(store)
    count = tmp_path / "in_chain"
    count.write_bytes(b"\0")
    in_flight: list[int] = []

    def advance() -> None:
        """Wait until the service has handled some more."""
        more = len(stored.effects()) + moments.randrange(1, 200)
        eventually(lambda: len(stored.effects()) >= min(more, len(expected)), timeout=30)

    def start():
        return spawn("async_service", store, database_url, redis_url, str(count))

    def in_chain() -> int:
        return count.read_bytes()[0]

    def pending() -> int:
        return redis_client.xpending(COMMANDS, GROUP)["pending"]

    for _ in range(6):
        service = start()
        advance()
        eventually(lambda: in_chain() == IN_FLIGHT, timeout=60)
        service.kill()
        assert service.wait(60) == -signal.SIGKILL
        in_flight.append(in_chain())
    service = start()
    advance()
    service.terminate()
    assert service.wait(60) == 0, "it finished what was in flight"

    service = start()
    eventually(lambda: len(stored.effects()) == len(expected) and not pending(), timeout=120)
    service.terminate()
    assert service.wait(60) == 0
    assert stored.effects() == expected
    events = Counter(msgspec.json.decode(data)["id"] for data in stored.events())
    assert events == expected
    assert min(in_flight) >= 0.9 * IN_FLIGHT, in_flight
    stored.close()
