"""Clients of redis.asyncio in an async worker: source, transaction, inbox, outbox and sink."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import redis
import redis.asyncio
import uvloop
from tests.integration.redis.conftest import numbered

from conquiet import bridge
from conquiet.errors import ConfigError, HandlerError
from conquiet.message import Message
from conquiet.operations import presence
from conquiet.redis import (
    Inbox,
    Outbox,
    OutboxSource,
    StreamSink,
    StreamSource,
    Transaction,
    commands,
)
from conquiet.relay import Relay
from conquiet.router import Router
from conquiet.worker import Worker

SECONDS = 20


@pytest.fixture
def run(redis_url):
    """Run a coroutine function with a client of redis.asyncio, on a loop of its own."""

    def start(test, *, loop_factory=None, **options):
        async def main():
            async with redis.asyncio.Redis.from_url(redis_url, **options) as client:
                return await asyncio.wait_for(test(client), SECONDS)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())

    return start


def chain(client, handle, **inbox):
    """Return a router whose handler runs in a transaction with inbox and outbox."""
    router = Router()
    router.use(Transaction(client), Inbox("billing", **inbox), Outbox("sales", "outbox"))
    router.raw(name="handler", source="/billing")(handle)
    return router


def counts(client, handled=None):
    """Return a handler that counts its messages in Redis and returns an event for each."""

    async def handle(item: Message[bytes]) -> list[Message[bytes]]:
        await commands(client).hincrby("count", item.id, 1)
        if handled is not None:
            handled.append(item.id)
        return [Message(b"", {"type": "billed"})]

    return handle


@asynccontextmanager
async def working(client, router, source=None, sink=None, **options):
    """Run a worker over the stream `orders` until all is acked."""
    settings = {"backoff": 0.0, "claim_interval": 0.02, "block": 0.05}
    source = source or StreamSource(client, "orders", "billing", **settings)
    async with Worker(source, router, sink, **options) as worker:
        yield worker


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def counted(redis_client):
    return {key.decode(): int(n) for key, n in redis_client.hgetall("count").items()}


def once(count):
    return {f"m-{n}": 1 for n in range(count)}


# --- the worker -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "options"), [(1, {}), (20, {"decode_responses": True, "protocol": 2})]
)
def test_effects_events_and_acks_are_in_one_exec(
    run, redis_client, publish, pending, options, batch_size
):
    publish(60)

    async def test(client):
        router = chain(client, counts(client))
        async with working(client, router, batch_size=batch_size, concurrency=10):
            await until(lambda: redis_client.xlen("outbox") == 60)

    run(test, **options)
    assert counted(redis_client) == once(60)
    assert pending() == []
    assert redis_client.info("commandstats").get("cmdstat_xack", {"calls": 0})["calls"] > 0


def test_it_is_listed_as_alive_while_it_works(run, redis_client, publish):
    publish(1)

    async def test(client):
        async with working(client, chain(client, counts(client))):
            await until(lambda: redis_client.xlen("outbox") == 1)
            [found] = presence.list_workers(redis_client, "orders")
            assert found.alive
        assert not any(one.alive for one in presence.list_workers(redis_client, "orders"))

    run(test)


def test_it_runs_on_uvloop(run, redis_client, publish, pending):
    publish(20)

    async def test(client):
        async with working(client, chain(client, counts(client)), batch_size=1):
            await until(lambda: redis_client.xlen("outbox") == 20)

    run(test, loop_factory=uvloop.new_event_loop)
    assert (counted(redis_client), pending()) == (once(20), [])


def test_a_message_that_fails_is_buried_alone(run, redis_client, publish, pending):
    publish(10)

    async def test(client):
        count = counts(client)

        async def handle(item: Message[bytes]) -> list[Message[bytes]]:
            outputs = await count(item)
            if item.id == "m-3":
                raise ZeroDivisionError
            return outputs

        settings = {"backoff": 0.0, "max_attempts": 3, "block": 0.05}
        source = StreamSource(client, "orders", "billing", **settings)
        async with working(client, chain(client, handle), source, batch_size=5):
            await until(lambda: redis_client.xlen("orders:dead") == 1)
            await until(lambda: redis_client.xlen("outbox") == 9)

    run(test)
    [(_, letter)] = redis_client.xrange("orders:dead")
    assert letter[b"id"] == b"m-3"
    others = once(10)
    del others["m-3"]
    assert (counted(redis_client), pending()) == (others, [])


def test_lost_connections_lose_and_double_nothing(run, redis_client, publish, pending):
    publish(100)

    async def test(client):
        # A message whose EXEC was lost before Redis read it waits for the end of its lease.
        router = chain(client, counts(client), lease=2.0)
        async with working(client, router, batch_size=1, concurrency=20):
            for part in (10, 30, 60):
                await until(lambda part=part: redis_client.xlen("outbox") >= part)
                redis_client.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: redis_client.xlen("outbox") >= 100)
            await until(lambda: not pending())

    run(test)
    assert counted(redis_client) == once(100)
    assert redis_client.xlen("outbox") == 100


def test_connections_of_another_loop_count_as_lost(redis_client, redis_url, publish, pending):
    publish(5)
    with asyncio.Runner() as other, asyncio.Runner() as ours:
        client = redis.asyncio.Redis.from_url(redis_url)
        other.run(client.ping())

        async def test():
            source = StreamSource(redis_client, "orders", "billing", max_attempts=1, block=0.05)
            async with client, working(client, chain(client, counts(client)), source):
                await until(lambda: redis_client.xlen("outbox") == 5)

        ours.run(asyncio.wait_for(test(), SECONDS))
        other.run(asyncio.sleep(0))  # where its transport ends
    assert (counted(redis_client), pending()) == (once(5), [])
    assert not redis_client.exists("orders:dead")


def test_leases_are_renewed_on_the_loop_while_a_handler_waits(run, redis_client, publish, pending):
    publish(2)
    inside = []

    async def test(client):
        count = counts(client)

        async def handle(item: Message[bytes]) -> list[Message[bytes]]:
            inside.append(item.id)
            await asyncio.sleep(2.5)
            return await count(item)

        router = chain(client, handle, lease=1.0)
        other = chain(client, counts(client, inside), lease=1.0)
        settings = {"lease": 1.0, "claim_interval": 0.02, "block": 0.05}
        source = StreamSource(client, "orders", "billing", **settings)
        async with working(client, router, source):
            await until(lambda: inside)
            heir = StreamSource(client, "orders", "billing", **settings)
            async with working(client, other, heir):
                await until(lambda: redis_client.xlen("outbox") == 2)

    run(test)
    assert sorted(inside) == ["m-0", "m-1"]
    assert (counted(redis_client), pending()) == (once(2), [])


def test_a_pool_that_is_small_bounds_the_transactions(run, redis_client, publish, caplog):
    publish(30)
    running = []

    async def test(client):
        assert Transaction(client).capacity == 3
        count = counts(client)

        async def handle(item: Message[bytes]) -> list[Message[bytes]]:
            running.append(1)
            assert len(running) <= 3
            await commands(client).reader.get("other")
            outputs = await count(item)
            running.pop()
            return outputs

        source = StreamSource(redis_client, "orders", "billing")
        async with working(client, chain(client, handle), source, batch_size=1):
            await until(lambda: redis_client.xlen("outbox") == 30)

    run(test, max_connections=8)
    assert counted(redis_client) == once(30)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_workers_on_one_client_share_its_connections(run, redis_client, publish, caplog):
    """redis-py refuses a connection too many, it does not wait for one."""
    publish(30)
    running = []

    async def test(client):
        count = counts(client)

        async def handle(item: Message[bytes]) -> list[Message[bytes]]:
            running.append(1)
            assert len(running) <= 3
            await commands(client).reader.get("other")
            outputs = await count(item)
            running.pop()
            return outputs

        async with AsyncExitStack() as workers:
            for _ in range(3):
                source = StreamSource(redis_client, "orders", "billing")
                worker = working(client, chain(client, handle), source, batch_size=1)
                await workers.enter_async_context(worker)
            await until(lambda: redis_client.xlen("outbox") == 30)

    run(test, max_connections=8)
    assert counted(redis_client) == once(30)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_sync_client_bounds_the_transactions_of_an_async_worker_too(
    run, redis_client, redis_url, publish, caplog
):
    publish(30)
    running = []

    async def test(client):
        with redis.Redis.from_url(redis_url, max_connections=8) as sync_client:

            def handle(item: Message[bytes]) -> list[Message[bytes]]:
                running.append(1)
                assert len(running) <= 3
                commands(sync_client).reader.get("other")
                commands(sync_client).hincrby("count", item.id, 1)
                running.pop()
                return [Message(b"", {"type": "billed"})]

            source = StreamSource(sync_client, "orders", "billing")
            async with working(client, chain(sync_client, handle), source, batch_size=1):
                await until(lambda: redis_client.xlen("outbox") == 30)

    run(test)
    assert counted(redis_client) == once(30)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_sink_publishes_on_the_loop(run, redis_client, publish, pending):
    publish(20)

    async def test(client):
        router = Router()

        @router.raw(source="/billing")
        async def handle(item: Message[bytes]) -> list[Message[bytes]]:
            return [Message(item.data, {"type": "billed"})]

        sink = StreamSink(client, "billed")
        async with working(client, router, sink=sink, batch_size=3):
            await until(lambda: redis_client.xlen("billed") == 20 and not pending())

    run(test)


def test_several_streams_and_few_free_lanes(run, redis_client, publish, pending):
    """One command cannot wait for fewer entries than streams: it is polled, on the loop too."""
    handled = []

    async def test(client):
        streams = [f"orders-{n}" for n in range(4)]
        source = StreamSource(client, streams, "billing", max_in_flight=2)
        router = chain(client, counts(client, handled))
        async with working(client, router, source, batch_size=1, concurrency=2):
            for n, stream in enumerate(streams):
                publish(5, first=5 * n, topic=stream)
            await until(lambda: redis_client.xlen("outbox") == 20)

    run(test)
    assert counted(redis_client) == once(20)


def test_the_inbox_of_setnx_takes_a_client_of_the_loop(run, redis_client, publish, pending):
    publish(5)
    publish(5)  # with the same ids

    async def test(client):
        router = Router()
        router.use(Inbox("billing", mode="setnx", client=client), Transaction(client))

        @router.raw(name="handler")
        async def handle(item: Message[bytes]) -> None:
            await commands(client).hincrby("count", item.id, 1)

        assert not router.blocks
        async with working(client, router, batch_size=1):
            await until(lambda: counted(redis_client))  # the group exists
            last = redis_client.xinfo_stream("orders")["last-generated-id"]
            await until(
                lambda: redis_client.xinfo_groups("orders")[0]["last-delivered-id"] == last
            )  # Redis 6.2 does not report the lag
            await until(lambda: not pending())

    run(test)
    assert counted(redis_client) == once(5)


# --- cancellation ---------------------------------------------------------------------------


def test_a_hard_stop_gives_everything_back_at_no_attempt(run, redis_client, publish, pending):
    publish(30)
    began = []

    async def test(client):
        async def hang(item: Message[bytes]) -> list[Message[bytes]]:
            await commands(client).hincrby("count", item.id, 1)
            began.append(item.id)
            await asyncio.Event().wait()
            return []

        router = chain(client, hang)
        async with working(client, router, batch_size=1, concurrency=10, grace=0.01):
            await until(lambda: len(began) == 10)
        assert redis_client.keys("conquiet:inbox:*") == []  # the leases were given back
        assert {deliveries for _, deliveries in pending()} <= {0}
        async with working(client, chain(client, counts(client)), batch_size=1):
            await until(lambda: redis_client.xlen("outbox") == 30)

    run(test)
    assert (counted(redis_client), pending()) == (once(30), [])


def deliver(router, source):
    router.process(source.read(10, 0.05))


def test_a_cancellation_at_any_await_loses_and_doubles_nothing(
    run, redis_client, pending, monkeypatch
):
    """Also in EXEC, between EXEC and ack, and in what follows a failure."""
    wait_for = bridge.wait_for
    left = 0

    def cancel_the_last(awaitable):
        nonlocal left
        left -= 1
        if left == 0:
            asyncio.current_task().cancel()
        return wait_for(awaitable)

    async def test(client):
        nonlocal left
        cancelled = 0
        for at in range(1, 200):
            redis_client.flushall()
            StreamSink(redis_client, "orders").publish(numbered(2))
            router = chain(client, counts(client))
            settings = {"backoff": 0.0, "claim_interval": 0.01}
            source = StreamSource(client, "orders", "billing", **settings)
            left = at
            monkeypatch.setattr(bridge, "wait_for", cancel_the_last)
            task = asyncio.create_task(bridge.run(deliver, router, source))
            await asyncio.wait([task])
            monkeypatch.setattr(bridge, "wait_for", wait_for)
            cancelled += task.cancelled()
            await bridge.run(source.close)
            heir = StreamSource(client, "orders", "billing", **settings)
            while not redis_client.xlen("outbox") or pending():
                await bridge.run(deliver, router, heir)
            await bridge.run(heir.close)
            assert (counted(redis_client), redis_client.xlen("outbox")) == (once(2), 2), at
            if left > 0:  # it ended before the await that was to be cancelled
                return cancelled
        raise AssertionError("the chain did not end")

    assert run(test) > 10


# --- commands -------------------------------------------------------------------------------


async def handled_by(client, handle):
    """Run one message through a chain; return its results."""
    router = chain(client, handle)
    return await bridge.run(router.process, numbered(1))


def test_commands_are_awaited_inside_and_outside(run, redis_client):
    async def test(client):
        assert commands(client) is client

        async def handle(item: Message[bytes]) -> None:
            queued = await commands(client).set("k", 1)
            commands(client).incr("without await")
            assert redis_client.keys("[kw]*") == []
            with pytest.raises(HandlerError, match="the result of SET k is not known"):
                bool(queued)
            with pytest.raises(HandlerError, match=r"read with commands\(client\)\.reader"):
                await commands(client).get("k")
            async with commands(client).pipeline() as pipeline:
                pipeline.set("p", 1)
                await pipeline.execute()
            await commands(client).execute_command("XGROUP CREATE", "s", "g", "0", "MKSTREAM")
            assert await commands(client).reader.get("k") is None

        await handled_by(client, handle)

    run(test)
    assert (redis_client.get("k"), redis_client.get("without await")) == (b"1", b"1")
    assert (redis_client.get("p"), redis_client.exists("s")) == (b"1", 1)


def test_a_watched_key_that_changes_makes_the_handler_run_again(run, redis_client):
    tries = []

    async def test(client):
        async def handle(item: Message[bytes]) -> None:
            await commands(client).watch("balance")
            found = int(await commands(client).reader.get("balance") or 0)
            if not tries:
                redis_client.set("balance", 5)
            tries.append(found)
            await commands(client).set("balance", found + 1)

        await handled_by(client, handle)

    run(test)
    assert (tries, redis_client.get("balance")) == ([0, 5], b"6")


def test_a_handle_and_a_task_that_outlive_the_transaction_raise(run, redis_client):
    async def test(client):
        kept = []
        go = asyncio.Event()

        async def late():
            await go.wait()
            await commands(client).set("late", 1)

        async def handle(item: Message[bytes]) -> None:
            kept.extend((commands(client), asyncio.create_task(late())))

        await handled_by(client, handle)
        with pytest.raises(HandlerError, match="has ended"):
            await kept[0].set("late", 1)
        go.set()
        with pytest.raises(HandlerError, match="has ended"):
            await kept[1]

    run(test)
    assert not redis_client.exists("late")


def test_tasks_of_a_handler_share_its_transaction(run, redis_client):
    async def test(client):
        async def handle(item: Message[bytes]) -> None:
            writes = (commands(client).incr("n") for _ in range(10))
            await asyncio.gather(*writes, *(commands(client).watch(f"w{n}") for n in range(10)))
            assert not redis_client.exists("n")

        await handled_by(client, handle)

    run(test)
    assert redis_client.get("n") == b"10"


def test_a_client_of_another_database_or_name_is_refused(run, redis_client, redis_url):
    async def test(client):
        async def handle(item: Message[bytes]) -> None:
            for url in (f"{redis_url[:-1]}9", redis_url.replace("127.0.0.1", "localhost")):
                async with redis.asyncio.Redis.from_url(url) as other:
                    with pytest.raises(HandlerError, match="not known to be on the database"):
                        commands(other)
                    assert commands(other, outside=True) is other

        await handled_by(client, handle)

    run(test)


def test_sync_handlers_and_sync_clients_join_the_transaction(run, redis_client):
    async def test(client):
        def handle(item: Message[bytes]) -> None:  # in a thread
            commands(redis_client).watch("w")
            commands(redis_client).set("by sync client", 1)
            commands(client).set("by async client", 1)
            assert redis_client.keys("by*") == []

        await handled_by(client, handle)

        async def handle_async(item: Message[bytes]) -> None:
            commands(redis_client).set("by sync client", 2)
            assert redis_client.get("by sync client") == b"1"

        redis_client.delete(*redis_client.keys("conquiet:*"))
        await handled_by(client, handle_async)

    run(test)
    assert (redis_client.get("by sync client"), redis_client.get("by async client")) == (b"2", b"1")


# --- which client where ---------------------------------------------------------------------


def test_sync_clients_in_an_async_worker_work_in_threads(run, redis_client, publish, pending):
    publish(40)

    async def test(client):
        async def handle(item: Message[bytes]) -> list[Message[bytes]]:
            await client.ping()  # a client of this loop
            commands(redis_client).hincrby("count", item.id, 1)
            return [Message(b"", {"type": "billed"})]

        async with working(redis_client, chain(redis_client, handle), batch_size=2, concurrency=4):
            await until(lambda: redis_client.xlen("outbox") == 40)

    run(test)
    assert (counted(redis_client), pending()) == (once(40), [])


def test_async_clients_in_a_worker_of_threads_are_refused(run, redis_client):
    async def test(client):
        def start(source, router, sink=None):
            Worker(source, router, sink).start()

        source = StreamSource(redis_client, "orders", "billing")
        plain = chain(redis_client, counts(client))
        for parts in (
            (source, chain(client, counts(client))),
            (StreamSource(client, "orders", "billing"), plain),
            (source, plain, StreamSink(client, "billed")),
        ):
            with pytest.raises(ConfigError, match=r"await worker\.run_async\(\)"):
                await asyncio.to_thread(start, *parts)
        with pytest.raises(ConfigError, match="a relay runs in a thread"):
            Relay(OutboxSource(client, "outbox"), StreamSink(redis_client))
        source.close()

    run(test)


def test_clients_that_cannot_serve_are_refused(redis_client):
    single = redis.asyncio.Redis(single_connection_client=True)
    cluster = redis.asyncio.RedisCluster.__new__(redis.asyncio.RedisCluster)
    cluster._initialize = True  # else it warns when it is collected
    for client, why in (
        (single, "single_connection_client"),
        (cluster, "in threads; give a redis.Redis or redis.RedisCluster"),
        (redis.asyncio.Redis().pipeline(), "cannot be used"),
    ):
        for make in (Transaction, StreamSink, lambda c: StreamSource(c, "orders", "billing")):
            with pytest.raises(ConfigError, match=why):
                make(client)
