"""The async worker beside the same work by hand, by FastStream and by taskiq.

python bench/async.py [--quick] [--json FILE] [--no-peers]

await          handlers that await 50 ms, 100 in flight: read from a Redis stream, handle, ack
exactly once   inbox row, one upsert by the handler, one outbox row, commit, ack, on PostgreSQL; one
               message per transaction, 16 in flight. By hand: asyncpg with a connection per task,
               prepared statements, five round trips; SQLAlchemy's async Core, as any user of an
               AsyncEngine has it; and our chain as one coroutine, without greenlets: the same
               checks, inbox, outbox and pool, awaited by asyncpg. Also our own sync worker,
               batch_size=1.
list[T]        the same in groups of 200 in one transaction, 4 groups in flight; the handler takes
               a list. By hand: asyncpg, one statement for all.
memory         of an async worker, after a tenth of its messages and at the end

fsync and synchronous_commit are on. Messages have 300 bytes of JSON. They come from memory, except
in `await`: the source does not block, and is read on the loop, by hand and by the worker. Objects
that were loaded at the start are excluded from garbage collection, as by `conquiet worker run`.
Other libraries live in `.venv-peers`, as for bench/redis.py.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import asyncio
import gc
import itertools
import resource
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import redis.asyncio
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, make_url
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from bench import peers
from bench.harness import Case, Options, Seconds, arguments, compare, measure, report
from conquiet import Acking, Message, Router, Worker, embedded
from conquiet.acking import settle
from conquiet.errors import GivenBack
from conquiet.message import check_kinds
from conquiet.redis import StreamSink, StreamSource
from conquiet.source import EndOfSource
from conquiet.sql import (
    Inbox,
    Outbox,
    Transaction,
    async_connection,
    connection,
    engine,
    schema,
)

STREAM = "commands"
WAIT_SECONDS = 0.05
WAITING = 100
"""How many handlers wait at the same time."""
IN_FLIGHT = 16
GROUP, GROUPS_IN_FLIGHT = 200, 4
FILLING = "x" * 200

orders = Table("orders", MetaData(), Column("id", Text), Column("total", Integer))
_save = insert(orders)
SAVE = _save.on_conflict_do_update(
    index_elements=[orders.c.id], set_={"total": orders.c.total + _save.excluded.total}
)
ORDERS = "CREATE TABLE orders (id text PRIMARY KEY, total integer NOT NULL)"
UPSERT = (
    "INSERT INTO orders (id, total) VALUES ($1, $2)"
    " ON CONFLICT (id) DO UPDATE SET total = orders.total + excluded.total"
)
UPSERT_ALL = (
    "INSERT INTO orders (id, total) SELECT * FROM unnest($1::text[], $2::integer[])"
    " ON CONFLICT (id) DO UPDATE SET total = orders.total + excluded.total"
)


class PlaceOrder(msgspec.Struct):
    order_id: str
    total: int
    note: str


class OrderPlaced(msgspec.Struct):
    order_id: str
    total: int
    note: str


_names = itertools.count()
_encode = msgspec.json.Encoder().encode
_order = msgspec.json.Decoder(PlaceOrder).decode


def message(name: str) -> Message[bytes]:
    data = _encode(PlaceOrder(f"o-{name}", 7, FILLING))
    return Message(
        data, {"id": name, "type": "place.order", "source": "/web"}, acking=Acking(_done)
    )


class _Done:
    is_async = True  # it does not block

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Exception | None]]) -> None:
        if any(not isinstance(error, GivenBack) for _, error in nacked):
            raise AssertionError(f"failed: {nacked[0][1]!r}")


_done = _Done()


class Numbered:
    """Delivers messages that were never seen before, then ends."""

    def __init__(self, count: int, *, is_async: bool = True) -> None:
        self.is_async = is_async  # it does not block, and needs no thread
        self._count = self._left = count
        self._name = next(_names)
        self.early = 0.0
        """The memory of the process after a tenth of the messages."""

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if not self._left:
            raise EndOfSource
        if not self.early and self._left <= self._count * 0.9:
            self.early = resident()
        taken = min(limit, self._left)
        self._left -= taken
        return [message(f"{self._name}-{self._left + number}") for number in range(taken)]

    def close(self) -> None:
        """Nothing is held."""


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


# --- await ----------------------------------------------------------------------------------


async def wait_by_worker(source: StreamSource, count: int) -> float:
    router = Router()
    ended: list[float] = []

    @router.event()
    async def place_order(order: PlaceOrder) -> None:
        await asyncio.sleep(WAIT_SECONDS)
        ended.append(time.perf_counter())
        if len(ended) == count:
            worker.stop()

    worker = Worker(source, router, concurrency=WAITING)
    start = time.perf_counter()
    await worker.run_async()
    return ended[-1] - start


async def wait_on_the_loop(url: str, count: int) -> float:
    async with redis.asyncio.Redis.from_url(url) as client:
        return await wait_by_worker(StreamSource(client, STREAM, uuid.uuid4().hex), count)


async def wait_with_a_thread(url: str, count: int) -> float:
    with redis.Redis.from_url(url) as client:
        return await wait_by_worker(StreamSource(client, STREAM, uuid.uuid4().hex), count)


async def wait_by_hand(url: str, count: int) -> float:
    """Read by 100, a task per message, one XACK for all that ended since the last."""
    group, ended = uuid.uuid4().hex, []
    tasks: set[asyncio.Future[None]] = set()
    free = asyncio.Semaphore(WAITING)

    async def handle(id_: bytes, fields: dict[bytes, bytes]) -> None:
        _order(fields[b"data"])
        await asyncio.sleep(WAIT_SECONDS)
        ended.append(id_)
        free.release()

    client: Any
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.xgroup_create(STREAM, group, "0")
        start = time.perf_counter()
        begun = acked = 0
        while acked < count:
            if begun < count:
                found = await client.xreadgroup(group, "c", {STREAM: ">"}, count=WAITING)
                [(_, entries)] = found
                for id_, fields in entries:
                    await free.acquire()
                    tasks.add(task := asyncio.ensure_future(handle(id_, fields)))
                    task.add_done_callback(tasks.discard)
                begun += len(entries)
            else:
                await asyncio.sleep(WAIT_SECONDS / 10)
            if ended:
                ids, ended[:] = list(ended), []
                acked += await client.xack(STREAM, group, *ids)
        return time.perf_counter() - start


def wait(url: str, options: Options, *, has_peers: bool) -> Iterator[Case]:
    count = 2_000 if options.quick else 6_000
    attributes = {"type": "place.order", "source": "/web"}
    with redis.Redis.from_url(url) as client:
        StreamSink(client, STREAM).publish(
            [Message(message(str(n)).data, {"id": str(n), **attributes}) for n in range(count)]
        )
    hand = "redis.asyncio by hand"
    contestants = {
        "worker": wait_on_the_loop,
        "worker, sync client": wait_with_a_thread,
        hand: wait_by_hand,
    }
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(1 if options.quick else 3):
        for name, run in contestants.items():  # until the last is handled, as for the peers
            taken[name].append(asyncio.run(run(url, count)))
    seconds = {name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()}
    settings = {"in_flight": WAITING, "await_ms": round(WAIT_SECONDS * 1000)}
    first = compare("await", count, seconds, "worker", hand, **settings)
    yield first
    yield compare("await, sync client", count, seconds, "worker, sync client", hand, **settings)
    python = peers.interpreter(make=not options.quick) if has_peers else None
    if python is None:
        return
    for name, peer in peers.WAITING.items():
        rate = peers.rate(python, url, peer)
        if rate is not None:
            yield Case(
                name="await",
                rate=first.rate,
                floor=name,
                floor_rate=rate,
                ratio=first.rate / rate,
                settings={**first.settings},
            )


# --- exactly once -----------------------------------------------------------------------------


class Ground:
    """A database, and an event loop that keeps its connections between the rounds."""

    def __init__(self, server: embedded.PostgresServer, runner: asyncio.Runner) -> None:
        self.url = server.create_database()
        self.runner = runner
        self.sync: Engine = engine(self.url)
        schema.init(self.sync)
        with self.sync.begin() as found:
            found.exec_driver_sql(ORDERS)
        address = make_url(self.url).set(drivername="postgresql+asyncpg")
        self.engine: AsyncEngine = create_async_engine(
            address, pool_size=IN_FLIGHT + 1, max_overflow=0
        )
        self.direct: list[Any] = []

    async def connect(self) -> None:
        self.direct = [await asyncpg.connect(self.url) for _ in range(IN_FLIGHT)]

    async def close(self) -> None:
        for found in self.direct:
            await found.close()
        await self.engine.dispose()
        self.sync.dispose()

    def timed(self, work: Callable[[], Awaitable[Any]]) -> Callable[[], object]:
        async def run() -> None:
            await work()

        return lambda: self.runner.run(run())


def check(worker: Worker, count: int) -> None:
    health = worker.health()
    if health.failed:
        raise AssertionError(f"{health.failed} of {health.handled} failed: {health.last_error}")
    if health.handled != count:  # a time limit sends SIGTERM
        raise SystemExit(f"stopped by a signal after {health.handled:,} of {count:,} messages")


def orders_router(transaction: Transaction) -> Router:
    router = Router()
    router.use(transaction, Inbox("billing"), Outbox("orders"))
    return router


async def once_by_worker(ground: Ground, count: int) -> None:
    router = orders_router(Transaction(ground.engine))

    @router.command(source="/shop")
    async def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        async with async_connection(ground.engine) as found:
            await found.execute(SAVE, {"id": order.order_id, "total": order.total})
        return [OrderPlaced(order.order_id, order.total, order.note)]

    worker = Worker(Numbered(count), router, batch_size=1, concurrency=IN_FLIGHT)
    await worker.run_async()
    check(worker, count)


async def once_by_worker_and_driver(ground: Ground, count: int) -> None:
    """The handler's statement by asyncpg's own connection, as the program by hand has it."""
    router = orders_router(Transaction(ground.engine))

    @router.command(source="/shop")
    async def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        async with async_connection(ground.engine) as found:
            raw: Any = (await found.get_raw_connection()).driver_connection
            await raw.execute(UPSERT, order.order_id, order.total)
        return [OrderPlaced(order.order_id, order.total, order.note)]

    worker = Worker(Numbered(count), router, batch_size=1, concurrency=IN_FLIGHT)
    await worker.run_async()
    check(worker, count)


def once_by_sync_worker(ground: Ground, count: int) -> None:
    router = orders_router(Transaction(ground.sync))

    @router.command(source="/shop")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        with connection(ground.sync) as found:
            found.execute(SAVE, {"id": order.order_id, "total": order.total})
        return [OrderPlaced(order.order_id, order.total, order.note)]

    worker = Worker(Numbered(count, is_async=False), router, batch_size=1)
    worker.run()
    check(worker, count)


INBOX = (
    "INSERT INTO processed_messages (subscriber, message_id) VALUES ('billing', $1)"
    " ON CONFLICT DO NOTHING RETURNING message_id"
)
OUTBOX = (
    "INSERT INTO outbox (topic, event_type, event_id, content_type, data, attributes)"
    " VALUES ('orders', 'order.placed', $1, 'application/json', $2, $3)"
)
INBOX_ALL = (
    "INSERT INTO processed_messages (subscriber, message_id)"
    " SELECT 'billing', m FROM unnest($1::text[]) AS m"
    " ON CONFLICT DO NOTHING RETURNING message_id"
)
OUTBOX_ALL = (
    "INSERT INTO outbox (topic, event_type, event_id, content_type, data, attributes)"
    " SELECT 'orders', 'order.placed', e, 'application/json', d, a::jsonb"
    " FROM unnest($1::text[], $2::bytea[], $3::text[]) AS row (e, d, a)"
)


def attributes_of(name: str) -> dict[str, str]:
    return {
        "specversion": "1.0",
        "id": name,
        "type": "order.placed",
        "source": "/shop",
        "time": datetime.now(UTC).isoformat(),
        "datacontenttype": "application/json",
    }


def event_of(order: PlaceOrder) -> tuple[str, bytes, str]:
    name = str(uuid.uuid4())
    placed = OrderPlaced(order.order_id, order.total, order.note)
    return name, _encode(placed), _encode(attributes_of(name)).decode()


async def handle_one(found: Any, messages: Sequence[Message[bytes]]) -> None:
    [item] = messages
    async with found.transaction():
        if await found.fetchrow(INBOX, f"/web {item.attributes['id']}"):
            order = _order(item.data)
            await found.execute(UPSERT, order.order_id, order.total)
            await found.execute(OUTBOX, *event_of(order))


async def handle_all(found: Any, messages: Sequence[Message[bytes]]) -> None:
    async with found.transaction():
        ids = [f"/web {item.attributes['id']}" for item in messages]
        fresh = {row[0] for row in await found.fetch(INBOX_ALL, ids)}
        placed = [
            _order(item.data) for item, id_ in zip(messages, ids, strict=True) if id_ in fresh
        ]
        await found.execute(UPSERT_ALL, [o.order_id for o in placed], [o.total for o in placed])
        await found.execute(OUTBOX_ALL, *zip(*map(event_of, placed), strict=True))


async def by_hand(
    ground: Ground,
    count: int,
    group: int,
    in_flight: int,
    handle: Callable[[Any, Sequence[Message[bytes]]], Awaitable[None]],
    places: Sequence[Any] = (),
) -> None:
    """As many tasks as in flight, each with a connection of its own, or with a given place."""
    source = Numbered(count)

    async def work(found: Any) -> None:
        while True:
            try:
                messages = source.read(group, 0)
            except EndOfSource:
                return
            await handle(found, messages)
            settle([item.acking for item in messages if item.acking])

    async with asyncio.TaskGroup() as group_of_tasks:
        for found in places or ground.direct[:in_flight]:
            group_of_tasks.create_task(work(found))


inbox_table = Table(
    "processed_messages", MetaData(), Column("subscriber", Text), Column("message_id", Text)
)
REMEMBER = insert(inbox_table).on_conflict_do_nothing().returning(inbox_table.c.message_id)
STORE = insert(schema.outbox_table("outbox")).inline()


async def handle_by_core(engine: AsyncEngine, messages: Sequence[Message[bytes]]) -> None:
    [item] = messages
    async with engine.begin() as found:
        entry = {"subscriber": "billing", "message_id": f"/web {item.attributes['id']}"}
        if (await found.execute(REMEMBER, entry)).first() is None:
            return
        order = _order(item.data)
        await found.execute(SAVE, {"id": order.order_id, "total": order.total})
        event = {
            "topic": "orders",
            "event_type": "order.placed",
            "event_id": (name := str(uuid.uuid4())),
            "content_type": "application/json",
            "data": _encode(OrderPlaced(order.order_id, order.total, order.note)),
            "attributes": attributes_of(name),
        }
        await found.execute(STORE, event)


async def handle_by_coroutine(engine: AsyncEngine, messages: Sequence[Message[bytes]]) -> None:
    """The steps of our chain, by our own functions; without blame, retries and shields."""
    [item] = messages
    check_kinds(item.attributes)
    async with engine.connect() as found:
        driver: Any = (await found.get_raw_connection()).driver_connection
        async with driver.transaction():
            if not await _inbox.fresh(driver, item):
                return
            order = _order(item.data)
            await driver.execute(UPSERT, order.order_id, order.total)
            placed = OrderPlaced(order.order_id, order.total, order.note)
            await _outbox.add(driver, [placed], source="/shop")


_inbox, _outbox = Inbox("billing"), Outbox("orders")


def exactly_once(ground: Ground, options: Options) -> Iterator[Case]:
    count = 1_000 if options.quick else 3_000
    hand = partial(by_hand, ground, count, 1, IN_FLIGHT)
    engines = [ground.engine] * IN_FLIGHT
    seconds = measure(
        {
            "worker": ground.timed(lambda: once_by_worker(ground, count)),
            "worker and driver": ground.timed(lambda: once_by_worker_and_driver(ground, count)),
            "asyncpg by hand": ground.timed(partial(hand, handle_one)),
            "SQLAlchemy by hand": ground.timed(partial(hand, handle_by_core, engines)),
            "our chain as a coroutine": ground.timed(partial(hand, handle_by_coroutine, engines)),
            "sync worker": lambda: once_by_sync_worker(ground, count),
        },
        rounds=3,
    )
    name, settings = "exactly once", {"in_flight": IN_FLIGHT, "batch": 1}
    yield compare(name, count, seconds, "worker", "asyncpg by hand", **settings)
    yield compare(
        f"{name}, handler by asyncpg",
        count,
        seconds,
        "worker and driver",
        "asyncpg by hand",
        **settings,
    )
    yield compare(name, count, seconds, "worker", "SQLAlchemy by hand", **settings)
    yield compare(
        f"{name}, handler by asyncpg",
        count,
        seconds,
        "worker and driver",
        "our chain as a coroutine",
        **settings,
    )
    yield compare(name, count, seconds, "worker", "sync worker", **settings)


# --- list[T] ----------------------------------------------------------------------------------


async def lists_by_worker(ground: Ground, count: int) -> None:
    router = orders_router(Transaction(ground.engine))

    @router.command(source="/shop")
    async def place_orders(orders: list[PlaceOrder]) -> list[OrderPlaced]:
        async with async_connection(ground.engine) as found:
            raw: Any = (await found.get_raw_connection()).driver_connection
            await raw.execute(UPSERT_ALL, [o.order_id for o in orders], [o.total for o in orders])
        return [OrderPlaced(order.order_id, order.total, order.note) for order in orders]

    worker = Worker(Numbered(count), router, batch_size=GROUP, concurrency=GROUPS_IN_FLIGHT)
    await worker.run_async()
    check(worker, count)


def lists(ground: Ground, options: Options) -> Iterator[Case]:
    count = 10_000 if options.quick else 40_000
    hand = partial(by_hand, ground, count, GROUP, GROUPS_IN_FLIGHT, handle_all)
    seconds = measure(
        {
            "worker": ground.timed(lambda: lists_by_worker(ground, count)),
            "bulk by hand": ground.timed(hand),
        },
        rounds=3,
    )
    settings = {"groups_in_flight": GROUPS_IN_FLIGHT, "batch": GROUP}
    yield compare("list[T]", count, seconds, "worker", "bulk by hand", **settings)


# --- memory -----------------------------------------------------------------------------------


async def memory(options: Options) -> Case:
    count = 100_000 if options.quick else 1_000_000
    router = Router()

    @router.event()
    async def place_order(order: PlaceOrder) -> None:
        await asyncio.sleep(0)

    source = Numbered(count)
    worker = Worker(source, router, concurrency=WAITING)
    start = time.perf_counter()
    await worker.run_async()
    seconds = time.perf_counter() - start
    late = resident()
    check(worker, count)
    return Case(
        name="memory",
        rate=count / seconds,
        settings={
            "messages": count,
            "MB_after_a_tenth": round(source.early, 1),
            "MB_at_the_end": round(late, 1),
        },
    )


def main() -> None:
    has_peers = "--no-peers" not in sys.argv
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--no-peers"]
    options = arguments(__doc__)
    gc.freeze()  # as `conquiet worker run` does
    cases = [asyncio.run(memory(options))]  # first: its memory is that of a fresh process
    with embedded.redis(private=True) as streams:
        cases += wait(streams.url, options, has_peers=has_peers)
    with embedded.postgres(private=True) as server, asyncio.Runner() as runner:
        ground = Ground(server, runner)
        runner.run(ground.connect())
        cases += exactly_once(ground, options)
        cases += lists(ground, options)
        runner.run(ground.close())
    report(cases, options)


if __name__ == "__main__":
    main()
