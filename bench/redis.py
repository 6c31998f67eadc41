"""Redis: exactly-once, stream source and sink, against the least that redis-py can do by hand.

python bench/redis.py [--quick] [--json FILE] [--no-peers]

exactly once   read, inbox, one HSET by the handler, one event into the outbox, ack. By hand: the
               same effects by redis-py's pipelines, with the lossy SET NX of the seed in two round
               trips, or with the guarantee of ours, WATCH, for which its pipelines need four.
consume        read, decode, call a handler that does nothing, ack; 100 at a time. By hand:
               XREADGROUP COUNT 100, decode, one XACK; and the same with COUNT 1. Other libraries
               live in a virtual environment of their own, `.venv-peers`, which this script makes;
               with --quick they take part only if it exists.
publish        100 messages at a time. By hand: redis-py's pipeline of XADDs.

Messages have 300 bytes of JSON.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import json
import statistics
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from typing import Any, NamedTuple

import msgspec
import redis

from bench import peers
from bench.harness import Case, Seconds, arguments, compare, measure, report
from conquiet import Message, Router, Worker, embedded
from conquiet.redis import Inbox, Outbox, StreamSink, StreamSource, Transaction, commands

DATA = json.dumps({"order": 1234567, "customer": "customer-17", "text": "x" * 240}).encode()
LEASE_MS, RETENTION_MS = 30_000, 600_000
STREAM, OUTBOX, PUBLISHED = "commands", "outbox", "published"
BATCH = 100


class Size(NamedTuple):
    """How much is measured; exactly once is slower, and needs fewer messages to tell."""

    messages: int
    once: int
    rounds: int


class PlaceOrder(msgspec.Struct):
    order: int
    customer: str
    text: str


class OrderPlaced(msgspec.Struct):
    order: int
    customer: str


def attributes(number: int) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"018f3a4e-7c1b-7000-8000-{number:012d}",
        "type": "place.order",
        "source": "/shop",
        "subject": f"order-{number}",
        "time": "2026-01-31T12:00:00.000000Z",
        "datacontenttype": "application/json",
    }


def batches(messages: int) -> list[list[Message[bytes]]]:
    return [
        [Message(DATA, attributes(n)) for n in range(start, min(messages, start + BATCH))]
        for start in range(0, messages, BATCH)
    ]


# --- exactly once ---------------------------------------------------------------------------


class ExactlyOnce:
    """Every run reads the stream by a new group, under a new name."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client
        self._names = (f"service-{number}" for number in count())

    # --- ours -------------------------------------------------------------------------------

    def router(self, name: str, seen: Callable[[], None]) -> Router:
        client = self.client
        router = Router()
        router.use(Transaction(client), Inbox(name), Outbox("orders", OUTBOX))

        @router.command(source="/orders")
        def place_order(order: PlaceOrder) -> list[OrderPlaced]:
            seen()
            commands(client).hset(f"order:{order.order}", "status", "placed")
            return [OrderPlaced(order.order, order.customer)]

        return router

    def by_router(self, batch: int, messages: int) -> None:
        self.client.delete(OUTBOX)
        name = next(self._names)
        router = self.router(name, lambda: None)
        source = StreamSource(self.client, STREAM, name)
        done = 0
        while done < messages:
            done += len(router.process(source.read(batch, 1.0)))
        source.close()

    def by_worker(self, batch: int, messages: int) -> None:
        self.client.delete(OUTBOX)
        name = next(self._names)
        left = messages

        def seen() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                worker.stop()

        worker = Worker(
            StreamSource(self.client, STREAM, name), self.router(name, seen), batch_size=batch
        )
        worker.run()

    # --- by hand ----------------------------------------------------------------------------

    def _read(self, name: str, batch: int, messages: int) -> Iterator[list[tuple[bytes, Any]]]:
        self.client.delete(OUTBOX)
        self.client.xgroup_create(STREAM, name, "0")
        done = 0
        while done < messages:
            reply = self.client.execute_command(
                "XREADGROUP", "GROUP", name, "c", "COUNT", batch, "STREAMS", STREAM, ">"
            )
            [(_, entries)] = reply.items() if isinstance(reply, dict) else reply
            entries = entries[0] if isinstance(reply, dict) else entries
            done += len(entries)
            yield entries

    def by_setnx(self, batch: int, messages: int) -> None:
        """SET NX for all, then everything in one EXEC: loses what crashes in between."""
        name = next(self._names)
        decode = msgspec.json.Decoder(PlaceOrder).decode
        for entries in self._read(name, batch, messages):
            keys = [f"inbox:{name}:{fields[b'id'].decode()}" for _, fields in entries]
            claims = self.client.pipeline(transaction=False)
            for key in keys:
                claims.set(key, "1", nx=True, px=RETENTION_MS)
            fresh = claims.execute()
            effects = self.client.pipeline(transaction=True)
            for (_, fields), is_new in zip(entries, fresh, strict=True):
                if is_new:
                    self._effect(effects, decode(fields[b"data"]))
            effects.xack(STREAM, name, *[entry_id for entry_id, _ in entries])
            effects.execute()

    def by_watch(self, batch: int, messages: int) -> None:
        """A lease, fenced by WATCH, and done in the same EXEC: the guarantee of ours."""
        name = next(self._names)
        decode = msgspec.json.Decoder(PlaceOrder).decode
        for entries in self._read(name, batch, messages):
            keys = [f"inbox:{name}:{fields[b'id'].decode()}" for _, fields in entries]
            token = uuid.uuid4().hex
            lease = self.client.pipeline(transaction=False)
            for key in keys:
                lease.set(key, token, nx=True, px=LEASE_MS)
            lease.execute()
            with self.client.pipeline(transaction=True) as effects:
                effects.watch(*keys)
                states = effects.mget(keys)
                effects.multi()
                for (_, fields), key, state in zip(entries, keys, states, strict=True):
                    if state == token.encode():
                        self._effect(effects, decode(fields[b"data"]))
                        effects.set(key, "done", px=RETENTION_MS)
                effects.xack(STREAM, name, *[entry_id for entry_id, _ in entries])
                effects.execute()

    def _effect(self, pipe: Any, order: PlaceOrder) -> None:
        pipe.hset(f"order:{order.order}", "status", "placed")
        event = {
            "specversion": "1.0",
            "id": str(uuid.uuid4()),
            "type": "order.placed",
            "source": "/orders",
            "time": datetime.now(UTC).isoformat(),
            "datacontenttype": "application/json",
            "data": msgspec.json.encode(OrderPlaced(order.order, order.customer)),
        }
        pipe.xadd(OUTBOX, {":topic": "orders", **event})


