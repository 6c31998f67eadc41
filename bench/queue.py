"""RedisStreamsQueue against redis-py by hand, with the same commands and the same JSON.

python bench/queue.py [--quick] [--json FILE]

Both sides send one XADD per message, and one XREADGROUP per COUNT messages with one XACK for each.
Both turn dicts into JSON and back with the same encoder, so that what differs is the queue itself:
its checks, its metrics and its way to the connection.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

from typing import Any

import msgspec
import redis

from bench.harness import Case, Seconds, arguments, compare, measure, report
from conquiet import embedded
from conquiet.queue import QueueConfig, RedisStreamsQueue

STREAM, GROUP, CONSUMER = "bench", "readers", "reader"
BLOCK_MS = 1_000
OURS, FLOOR = "RedisStreamsQueue", "redis-py by hand"

PAYLOAD: dict[str, Any] = {
    "order_id": "0192d3a4-5b6c-7d8e-9f01-23456789abcd",
    "customer": "c-001728",
    "currency": "EUR",
    "total": 129.9,
    "express": False,
    "note": None,
    "lines": [{"sku": f"sku-{n:05}", "quantity": n + 1, "price": 12.99} for n in range(3)],
}


class ByHand:
    """What a careful user of redis-py writes without a queue."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client
        self.encode = msgspec.json.Encoder().encode
        self.decode = msgspec.json.Decoder(dict[str, Any]).decode

    def enqueue(self, payload: dict[str, Any]) -> str:
        entry_id: bytes = self.client.xadd(STREAM, {"data": self.encode(payload)})
        return entry_id.decode()

    def read(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        reply = self.client.xreadgroup(GROUP, CONSUMER, {STREAM: ">"}, count=count, block=BLOCK_MS)
        entries = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))
        return [(entry_id.decode(), self.decode(fields[b"data"])) for entry_id, fields in entries]

    def ack(self, entry_id: str) -> None:
        self.client.xack(STREAM, GROUP, entry_id)


def main() -> None:
    options = arguments(__doc__)
    # Many short rounds: on a busy machine the middle one of them is steadier than a few long ones.
    messages = 500
    rounds = 25 if options.quick else 101
    with embedded.redis(private=True) as server, redis.Redis.from_url(server.url) as client:
        queue = RedisStreamsQueue(client, QueueConfig(STREAM, GROUP, CONSUMER))
        by_hand = ByHand(client)
        cases = [
            enqueue_case(client, queue, by_hand, messages, rounds),
            read_case(client, queue, by_hand, messages, rounds, count=1),
            read_case(client, queue, by_hand, messages, rounds, count=100),
        ]
    report(cases, options)


def enqueue_case(
    client: redis.Redis, queue: RedisStreamsQueue, by_hand: ByHand, messages: int, rounds: int
) -> Case:
    def ours() -> None:
        for _ in range(messages):
            queue.enqueue(PAYLOAD)

    def floor() -> None:
        for _ in range(messages):
            by_hand.enqueue(PAYLOAD)

    empty(client)
    seconds = measure({OURS: ours, FLOOR: floor}, rounds=rounds)
    return case("enqueue", messages, seconds)


def read_case(
    client: redis.Redis,
    queue: RedisStreamsQueue,
    by_hand: ByHand,
    messages: int,
    rounds: int,
    *,
    count: int,
) -> Case:
    def ours() -> None:
        for _ in range(messages // count):
            for message in queue.read(BLOCK_MS, count):
                queue.ack(message)

    def floor() -> None:
        for _ in range(messages // count):
            for entry_id, _payload in by_hand.read(count):
                by_hand.ack(entry_id)

    fill(client, by_hand.encode(PAYLOAD), 2 * (rounds + 1) * messages)
    seconds = measure({OURS: ours, FLOOR: floor}, rounds=rounds)
    return case(f"read + ack, COUNT {count}", messages, seconds, count=count)


def case(name: str, messages: int, seconds: dict[str, Seconds], **settings: int) -> Case:
    size = len(msgspec.json.encode(PAYLOAD))
    return compare(name, messages, seconds, OURS, FLOOR, messages=messages, bytes=size, **settings)


def empty(client: redis.Redis) -> None:
    client.delete(STREAM)
    client.xgroup_create(STREAM, GROUP, "0-0", mkstream=True)


def fill(client: redis.Redis, data: bytes, messages: int) -> None:
    empty(client)
    with client.pipeline(transaction=False) as pipe:
        for _ in range(messages):
            pipe.xadd(STREAM, {"data": data})
        pipe.execute()


if __name__ == "__main__":
    main()
