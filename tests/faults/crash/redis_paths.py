"""Worker and relay over Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import redis.asyncio
from tests.faults import invariants
from tests.faults.crash.scenario import (
    COMMANDS,
    DEAD,
    GROUP,
    HOPELESS,
    LEASE,
    SENT,
    Place,
    Scenario,
    answer,
    commands_settled,
    fail_at_first,
    judge_ticks,
    prepare_schedule,
    send_commands,
    until,
    write_ticks,
)
from tests.faults.invariants import Event, Facts
from tests.faults.seam import Seam

from conquiet import Message, Router, Worker
from conquiet.middleware import DeadLetter, Retry
from conquiet.redis import (
    Inbox,
    Outbox,
    OutboxSource,
    StreamSink,
    StreamSource,
    Transaction,
    commands,
)
from conquiet.redis.delay import DelayKeys
from conquiet.redis.promotion import Delayed
from conquiet.relay import Relay

OUTBOX, EVENTS = "outbox", "events"
DELAYED = Delayed(OUTBOX)


class WorkerOverRedis(Scenario):
    """Commands of a stream take effect in Redis, by one EXEC with inbox, outbox and ack."""

    name = "worker over Redis"
    lease = LEASE
    key: Any = None

    def prepare(self, place: Place) -> None:
        with place.client() as client:
            send_commands(client)

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        client = redis.Redis.from_url(place.redis)
        router = Router()
        router.use(DeadLetter(StreamSink(client), topic=DEAD))
        router.use(*self.chain(client), Outbox(EVENTS, OUTBOX))

        @router.raw(type="place.order", source="/shop", name="place_order")
        def place_order(message: Message[bytes]) -> Message[Any]:
            order = msgspec.json.decode(message.data)
            commands(client).hincrby("effects", order["command"], 1)
            self.check(message)
            return answer(order)

        kind = until(StreamSource, self.settled(place), seam)
        source = kind(client, COMMANDS, GROUP, lease=LEASE, max_backoff=0.1, key=self.key)
        Worker(source, router, batch_size=2, ordered=self.key or False).run()
        client.close()

    def settled(self, place: Place) -> Callable[[], bool]:
        return commands_settled(place)

    def check(self, message: Message[Any]) -> None:
        """Fail after the effects, where a scenario wants that."""

    def chain(self, client: Any) -> tuple[Any, ...]:
        return Transaction(client), Inbox("billing", lease=LEASE)

    def facts(self, place: Place) -> Facts:
        with place.client() as client:
            facts = Facts(frozenset(SENT), HOPELESS, invariants.read_counts(client, "effects"))
            facts.log = invariants.read_log(client, OUTBOX)
            facts.unsettled = invariants.unsettled_entries(client, COMMANDS, GROUP)
            facts.locked = invariants.held_leases(client)
            dead = {fields[b"id"].decode() for _, fields in client.xrange(DEAD)}
        facts.unsettled += [f"{c}, no dead letter," for c in HOPELESS - dead]
        if len(facts.log) > len(SENT) - len(HOPELESS):
            facts.unsettled.append(f"{len(facts.log)} events in the outbox: one twice, which")
        return facts


class AsyncWorkerOverRedis(WorkerOverRedis):
    """The same on an event loop, with two groups in flight."""

    name = "async worker over Redis"

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        asyncio.run(self.work(place, seam))

    async def work(self, place: Place, seam: Seam) -> None:
        client = redis.asyncio.Redis.from_url(place.redis)
        router = Router()
        router.use(DeadLetter(StreamSink(client), topic=DEAD))
        router.use(*self.chain(client), Outbox(EVENTS, OUTBOX))

        @router.raw(type="place.order", source="/shop", name="place_order")
        async def place_order(message: Message[bytes]) -> Message[Any]:
            order = msgspec.json.decode(message.data)
            await commands(client).hincrby("effects", order["command"], 1)
            return answer(order)

        kind = until(StreamSource, commands_settled(place), seam)
        source = kind(client, COMMANDS, GROUP, lease=LEASE, max_backoff=0.1)
        await Worker(source, router, batch_size=2, concurrency=2).run_async()
        await client.aclose()


def _key_of(message: Message[Any]) -> str:
    key: str = msgspec.json.decode(message.data)["key"]
    return key


class LaterOverRedis(WorkerOverRedis):
    """Each command fails at first, waits beside its stream, its key with it, and comes back."""

    name = "later, over Redis"
    key = staticmethod(_key_of)

    def chain(self, client: Any) -> tuple[Any, ...]:
        return Retry(delays=[0.05] * 20), *super().chain(client)

    def check(self, message: Message[Any]) -> None:
        fail_at_first(message)

    def settled(self, place: Place) -> Callable[[], bool]:
        are_settled = super().settled(place)
        return lambda: are_settled() and not self.waiting(place)

    def waiting(self, place: Place) -> list[str]:
        keys = DelayKeys.of(COMMANDS, GROUP)
        with place.client() as client:
            left = [*client.xrange(keys.later), *client.xrange(keys.again)]
            found = [f"{fields[b'id'].decode()}, which waits," for _, fields in left]
            names = (*client.zrange(keys.due, 0, -1), *client.zrange(keys.turns, 0, -1))
        return [*found, *(f"{name.decode()} beside the stream" for name in names)]

    def facts(self, place: Place) -> Facts:
        facts = super().facts(place)
        facts.unsettled += self.waiting(place)
        facts.ordered = True
        return facts


class ScheduleOverRedis(Scenario):
    """Ticks that are due are added to the outbox stream; the schedule moves on with them."""

    name = "schedule, over Redis"

    def prepare(self, place: Place) -> None:
        prepare_schedule(place.redis, place)

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        write_ticks(place.redis)

    def facts(self, place: Place) -> Facts:
        with place.client() as client:
            entries = client.xrange("conquiet:outbox:shop")
        return Facts(unsettled=judge_ticks(place, [f[b"id"].decode() for _, f in entries]))


class WithTheSimpleInbox(WorkerOverRedis):
    """One SET NX before the transaction: a crash behind it loses the message. To be found out."""

    name = "worker over Redis, with an inbox that loses"

    def chain(self, client: redis.Redis) -> tuple[Any, ...]:
        return Inbox("billing", mode="setnx", client=client), Transaction(client)


class RelayOverRedis(Scenario):
    """Entries of an outbox stream are published to another stream, and deleted."""

    name = "relay over Redis"

    def prepare(self, place: Place) -> None:
        with place.client() as client:
            for number, (command, key) in enumerate(SENT.items()):
                data = json.dumps({"command": command, "number": number})
                about = {"specversion": "1.0", "id": f"e-{number}", "type": "placed"}
                where = {"source": "/shop", "subject": key, ":topic": EVENTS}
                client.xadd(OUTBOX, {**about, **where, "data": data})

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        client = redis.Redis.from_url(place.redis)
        source = OutboxSource(client, OUTBOX, batch_size=2)
        source.__class__ = until(StreamSource, lambda: not place.client().xlen(OUTBOX), seam)
        Relay(source, StreamSink(client), batch_size=2).run()
        client.close()

    def facts(self, place: Place) -> Facts:
        facts = Facts()
        with place.client() as client:
            facts.log = invariants.read_log(client, EVENTS)
            waiting = {event.id for event in invariants.read_log(client, OUTBOX)}
            facts.unsettled = invariants.unsettled_entries(client, OUTBOX, "outbox-publisher")
        facts.rows = [  # what was stored, and is gone from the outbox as soon as it is published
            Event(f"e-{number}", command, key, number, published=f"e-{number}" not in waiting)
            for number, (command, key) in enumerate(SENT.items())
        ]
        return facts


class DelayedOverRedis(RelayOverRedis):
    """Delayed events that are due are moved to the outbox stream, and published to another."""

    name = "delayed, over Redis"

    def prepare(self, place: Place) -> None:
        super().prepare(place)
        with place.client() as client:
            entries = client.xrange(OUTBOX)
            client.delete(OUTBOX)
            moment = datetime(2026, 1, 31, tzinfo=UTC)
            for _, fields in entries:
                flat = [item for pair in fields.items() for item in pair]
                client.execute_command(*DELAYED.hold(fields[b"id"].decode(), moment, flat))

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        client = redis.Redis.from_url(place.redis)

        def drained() -> bool:
            with place.client() as opened:
                return not opened.exists(DELAYED.times) and not opened.xlen(OUTBOX)

        source = OutboxSource(client, OUTBOX, batch_size=2)
        source.__class__ = until(OutboxSource, drained, seam)
        Relay(source, StreamSink(client), batch_size=2).run()
        client.close()

    def facts(self, place: Place) -> Facts:
        facts = super().facts(place)
        with place.client() as client:
            left = client.zcard(DELAYED.times) + client.hlen(DELAYED.entries)
            added = client.xinfo_stream(OUTBOX).get("entries-added", len(SENT))
        if left or added != len(SENT):  # each is added once, whatever crashed
            facts.unsettled.append(f"{left} events wait, {added} were added to the outbox")
        return facts
