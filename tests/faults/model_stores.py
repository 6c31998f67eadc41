"""The stores that the model is tried on, and how time passes in them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from tests.faults import invariants
from tests.faults.crash.sql_paths import ORDERS, UPSERT

from conquiet import redis as redis_room
from conquiet import sql
from conquiet.redis import OutboxSource

ASYNC_DRIVERS = {
    "asyncpg": ("postgresql+asyncpg", {"server_settings": {"lock_timeout": "1ms"}}),
    "psycopg_async": ("postgresql+psycopg_async", {"options": "-c lock_timeout=1ms"}),
    "aiosqlite": ("sqlite+aiosqlite", {"timeout": 0.0}),
}
COMMANDS, GROUP, OUTBOX, EVENTS = "commands", "billing", "outbox", "events"
LONG = 60.0


class Stores:
    """Where commands come from and events go: Redis. Where effects go is told by a subclass."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.url = client.connection_pool.connection_kwargs

    def connect(self) -> redis.Redis:
        known = {name: self.url[name] for name in ("host", "port", "db")}
        return redis.Redis(**known, retry=Retry(NoBackoff(), 0))

    def empty(self) -> None:
        self.client.flushdb()
        self.client.xgroup_create(COMMANDS, GROUP, id="0", mkstream=True)

    def send(self, name: str) -> None:
        entry = {"specversion": "1.0", "id": name, "type": "place.order", "source": "/web"}
        self.client.xadd(COMMANDS, {**entry, "data": json.dumps({"command": name, "number": 0})})

    def log(self) -> list[str]:
        return [event.command for event in invariants.read_log(self.client, EVENTS)]

    def end_leases(self) -> None:
        """What the time would do: keys expire, entries have been idle for long."""
        for key in self.client.scan_iter("conquiet:inbox:*"):
            if self.client.get(key) != b"done":
                self.client.delete(key)
        for stream, group in ((COMMANDS, GROUP), (OUTBOX, "outbox-publisher")):
            if self.client.exists(stream) and self.client.xinfo_groups(stream):
                for entry in self.client.xpending_range(stream, group, "-", "+", 100):
                    owner, id_ = entry["consumer"], entry["message_id"]
                    idle = int(LONG * 2000)
                    self.client.xclaim(stream, group, owner, 0, [id_], idle=idle, justid=True)

    def settled(self) -> bool:
        return not invariants.unsettled_entries(self.client, COMMANDS, GROUP)


class RedisStores(Stores):
    def chain(self, client):
        room = redis_room
        return room.Transaction(client), room.Inbox("b", lease=LONG), room.Outbox(EVENTS, OUTBOX)

    def take_effect(self, client, name):
        redis_room.commands(client).hincrby("effects", name, 1)

    def effects(self) -> Counter[str]:
        return invariants.read_counts(self.client, "effects")

    def empty(self) -> None:
        super().empty()
        self.everything_stored: Counter[str] = Counter()
        self._seen: set[str] = set()

    def stored(self) -> Counter[str]:
        """An entry leaves the outbox when it is published: those seen before count too."""
        for event in (*invariants.read_log(self.client, OUTBOX), *self._published()):
            if event.id not in self._seen:
                self._seen.add(event.id)
                self.everything_stored[event.command] += 1
        return self.everything_stored

    def _published(self):
        return invariants.read_log(self.client, EVENTS)

    def outbox(self, client):
        return OutboxSource(client, OUTBOX, consumer="relay", lease=LONG, block=0.01)

    def published(self) -> bool:
        return not self.client.xlen(OUTBOX)

    def close(self) -> None:
        pass


class SqlStores(Stores):
    """Who meets another's lock gives up at once: one thread cannot wait for itself."""

    def __init__(self, client: redis.Redis, url: str) -> None:
        super().__init__(client)
        impatient = {"timeout": 0.0} if url.startswith("sqlite") else {}
        if not impatient:
            impatient = {"options": "-c lock_timeout=1ms"}
        self.engine = sql.engine(url, connect_args=impatient, pool_size=10)
        sql.schema.init(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text(ORDERS))

    def chain(self, client):
        outbox = sql.Outbox(EVENTS, notify=False)
        return sql.Transaction(self.engine), sql.Inbox("b"), outbox

    def take_effect(self, client, name):
        with sql.connection(self.engine) as connection:
            connection.execute(UPSERT, {"id": name})

    def empty(self) -> None:
        super().empty()
        with self.engine.begin() as connection:
            for table in ("orders", "outbox", "processed_messages"):
                connection.execute(text(f"DELETE FROM {table}"))

    def effects(self) -> Counter[str]:
        with self.engine.connect() as connection:
            return Counter(dict(connection.execute(text("SELECT id, amount FROM orders")).all()))

    def _rows(self, condition: str = "") -> list[str]:
        with self.engine.connect() as connection:
            found = connection.execute(text("SELECT data FROM outbox " + condition)).scalars()
            return [json.loads(bytes(data))["command"] for data in found]

    def stored(self) -> Counter[str]:
        marked = set(self._rows("WHERE published_at IS NOT NULL"))
        assert marked <= set(self.log()), f"{marked} are marked, and not all in the log"
        return Counter(self._rows())

    def outbox(self, client):
        return sql.OutboxSource(self.engine, wakeup=False, poll=0.001)

    def published(self) -> bool:
        return not self._rows("WHERE published_at IS NULL")

    def close(self) -> None:
        self.engine.dispose()


class OnLoop:
    """An event loop, which owns the async clients and engines of a store."""

    url: dict[str, Any]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    def connect_async(self) -> redis.asyncio.Redis:
        known = {name: self.url[name] for name in ("host", "port", "db")}
        return redis.asyncio.Redis(**known, retry=AsyncRetry(NoBackoff(), 0))

    def close(self) -> None:
        super().close()
        self._runner.close()


class AsyncRedisStores(OnLoop, RedisStores):
    async def take_effect_async(self, client, name):
        await redis_room.commands(client).hincrby("effects", name, 1)


class AsyncSqlStores(OnLoop, SqlStores):
    def __init__(self, client: redis.Redis, url: str, driver: str) -> None:
        super().__init__(client, url)
        name, impatient = ASYNC_DRIVERS[driver]
        address = self.engine.url.set(drivername=name)
        self.async_engine = create_async_engine(address, connect_args=impatient, pool_size=10)

    def chain(self, client):
        outbox = sql.Outbox(EVENTS, notify=False)
        return sql.Transaction(self.async_engine), sql.Inbox("b"), outbox

    async def take_effect_async(self, client, name):
        async with sql.async_connection(self.async_engine) as connection:
            await connection.execute(UPSERT, {"id": name})

    def close(self) -> None:
        self.run(self.async_engine.dispose())
        super().close()
