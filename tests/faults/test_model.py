"""Two workers and a relay, stepped in any order, crashing anywhere, against a model of ten lines.

Each is a greenlet that stops before its read, inside its transaction, before its commit is acked,
between publish and mark; hypothesis decides who goes on, who dies, and whose lease ends. Workers
with async clients and engines are tasks of an event loop, and stop at the same places.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from greenlet import GreenletExit, getcurrent, greenlet
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.faults.model_stores import (
    ASYNC_DRIVERS,
    COMMANDS,
    EVENTS,
    GROUP,
    LONG,
    OUTBOX,
    AsyncRedisStores,
    AsyncSqlStores,
    RedisStores,
    SqlStores,
    Stores,
)

from conquiet import Message, Router, bridge
from conquiet import redis as redis_room
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay


class Model:
    """What has to be true, whoever did what in whichever order."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def wrong(self, effects: Counter[str], stored: Counter[str], log: list[str]) -> list[str]:
        found = [f"{name}: {count} effects" for name, count in effects.items() if count != 1]
        if effects != stored:
            found.append(f"effects {effects} and events {stored} differ")
        found += [f"{name} was told, and did not happen" for name in set(log) - set(effects)]
        return found

    def missing(self, effects: Counter[str], log: list[str]) -> set[str]:
        return set(self.sent) - set(effects) | set(effects) - set(log)


def stop_here() -> None:
    """Let hypothesis decide who goes on."""
    getcurrent().parent.switch()


