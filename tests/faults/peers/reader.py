"""What the stores say, read by raw drivers: a command is found by its id, whatever is around it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import redis

_COMMAND = re.compile(rb"cmd-\d{5}")


@dataclass(frozen=True)
class Stores:
    """Of one moment."""

    sold: frozenset[str]
    effects: Counter[str]
    events: Counter[str]
    held: frozenset[str]
    """Waiting, or handed out and not confirmed: what a consumer could still be given."""


def read(database: str, redis_url: str, held: str, events: str) -> Stores:
    with psycopg.connect(database) as found, redis.Redis.from_url(redis_url) as client:
        waiting = {name for (text,) in found.execute(held) for name in _names(text.encode())}
        emitted = Counter(
            name for (text,) in found.execute(events) for name in _names(text.encode())
        )
        for key in client.scan_iter(count=1_000):
            if key.endswith(b"events"):
                emitted.update(name for entry in _all(client, key) for name in _names(entry))
            else:
                waiting.update(
                    name for entry in _unconfirmed(client, key) for name in _names(entry)
                )
        effects = found.execute("SELECT command FROM effects WHERE command LIKE 'cmd-%'")
        sold = found.execute("SELECT command FROM sales")
        return Stores(
            frozenset(name for (name,) in sold),
            Counter(name for (name,) in effects),
            emitted,
            frozenset(waiting),
        )


def _names(entry: bytes) -> set[str]:
    return {name.decode() for name in _COMMAND.findall(entry)}


def _all(client: redis.Redis, key: bytes) -> Iterator[bytes]:
    kind = client.type(key)
    if kind == b"list":
        yield from client.lrange(key, 0, -1)
    elif kind == b"hash":
        yield from client.hvals(key)
    elif kind == b"stream":
        for _, fields in client.xrange(key):
            yield b" ".join(fields.values())


def _unconfirmed(client: redis.Redis, key: bytes) -> Iterator[bytes]:
    """Of a stream with groups, what is pending or was not read; of anything else, all."""
    if client.type(key) != b"stream" or not (groups := client.xinfo_groups(key)):
        yield from _all(client, key)
        return
    for group in groups:
        pending = client.xpending_range(key, group["name"], "-", "+", 100_000)
        ids = {entry["message_id"] for entry in pending}
        last = _order(group["last-delivered-id"])
        for id, fields in client.xrange(key):
            if id in ids or _order(id) > last:
                yield b" ".join(fields.values())


def _order(id: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in id.split(b"-"))
