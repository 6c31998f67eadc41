"""GroupStream: the commands of one consumer of a group on one stream. Redis 6.0 is enough.

conquiet:leases:{orders}    hash: group and consumer → how long its entries may be idle, in ms
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import redis

from conquiet.redis.ids import FIRST, LAST, MIN
from conquiet.redis.topic import beside
from conquiet.redis.wire import Argument, Wire, entries_by_stream, pairs

logger = logging.getLogger("conquiet.redis")

Start = Literal["beginning", "now"]
StreamEntry: TypeAlias = tuple[bytes, list[bytes]]
"""The id and the fields of an entry."""

# KEYS: the stream, the leases beside it. ARGV: the group, the consumer, its field in the leases.
# XGROUP DELCONSUMER drops pending entries silently, so it is in one script with the check.
_REMOVE_CONSUMER = b"""
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[3])
return 1
"""


class Pending(NamedTuple):
    """A line of XPENDING."""

    id: bytes
    consumer: bytes
    idle_ms: int
    deliveries: int


class GroupStream:
    """Sends commands for a stream, a group and a consumer; keeps no entries (see `Consumer`).

    With `deletes`, for outboxes, acked entries are also deleted from the stream.
    """

    def __init__(
        self,
        wire: Wire,
        name: str,
        topic: str,
        group: str,
        consumer: str,
        *,
        deletes: bool = False,
    ) -> None:
        self.name = name
        self.topic = topic
        self.key = name.encode()
        self.group = group.encode()
        self.consumer = consumer.encode()
        self.deletes = deletes
        self.client = wire.client
        self._wire = wire
        self._origin = MIN
        self._leases_key = beside(name, "conquiet:leases:").encode()

    def call(self, name: bytes, *arguments: Argument, wait: float = 0.0) -> Any:
        """Send one command to the node of the stream; `wait` is how long it may block there."""
        return self._wire.call(self.key, name, *arguments, wait=wait)

    # --- the group --------------------------------------------------------------------------

    def create(self, start: Start) -> bool:
        """Create the group, and the stream if it is missing; False if the group existed."""
        origin = self._last_id() if start == "now" else MIN
        if not self._create(origin):
            return False
        self._origin = origin  # an id, not `$`: a repair must not skip entries added meanwhile
        return True

    def repair(self) -> bool:
        """Create the group again at its original start; the inbox recognises duplicates."""
        return self._create(self._origin)

    def _create(self, origin: bytes) -> bool:
        try:
            self.call(b"XGROUP", b"CREATE", self.key, self.group, origin, b"MKSTREAM")
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
            return False
        return True

    def _last_id(self) -> bytes:
        last = self.call(b"XREVRANGE", self.key, LAST, FIRST, b"COUNT", 1)
        return last[0][0] if last else MIN

    def remove_consumer(self) -> bool:
        """Remove the consumer's name and lease unless entries are pending; whether it did."""
        removed = self.call(
            *(b"EVAL", _REMOVE_CONSUMER, 2, self.key, self._leases_key),
            *(self.group, self.consumer, self.lease_field(self.consumer)),
        )
        return bool(removed)

    # --- leases of consumers ----------------------------------------------------------------

    def store_lease(self, milliseconds: int) -> None:
        """Store how long our entries may be idle before other consumers may claim them."""
        try:
            self.call(b"HSET", self._leases_key, self.lease_field(self.consumer), milliseconds)
        except redis.ResponseError as error:  # an ACL without this key
            logger.warning(
                "could not store our lease (%s); other consumers will apply theirs to our entries",
                error,
            )

    def leases(self) -> dict[bytes, int]:
        """Return the stored lease of each consumer of the group, in milliseconds."""
        stored = pairs(self.call(b"HGETALL", self._leases_key))
        prefix = self.lease_field(b"")
        return {
            field[len(prefix) :]: int(value)
            for field, value in stored.items()
            if field.startswith(prefix)
        }

    def lease_field(self, consumer: bytes) -> bytes:
        """Return the field of a consumer in the hash of leases."""
        return b"%d:%s:%s" % (len(self.group), self.group, consumer)

    # --- entries ----------------------------------------------------------------------------

    def read_own(self, start: bytes, count: int) -> list[tuple[bytes, list[bytes] | None]]:
        """Read the consumer's own pending entries after `start`; deleted ones have no fields."""
        reply = self.call(
            *(b"XREADGROUP", b"GROUP", self.group, self.consumer, b"COUNT", count),
            *(b"STREAMS", self.key, start),
        )
        return entries_by_stream(reply).get(self.key, [])

    def list_pending(
        self, start: bytes, end: bytes, count: int, consumer: bytes | None = None
    ) -> list[Pending]:
        """List pending entries of the group, or of one consumer, by range of ids."""
        of = () if consumer is None else (consumer,)
        rows = self.call(b"XPENDING", self.key, self.group, start, end, count, *of)
        return [Pending(*row) for row in rows]

    def claim(
        self, min_idle_ms: int, ids: Sequence[bytes], deliveries: int | None = None
    ) -> list[StreamEntry]:
        """Claim idle entries, as their next delivery or with the given delivery count."""
        count = () if deliveries is None else (b"RETRYCOUNT", deliveries)
        who = (self.key, self.group, self.consumer)
        reply = self.call(b"XCLAIM", *who, min_idle_ms, *ids, *count)
        # Before Redis 7, an entry that was deleted meanwhile comes back as nil.
        return [(entry[0], entry[1]) for entry in reply if entry and entry[1]]

    def touch(self, ids: Sequence[bytes], *options: Argument) -> None:
        """Restart the idle time of own entries, or set it (IDLE) and the count (RETRYCOUNT)."""
        who = (self.key, self.group, self.consumer)
        self.call(b"XCLAIM", *who, 0, *ids, *options, b"JUSTID")

    def ack_deleted(self, ids: Iterable[bytes]) -> int:
        """Ack those of the entries that were deleted from the stream; return how many.

        In an outbox none counts: deletion is part of the ack there.
        """
        deleted = [i for i in ids if not self.call(b"XRANGE", self.key, i, i)]
        if not deleted:
            return 0
        self.call(b"XACK", self.key, self.group, *deleted)
        if self.deletes:
            return 0
        logger.warning(
            "%d entries of stream %r were deleted while they were pending in group %r: %s",
            *(len(deleted), self.name, self.group.decode()),
            b", ".join(deleted[:20]).decode(),
        )
        return len(deleted)

    def ack(self, ids: Sequence[bytes]) -> None:
        """Ack; in an outbox delete in the same MULTI, so that an acked entry is always gone."""
        ack = (b"XACK", self.key, self.group, *ids)
        if self.deletes:
            self._wire.atomically(self.key, [ack, (b"XDEL", self.key, *ids)])
        else:
            self.call(*ack)


def remove_idle_consumers(
    client: Any, stream: str, group: str, *, idle: float = 86_400.0
) -> list[str]:
    """Remove consumers that were idle for `idle` seconds and hold nothing; return their names."""
    wire = client if isinstance(client, Wire) else Wire(client)
    rows = wire.call(stream.encode(), b"XINFO", b"CONSUMERS", stream, group)
    removed: list[str] = []
    for row in map(pairs, rows):
        name = row[b"name"].decode()
        is_idle = row[b"idle"] >= idle * 1000 and not row[b"pending"]
        if is_idle and GroupStream(wire, stream, stream, group, name).remove_consumer():
            removed.append(name)
    return removed
