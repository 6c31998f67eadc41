"""GroupStream: one stream as one consumer of a group sees it. Commands of Redis 6.0 only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import redis

from conquiet.redis.delivery import Delivery
from conquiet.redis.ids import FIRST, LAST, parse
from conquiet.redis.topic import beside
from conquiet.redis.wire import Argument, Wire

logger = logging.getLogger("conquiet.redis")

Start = Literal["beginning", "now"]
Entry: TypeAlias = tuple[bytes, list[bytes]]

_SPARE = 1_000
"""How many pending entries may lie between those we ask about."""


class Pending(NamedTuple):
    """A line of XPENDING."""

    id: bytes
    consumer: bytes
    idle_ms: int
    deliveries: int


class GroupStream:
    """A stream, a group and a consumer; `held` is what the consumer has in hand."""

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
        self.held: dict[bytes, Delivery] = {}
        self.own_from: bytes | None = None
        """From where our own pending entries are still to be read; None when they have been."""
        self.scan_from = FIRST
        self.deletes = deletes
        """Whether acked entries are deleted, so that a missing one is no surprise."""
        self.client = wire.client
        self._wire = wire
        self._origin = b"0-0"
        self._leases = beside(name, "conquiet:leases:").encode()

    def call(self, name: bytes, *arguments: Argument, wait: float = 0.0) -> Any:
        return self._wire.call(self.key, name, *arguments, wait=wait)

    # --- the group --------------------------------------------------------------------------

    def create(self, start: Start) -> bool:
        """Create the group, and the stream if need be; False if it was there."""
        origin = self._last_id() if start == "now" else b"0-0"
        if not self._create(origin):
            return False
        self._origin = origin  # an id, not `$`: a repair later must not skip what came meanwhile
        return True

    def repair(self) -> bool:
        """Create the group again where it once began; what took effect is for the inbox to know."""
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
        return last[0][0] if last else b"0-0"

    def tell_lease(self, milliseconds: int) -> None:
        """Let the others know how long our entries may be idle before they are stale."""
        try:
            self.call(b"HSET", self._leases, self.lease_field(self.consumer), milliseconds)
        except redis.ResponseError as error:  # an ACL that knows nothing of this key
            logger.warning("others take their own lease for ours: %s", error)

    def leases(self) -> dict[bytes, int]:
        """How long the entries of each consumer may be idle, in milliseconds."""
        told = pairs(self.call(b"HGETALL", self._leases))
        prefix = self.lease_field(b"")
        return {
            field[len(prefix) :]: int(value)
            for field, value in told.items()
            if field.startswith(prefix)
        }

    def lease_field(self, consumer: bytes) -> bytes:
        return b"%d:%s:%s" % (len(self.group), self.group, consumer)

    # --- entries ----------------------------------------------------------------------------

    def read_own(self, start: bytes, count: int) -> list[tuple[bytes, list[bytes] | None]]:
        """Our own pending entries after `start`; deleted ones have no fields."""
        reply = self.call(
            *(b"XREADGROUP", b"GROUP", self.group, self.consumer, b"COUNT", count),
            *(b"STREAMS", self.key, start),
        )
        return entries_by_stream(reply).get(self.key, [])

    def pending(
        self, start: bytes, end: bytes, count: int, consumer: bytes | None = None
    ) -> list[Pending]:
        of = () if consumer is None else (consumer,)
        rows = self.call(b"XPENDING", self.key, self.group, start, end, count, *of)
        return [Pending(*row) for row in rows]

    def still_ours(self, ids: Iterable[bytes]) -> dict[bytes, Pending]:
        """Those of the ids that no other consumer has claimed and nobody has acked."""
        wanted = sorted(ids, key=parse)
        if not wanted:
            return {}
        count = len(self.held) + len(wanted) + _SPARE
        rows = self.pending(wanted[0], wanted[-1], count, self.consumer)
        found = {row.id: row for row in rows}
        return {entry_id: found[entry_id] for entry_id in wanted if entry_id in found}

    def claim(
        self, min_idle_ms: int, ids: Sequence[bytes], deliveries: int | None = None
    ) -> list[Entry]:
        """Take entries over from whoever let them lie, as the next delivery or as that one."""
        count = () if deliveries is None else (b"RETRYCOUNT", deliveries)
        who = (self.key, self.group, self.consumer)
        reply = self.call(b"XCLAIM", *who, min_idle_ms, *ids, *count)
        # Before Redis 7, an entry that was deleted meanwhile comes back as nil.
        return [(entry[0], entry[1]) for entry in reply if entry and entry[1]]

    def touch(self, ids: Sequence[bytes], *options: Argument) -> None:
        """Set the idle time (anew, or to IDLE) and RETRYCOUNT of entries that are ours."""
        who = (self.key, self.group, self.consumer)
        self.call(b"XCLAIM", *who, 0, *ids, *options, b"JUSTID")

    def ack_deleted(self, ids: Iterable[bytes]) -> int:
        """Of these, ack the entries that are not in the stream any more; how many there were."""
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

    def settle(self, ids: Sequence[bytes]) -> None:
        """Ack; in an outbox also delete, so that the entry is gone if and only if it is acked."""
        ack = (b"XACK", self.key, self.group, *ids)
        if self.deletes:
            self._wire.atomically(self.key, [ack, (b"XDEL", self.key, *ids)])
        else:
            self.call(*ack)


def entries_by_stream(reply: Any) -> dict[bytes, list[Any]]:
    """RESP2 answers with pairs of stream and entries, RESP3 with a map, both with nil for none."""
    if not reply:
        return {}
    return reply if isinstance(reply, dict) else dict(reply)


def pairs(reply: Any) -> Mapping[bytes, Any]:
    """A map, which RESP2 writes as a list."""
    if isinstance(reply, dict):
        return reply
    items = iter(reply or ())
    return dict(zip(items, items, strict=True))
