"""Consumers that are gone: their names stay in the group until somebody removes them (R7)."""

from __future__ import annotations

from typing import Any

from conquiet.redis.group import GroupStream, pairs
from conquiet.redis.topic import beside
from conquiet.redis.wire import Wire

# KEYS: the stream, the leases beside it. ARGV: the group, the consumer, its field in the leases.
# XGROUP DELCONSUMER drops pending entries without a word, so both stand in one script.
_REMOVE = b"""
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[3])
return 1
"""


def remove_consumer(client: Any, stream: str, group: str, consumer: str) -> bool:
    """Remove a consumer's name, if nothing is pending under it; says whether it did."""
    wire = client if isinstance(client, Wire) else Wire(client)
    place = GroupStream(wire, stream, stream, group, consumer)
    keys = (place.key, beside(stream, "conquiet:leases:"))
    removed = place.call(
        *(b"EVAL", _REMOVE, 2, *keys),
        *(place.group, place.consumer, place.lease_field(place.consumer)),
    )
    return bool(removed)


def remove_idle_consumers(
    client: Any, stream: str, group: str, *, idle: float = 86_400.0
) -> list[str]:
    """Remove the names that were not heard of for `idle` seconds and hold nothing; which."""
    wire = client if isinstance(client, Wire) else Wire(client)
    rows = wire.call(stream.encode(), b"XINFO", b"CONSUMERS", stream, group)
    removed: list[str] = []
    for row in map(pairs, rows):
        name = row[b"name"].decode()
        is_idle = row[b"idle"] >= idle * 1000 and not row[b"pending"]
        if is_idle and remove_consumer(wire, stream, group, name):
            removed.append(name)
    return removed