def exactly_once(client: redis.Redis, size: Size) -> Iterator[Case]:
    bench = ExactlyOnce(client)
    for batch, messages in ((1, size.once // 20), (200, size.once)):
        seconds = measure(
            {
                "router": lambda: bench.by_router(batch, messages),  # noqa: B023 - run at once
                "worker": lambda: bench.by_worker(batch, messages),  # noqa: B023
                "SET NX by hand": lambda: bench.by_setnx(batch, messages),  # noqa: B023
                "WATCH by hand": lambda: bench.by_watch(batch, messages),  # noqa: B023
            },
            rounds=size.rounds,
        )
        for ours in ("router", "worker"):
            for floor in ("SET NX by hand", "WATCH by hand"):
                yield compare(f"exactly once, {ours}", messages, seconds, ours, floor, batch=batch)


# --- consume --------------------------------------------------------------------------------


class Consuming:
    """Reads the stream from its beginning again and again, each time by a new group."""

    def __init__(self, client: redis.Redis, messages: int) -> None:
        self.client: Any = client
        self.messages = messages

    def by_hand(self, batch: int, messages: int) -> None:
        group, decode = uuid.uuid4().hex, msgspec.json.Decoder(PlaceOrder).decode
        self.client.xgroup_create(STREAM, group, "0")
        done = 0
        while done < messages:
            [(_, entries)] = self.client.xreadgroup(group, "c", {STREAM: ">"}, count=batch)
            for _, fields in entries:
                decode(fields[b"data"])
            self.client.xack(STREAM, group, *[entry_id for entry_id, _ in entries])
            done += len(entries)

    def by_worker(self) -> None:
        router = Router()
        left = self.messages

        @router.event()
        def place_order(order: PlaceOrder) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                worker.stop()

        worker = Worker(self._source(), router, batch_size=BATCH)
        worker.run()

    def by_router(self) -> None:
        router = Router()

        @router.event()
        def place_order(order: PlaceOrder) -> None: ...

        source = self._source()
        done = 0
        while done < self.messages:
            done += len(router.process(source.read(BATCH, 1.0)))
        source.close()

    def by_source(self) -> None:
        source = self._source()
        done = 0
        while done < self.messages:
            messages = source.read(BATCH, 1.0)
            source.settle([message.acking.token for message in messages if message.acking], ())
            done += len(messages)
        source.close()

    def _source(self) -> StreamSource:
        return StreamSource(self.client, STREAM, uuid.uuid4().hex)


def consume(client: redis.Redis, size: Size) -> Iterator[Case]:
    consuming = Consuming(client, size.messages)
    floor, single = f"redis-py by {BATCH}", "redis-py by 1"
    runs: dict[str, Callable[[], object]] = {
        "worker": consuming.by_worker,
        "router": consuming.by_router,
        "source": consuming.by_source,
        floor: lambda: consuming.by_hand(BATCH, size.messages),
        single: lambda: consuming.by_hand(1, size.messages // 20),
    }
    seconds = measure(runs, rounds=size.rounds)
    one = seconds[single]  # a twentieth of the messages is enough, and is counted twenty times
    seconds[single] = Seconds(one.best * 20, one.median * 20)
    for ours in ("worker", "router", "source"):
        yield compare(f"consume, {ours}", size.messages, seconds, ours, floor, batch=BATCH)
    yield compare("consume, worker", size.messages, seconds, "worker", single, batch=BATCH)


def against_peers(client: redis.Redis, url: str, size: Size, *, make: bool) -> Iterator[Case]:
    """The same messages and a handler that does nothing, each library in its own process."""
    python = peers.interpreter(make=make)
    if python is None:
        return
    consuming = Consuming(client, size.messages)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in peers.PEERS}
    for _ in range(1 if size.rounds < 5 else 3):
        seconds = measure({"worker": consuming.by_worker}, rounds=1)
        ours.append(size.messages / seconds["worker"].median)
        for name, peer in peers.PEERS.items():
            rate = peers.rate(python, url, peer)
            if rate is not None:
                theirs[name].append(rate)
    rate = statistics.median(ours)
    for name, rates in theirs.items():
        if rates:
            other = statistics.median(rates)
            yield Case(
                name="consume, worker",
                rate=rate,
                floor=name,
                floor_rate=other,
                ratio=rate / other,
                settings={"batch": BATCH},
            )


# --- publish --------------------------------------------------------------------------------


def publish(client: redis.Redis, size: Size) -> Iterator[Case]:
    """Each time to a stream that is emptied first."""
    messages = batches(size.messages)

    def by_hand() -> None:
        client.delete(PUBLISHED)
        for batch in messages:
            pipeline: Any = client.pipeline(transaction=False)
            for message in batch:
                pipeline.xadd(PUBLISHED, {**message.attributes, "data": message.data})
            pipeline.execute()

    def by_sink() -> None:
        client.delete(PUBLISHED)
        sink = StreamSink(client, PUBLISHED)
        for batch in messages:
            if any(sink.publish_each(batch)):
                raise RuntimeError("a message was refused")

    floor = "redis-py pipeline"
    seconds = measure({"sink": by_sink, floor: by_hand}, rounds=size.rounds)
    yield compare("publish, sink", size.messages, seconds, "sink", floor, batch=BATCH)


def main() -> None:
    has_peers = "--no-peers" not in sys.argv
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--no-peers"]
    options = arguments(__doc__)
    size = Size(10_000, 4_000, 3) if options.quick else Size(50_000, 20_000, 7)
    with (
        embedded.redis(private=True) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        sink = StreamSink(client, STREAM)
        for batch in batches(size.messages):
            sink.publish(batch)
        cases = [*exactly_once(client, size), *consume(client, size), *publish(client, size)]
        if has_peers:
            cases += against_peers(client, server.url, size, make=not options.quick)
    report(cases, options)


if __name__ == "__main__":
    main()
