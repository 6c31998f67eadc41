"""Stream source and sink against hand-written redis-py, on one private server, in one run.

Consume: read, decode the JSON, call a no-op handler, ack; 100 at a time. The floor is the least
that redis-py can do for it: XREADGROUP COUNT 100, decode, one XACK. Publish: 100 messages at a
time; the floor is redis-py's pipeline of XADDs.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
import redis

from bench.harness import Seconds, arguments, compare, measure, report
from conquiet import Message, Router, Worker, embedded
from conquiet.redis import StreamSink, StreamSource

BATCH = 100
DATA = json.dumps({"order": 1234567, "customer": "customer-17", "text": "x" * 240}).encode()


class Placed(msgspec.Struct):
    """What the handler takes; the floor decodes the same class."""

    order: int
    customer: str
    text: str


def attributes(number: int) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"018f3a4e-7c1b-7000-8000-{number:012d}",
        "type": "order.placed",
        "source": "/orders",
        "subject": f"order-{number}",
        "time": "2026-01-31T12:00:00.000000Z",
        "datacontenttype": "application/json",
    }


class Consuming:
    """One stream that is read from the beginning again and again, each time by a new group."""

    def __init__(self, client: redis.Redis, count: int) -> None:
        self.client = client
        self.count = count
        self.groups = 0
        sink = StreamSink(client, "orders")
        for start in range(0, count, 1_000):
            sink.publish([Message(DATA, attributes(n)) for n in range(start, start + 1_000)])

    def new_group(self) -> str:
        self.groups += 1
        name = f"group-{self.groups}"
        self.client.xgroup_create("orders", name, "0")
        return name

    def by_hand(self, batch: int, count: int) -> None:
        group, client = self.new_group(), cast(Any, self.client)
        decode = msgspec.json.Decoder(Placed).decode
        done = 0
        while done < count:
            [(_, entries)] = client.xreadgroup(group, "c", {"orders": ">"}, count=batch)
            for _, fields in entries:
                decode(fields[b"data"])
            client.xack("orders", group, *[entry_id for entry_id, _ in entries])
            done += len(entries)

    def by_worker(self) -> None:
        router = Router()
        seen = 0

        @router.event(type="order.placed")
        def handle(placed: Placed) -> None:
            nonlocal seen
            seen += 1
            if seen == self.count:
                worker.stop()

        source = StreamSource(self.client, "orders", self.new_group())
        worker = Worker(source, router, batch_size=BATCH)
        worker.run()

    def by_router(self) -> None:
        router = Router()

        @router.event(type="order.placed")
        def handle(placed: Placed) -> None: ...

        source = StreamSource(self.client, "orders", self.new_group())
        done = 0
        while done < self.count:
            done += len(router.process(source.read(BATCH, 1.0)))
        source.close()

    def by_source(self) -> None:
        source = StreamSource(self.client, "orders", self.new_group())
        done = 0
        while done < self.count:
            messages = source.read(BATCH, 1.0)
            source.settle([message.acking.token for message in messages if message.acking], ())
            done += len(messages)
        source.close()


class Publishing:
    """The same messages, each time to a stream that is emptied first."""

    def __init__(self, client: redis.Redis, count: int) -> None:
        self.client = client
        self.batches = [
            [Message(DATA, attributes(n)) for n in range(start, start + BATCH)]
            for start in range(0, count, BATCH)
        ]

    def by_hand(self) -> None:
        self.client.delete("published")
        for batch in self.batches:
            pipeline: Any = self.client.pipeline(transaction=False)
            for message in batch:
                pipeline.xadd("published", {**message.attributes, "data": message.data})
            pipeline.execute()

    def by_sink(self) -> None:
        self.client.delete("published")
        sink = StreamSink(self.client, "published")
        for batch in self.batches:
            if any(sink.publish(batch)):
                raise RuntimeError("a message was refused")


def main() -> None:
    options = arguments(__doc__)
    count, rounds = (10_000, 3) if options.quick else (50_000, 7)
    singles = count // 10
    with embedded.redis() as server, redis.Redis.from_url(server.url) as client:
        consuming = Consuming(client, count)
        runs: dict[str, Callable[[], object]] = {
            "conquiet worker": consuming.by_worker,
            "conquiet router": consuming.by_router,
            "conquiet source": consuming.by_source,
            "redis-py by 100": lambda: consuming.by_hand(BATCH, count),
        }
        seconds = measure(runs, rounds=rounds)
        ones = measure({"redis-py by 1": lambda: consuming.by_hand(1, singles)}, rounds=rounds)
        one = ones["redis-py by 1"]  # a tenth of the messages is enough, and is counted ten times
        scaled = {**seconds, "redis-py by 1": Seconds(one.best * 10, one.median * 10)}
        publishing = Publishing(client, count)
        published = measure(
            {"conquiet sink": publishing.by_sink, "redis-py pipeline": publishing.by_hand},
            rounds=rounds,
        )
    cases = [
        compare(f"consume, {name}", count, seconds, name, "redis-py by 100", batch=BATCH)
        for name in ("conquiet worker", "conquiet router", "conquiet source")
    ]
    cases.append(
        compare("consume, worker", count, scaled, "conquiet worker", "redis-py by 1", batch=BATCH)
    )
    cases.append(
        compare("publish", count, published, "conquiet sink", "redis-py pipeline", batch=BATCH)
    )
    report(cases, options)


if __name__ == "__main__":
    main()
