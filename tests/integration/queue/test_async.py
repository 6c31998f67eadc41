"""The queue on an event loop; what both queues do is in `test_queue` and `test_delivery`."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tests.faults.proxy import Proxy
from tests.integration.queue.names import GROUP, STREAM

from conquiet.queue import (
    AsyncQueueConsumer,
    AsyncRedisStreamsQueue,
    InvalidSettingError,
    MalformedEntryError,
    QueueConfig,
    QueueError,
)

OPTIONS = {
    "default": {},
    "RESP2 decoded": {"protocol": 2, "decode_responses": True},
    "RESP3 decoded": {"protocol": 3, "decode_responses": True},
    "no timeout": {"socket_timeout": None},
    "short timeout": {"socket_timeout": 0.25},
    "health checks": {"health_check_interval": 1},
}


@asynccontextmanager
async def opened(url, *, block_ms=5_000, **options):
    async with redis.asyncio.Redis.from_url(url, **options) as client:
        yield AsyncRedisStreamsQueue(client, QueueConfig(STREAM, GROUP, "b-1", block_ms=block_ms))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_client_gets_and_settles_messages(redis_url, options, pending, calls):
    async def main():
        async with opened(redis_url, **options) as queue:
            sent = [await queue.enqueue({"text": "Grüße ✓", "n": n}) for n in range(2)]
            [first, second] = await queue.read(1_000, count=2)
            assert [first.id, second.id] == sent
            assert first.payload == {"text": "Grüße ✓", "n": 0}
            await queue.ack(first)
            assert await queue.claim_stale(0) == [second]
            await queue.ack(second)
            assert await queue.read(300) == []  # longer than the short timeout

    asyncio.run(main())
    assert pending() == {}
    assert calls("xreadgroup") == 2


def test_many_tasks_share_a_queue_and_no_reply_gets_to_another_task(redis_url):
    async def main():
        async with opened(redis_url) as queue:
            ids = await asyncio.gather(*(queue.enqueue({"n": n}) for n in range(50)))
            batches = await asyncio.gather(*(queue.read(1_000) for _ in range(50)))
            got = {message.payload["n"]: message.id for [message] in batches}
            assert got == dict(enumerate(ids))

    asyncio.run(main())


def test_a_read_that_waits_leaves_the_loop_to_others(redis_url):
    async def main():
        async with opened(redis_url) as queue:
            reading = asyncio.create_task(queue.read(30_000))
            sent = await queue.enqueue({"n": 1})
            assert [message.id for message in await reading] == [sent]

    asyncio.run(main())


def test_a_cancelled_read_takes_no_later_reply(redis_url, blocked_clients, pending):
    async def main():
        async with opened(redis_url, max_connections=1) as queue:
            await queue.claim_stale(0)
            reading = asyncio.create_task(queue.read(30_000))
            while not blocked_clients():
                await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            sent = await queue.enqueue({"n": 1})
            # Redis may notice only now that the reader has gone.
            while not (messages := await queue.read(50) or await queue.claim_stale(0)):
                pass
            assert [message.id for message in messages] == [sent]
            await queue.ack(messages[0])

    asyncio.run(main())
    assert pending() == {}


def test_a_server_that_stops_answering_is_a_queue_error(redis_url, redis_client):
    async def main():
        settings = redis_client.connection_pool.connection_kwargs
        with Proxy(settings["port"]) as proxy:
            options = {"socket_timeout": 0.2, "retry": Retry(NoBackoff(), 0)}
            async with opened(f"redis://127.0.0.1:{proxy.port}", **options) as queue:
                await queue.enqueue({"n": 1})
                with proxy.outage(), pytest.raises(QueueError, match="failed") as caught:
                    await queue.read(50)
                assert isinstance(caught.value.__cause__, (redis.RedisError, OSError))
                # It connects again by itself.
                assert len(await queue.read(1_000)) == 1

    asyncio.run(main())


def test_the_group_is_created_by_the_first_call_and_a_refusal_is_raised(redis_url, redis_client):
    async def main():
        async with opened(redis_url) as queue:
            redis_client.set(STREAM, "not a stream")
            with pytest.raises(QueueError, match="XGROUP failed"):
                await queue.read(1)
            redis_client.delete(STREAM)
            assert await queue.read(1) == []
            assert redis_client.xinfo_groups(STREAM)[0]["name"] == GROUP.encode()

    asyncio.run(main())


def test_a_consumer_yields_messages_until_it_is_stopped(redis_url, redis_client, pending):
    async def main():
        got, reported = [], []
        async with opened(redis_url, block_ms=50) as queue:
            sent = [await queue.enqueue({"n": n}) for n in range(3)]
            bad = redis_client.xadd(STREAM, {"other": "1"}).decode()
            consumer = AsyncQueueConsumer(queue)
            messages = consumer.iter_messages()
            while not consumer.stopped:
                try:
                    async for message in messages:
                        got.append(message.id)
                        await consumer.ack(message)
                except MalformedEntryError as error:  # the same iterator goes on
                    reported.append(error.entry_id)
                    consumer.stop()
            assert (got, reported) == (sent, [bad])
            assert [message async for message in messages] == []
            assert await consumer.next() is None
        return bad

    bad = asyncio.run(main())
    assert list(pending()) == [bad]


def test_sigterm_ends_the_loop_and_its_former_handler_comes_back(redis_url):
    former = signal.getsignal(signal.SIGTERM)
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append("former"))
    try:

        async def main():
            async with opened(redis_url, block_ms=50) as queue:
                await queue.enqueue({"n": 1})
                async for _ in AsyncQueueConsumer(queue).iter_messages():
                    os.kill(os.getpid(), signal.SIGTERM)

        asyncio.run(main())
        assert seen == ["former"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["former"] * 2
    finally:
        signal.signal(signal.SIGTERM, former)


def test_clients_that_cannot_serve_are_refused(redis_client, redis_url):
    config = QueueConfig(STREAM, GROUP, "b-1")

    async def main():
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            pipeline = client.pipeline()
            single = redis.asyncio.Redis(single_connection_client=True)
            for wrong, why in (
                (redis_client, "RedisStreamsQueue takes it; give it a redis.asyncio.Redis"),
                (pipeline, "a pipeline queues commands"),
                (single, "single_connection_client"),
                ("redis://localhost", "not a client of redis-py"),
            ):
                with pytest.raises(InvalidSettingError, match=why):
                    AsyncRedisStreamsQueue(wrong, config)
            many = AsyncRedisStreamsQueue(
                client, QueueConfig(STREAM, GROUP, "b-1", max_read_count=2)
            )
            with pytest.raises(InvalidSettingError, match="max_read_count=2"):
                AsyncQueueConsumer(many)

    asyncio.run(main())