class Process:
    """A worker or a relay: goes on from stop to stop, until it is killed."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.client = stores.connect()
        self.life = greenlet(self.live)

    def live(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        self.life.switch()

    def crash(self) -> None:
        pool = self.client.connection_pool  # so that nothing is given back in good order:
        pool.connection_kwargs["port"] = 1
        pool.disconnect()
        while not self.life.dead:  # a router takes it for a failing handler, and goes on
            self.life.throw(GreenletExit)
        self.client.close()


class AWorker(Process):
    def live(self) -> None:
        source = StreamSource(
            self.client, COMMANDS, GROUP, lease=LONG, claim_interval=0.0001, backoff=0.0001
        )
        router = Router()
        router.use(*self.stores.chain(self.client))

        @router.raw(type="place.order", name="place", source="/shop")
        def place(message: Message[bytes]) -> Message[bytes]:
            stop_here()
            self.stores.take_effect(self.client, message.id)
            stop_here()
            return Message(message.data, {"type": "order.placed"})

        while True:
            stop_here()
            batch = list(source.read(2, 0.0))
            stop_here()
            if batch:
                handled = router.run(batch)
                stop_here()
                router.settle(handled)


class AnAsyncWorker:
    """Goes on from stop to stop as a task of the loop of its stores, until it is killed."""

    def __init__(self, stores: AsyncRedisStores | AsyncSqlStores) -> None:
        self.stores = stores
        self.client = stores.connect_async()
        self.stopped = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.life: asyncio.Task[None] | None = None

    async def stop_here(self) -> None:
        self.stopped.set()
        await self.goes_on.wait()
        self.goes_on.clear()

    def step(self) -> None:
        self.stores.run(self._step())

    async def _step(self) -> None:
        if self.life is None:
            self.life = asyncio.create_task(self.live())
        self.stopped.clear()
        self.goes_on.set()
        stop = asyncio.create_task(self.stopped.wait())
        await asyncio.wait((stop, self.life), return_when=asyncio.FIRST_COMPLETED)
        if self.life.done():
            self.life.result()

    def crash(self) -> None:
        self.stores.run(self._crash())

    async def _crash(self) -> None:
        pool = self.client.connection_pool  # so that nothing is given back in good order:
        pool.connection_kwargs["port"] = 1
        await pool.disconnect()
        if self.life is not None:
            self.life.cancel()
            await asyncio.wait((self.life,))
        await self.client.aclose()

    async def live(self) -> None:
        source = StreamSource(
            self.client, COMMANDS, GROUP, lease=LONG, claim_interval=0.0001, backoff=0.0001
        )
        router = Router()
        router.use(*self.stores.chain(self.client))

        @router.raw(type="place.order", name="place", source="/shop")
        async def place(message: Message[bytes]) -> Message[bytes]:
            await self.stop_here()
            await self.stores.take_effect_async(self.client, message.id)
            await self.stop_here()
            return Message(message.data, {"type": "order.placed"})

        while True:
            await self.stop_here()
            batch = list(await bridge.run(source.read, 2, 0.0))
            await self.stop_here()
            if batch:
                handled = await bridge.run(router.run, batch)
                await self.stop_here()
                await bridge.run(router.settle, handled)


class ARelay(Process):
    def live(self) -> None:
        source = self.stores.outbox(self.client)
        relay = Relay(source, Stopping(StreamSink(self.client)), batch_size=2)
        try:
            while True:
                stop_here()
                relay.run_once()  # a worker may have SQLite's lock: an outage, and it goes on
        except GreenletExit:
            source.close()  # a database lets go of what a dead process has claimed
            raise


class Stopping:
    """A sink that stops before and after it publishes."""

    def __init__(self, sink: StreamSink) -> None:
        self._sink = sink

    def publish_each(self, messages):
        stop_here()
        answers = self._sink.publish_each(messages)
        stop_here()
        return answers

    def close(self):
        self._sink.close()


def check(stores: Stores, examples: int) -> None:
    names = itertools.count()
    worker = AnAsyncWorker if isinstance(stores, AsyncRedisStores | AsyncSqlStores) else AWorker
    kinds = (worker, worker, ARelay)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            stores.empty()
            self.model = Model()
            self.processes = [kind(stores) for kind in kinds]

        @rule(count=st.integers(1, 3))
        def send(self, count: int) -> None:
            for _ in range(count):
                self.model.sent.append(f"c-{next(names)}")
                stores.send(self.model.sent[-1])

        @rule(who=st.integers(0, 2), steps=st.integers(1, 6))
        def go_on(self, who: int, steps: int) -> None:
            for _ in range(steps):
                self.processes[who].step()

        @rule(who=st.integers(0, 2))
        def crash(self, who: int) -> None:
            self.processes[who].crash()
            self.processes[who] = kinds[who](stores)

        @rule()
        def leases_end(self) -> None:
            stores.end_leases()

        @invariant()
        def nothing_is_wrong(self) -> None:
            wrong = self.model.wrong(stores.effects(), stores.stored(), stores.log())
            assert not wrong, wrong

        def teardown(self) -> None:
            for process in self.processes:
                process.crash()
            stores.end_leases()
            last = [worker(stores), ARelay(stores)]
            for _ in range(500):
                if stores.settled() and stores.published():
                    break
                for process in last:
                    process.step()
            for process in last:
                process.crash()
            missing = self.model.missing(stores.effects(), stores.log())
            assert not missing, f"{missing} are lost"
            self.nothing_is_wrong()

    run_state_machine_as_test(Machine, settings=_settings(examples))


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # to shrink takes longer than to read twenty steps
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("psycopg_async", "aiosqlite")]


@pytest.fixture(params=["redis", "postgresql", "sqlite", "redis.asyncio", "asyncpg", *SLOW])
def stores(request, redis_client) -> Iterator[Stores]:
    name = request.param
    if name.startswith("redis"):
        kind = AsyncRedisStores if name.endswith("asyncio") else RedisStores
        made: Stores = kind(redis_client)
    else:
        url = request.getfixturevalue("sqlite_url" if "sqlite" in name else "database_url")
        is_async = name in ASYNC_DRIVERS
        made = AsyncSqlStores(redis_client, url, name) if is_async else SqlStores(redis_client, url)
    yield made
    made.close()


def test_any_interleaving_of_two_workers_and_a_relay_is_exactly_once(stores):
    check(stores, examples=12)


class Forgetful:
    def chain(self, client):
        return redis_room.Transaction(client), redis_room.Outbox(EVENTS, OUTBOX)


class ForgetfulStores(Forgetful, RedisStores):
    pass


class AsyncForgetfulStores(Forgetful, AsyncRedisStores):
    pass


class SimpleInbox(RedisStores):
    """One SET NX before the transaction: what a crash leaves behind counts as done."""

    def chain(self, client):
        inbox = redis_room.Inbox("b", mode="setnx", client=client)
        return inbox, redis_room.Transaction(client), redis_room.Outbox(EVENTS, OUTBOX)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (ForgetfulStores, "2 effects"),
        (AsyncForgetfulStores, "2 effects"),
        (SimpleInbox, "are lost"),
    ],
)
def test_the_model_finds_what_a_chain_without_a_sound_inbox_does(redis_client, kind, found):
    stores = kind(redis_client)
    with pytest.raises(AssertionError, match=found):
        check(stores, examples=100)
    stores.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundreds_of_interleavings_of_two_workers_and_a_relay_are_exactly_once(stores):
    check(stores, examples=300)
