"""GroupStream: the commands of one consumer of a group on one stream. Redis 6.0 is enough.

conquiet:leases:{orders}    hash: group and consumer → how long its entries may be idle, in ms
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import redis

from conquiet.redis.entry import Decode, from_fields
from conquiet.redis.ids import FIRST, LAST, MIN
from conquiet.redis.topic import beside
from conquiet.redis.wire import Argument, Command, Wire, entries_by_stream, may_pass, pairs

logger = logging.getLogger("conquiet.redis")

Start = Literal["beginning", "now"]
StreamEntry: TypeAlias = tuple[bytes, list[bytes]]
"""The id and the fields of an entry."""

IDLE_SECONDS = 86_400.0
"""How long a consumer without entries is idle until its name may be removed."""
_AT_ONCE = 100
"""Consumers that one script removes, so that other clients get their turn."""
ATTEMPTS, ERROR, TRACEBACK = b":attempts", b":error", b":traceback"
STREAM, ENTRY, TURN = b":stream", b":entry", b":turn"
ERRORS = b":errors"
"""The fields of an entry that has waited for a later try (`delay`)."""
_BEHIND_ALL = b"18446744073709551615-0"

# KEYS: the stream, the leases beside it. ARGV: the group, then the name and the field in the leases
# of each consumer. Returns the names that were removed. XGROUP DELCONSUMER drops pending entries
# silently, so it is in one script with the check.
_REMOVE_CONSUMERS = b"""
local removed = {}
for i = 2, #ARGV, 2 do
    if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[i]) == 0 then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[i])
        redis.call('HDEL', KEYS[2], ARGV[i + 1])
        removed[#removed + 1] = ARGV[i]
    end
end
return removed
"""

# KEYS: the stream. ARGV: the group, 'new' if it was created just now, and the id of an entry that
# was read. Returns how many entries were trimmed before the group read them; -1 before Redis 7,
# which does not count what was added.
#
# The oldest entries are trimmed first: while one that was read is there, no unread one is gone.
#
# `entries-read` is the number of the entry that the group read last, counted from the first that
# was ever added. If that entry is gone, all that are gone and have a higher number were not read.
# Redis corrects the number when the group reads on; here too, so that a loss is counted once. A new
# group has no number: it gets one, since what was trimmed before is no loss to it.
_COUNT_TRIMMED = b"""
local function named(row)
    local fields = {}
    for i = 1, #row, 2 do fields[row[i]] = row[i + 1] end
    return fields
end
local function parts(id)
    local ms, seq = string.match(id, '^(%d+)-(%d+)$')
    return string.format('%20s', ms) .. string.format('%20s', seq)
end
if #redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3]) > 0 then return 0 end
local stream = named(redis.call('XINFO', 'STREAM', KEYS[1]))
local added = stream['entries-added']
if not added then return -1 end
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local group = named(row)
    if group['name'] == ARGV[1] then
        local last, first = group['last-delivered-id'], stream['first-entry']
        local gone, read = added - stream['length'], group['entries-read']
        if last == stream['last-generated-id'] then
            gone = added
        elseif first and parts(last) >= parts(first[1]) then
            return 0
        end
        if ARGV[2] == 'new' then
            read = gone
        elseif not read or gone <= read then
            return 0
        end
        redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], last, 'ENTRIESREAD', gone)
        return gone - read
    end
end
return 0
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
        decode: Decode = from_fields,
        origin: str = "",
    ) -> None:
        self.name = name
        self.origin = origin or name
        """The stream that its entries came from, before they waited for a later try."""
        self.topic = topic
        self.key = name.encode()
        self.group = group.encode()
        self.consumer = consumer.encode()
        self.deletes = deletes
        self.decode = decode
        """From the fields of an entry to data, attributes and topic."""
        self.client = wire.given
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
        if not self.deletes:
            [reply] = self._wire.send([(self.key, self.count_trimmed(is_new=True))])
            self.trimmed(reply)
        return True

    def _last_id(self) -> bytes:
        last = self.call(b"XREVRANGE", self.key, LAST, FIRST, b"COUNT", 1)
        return last[0][0] if last else MIN

    # --- consumers --------------------------------------------------------------------------

    def idle_consumers(self, idle: float) -> list[bytes]:
        """Return the names of consumers that were idle for `idle` seconds and hold nothing."""
        rows = map(pairs, self.call(b"XINFO", b"CONSUMERS", self.key, self.group))
        return [row[b"name"] for row in rows if row[b"idle"] >= idle * 1000 and not row[b"pending"]]

    def remove_consumers(self, names: Sequence[bytes]) -> list[bytes]:
        """Remove names and leases of consumers that hold nothing; return those that were removed.

        A removed consumer that reads again gets its name back.
        """
        removed: list[bytes] = []
        for at in range(0, len(names), _AT_ONCE):
            some = [(name, self.lease_field(name)) for name in names[at : at + _AT_ONCE]]
            removed += self.call(
                *(b"EVAL", _REMOVE_CONSUMERS, 2, self.key, self._leases_key, self.group),
                *(argument for pair in some for argument in pair),
            )
        return removed

    def show_alive(self, lease_ms: int) -> None:
        """Restart the idle time of our name, and store our lease again if both were removed.

        Before Redis 7.2 a read that finds nothing does not restart it; a read of own entries does.
        """
        self.read_own(_BEHIND_ALL, 1)
        self.store_lease(lease_ms)

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

    def touch(self, ids: Sequence[bytes], *options: Argument) -> list[bytes]:
        """Restart the idle time of own entries, or set it (IDLE) and the count (RETRYCOUNT).

        Return those that are not pending any more: Redis 7 drops entries that were deleted.
        """
        who = (self.key, self.group, self.consumer)
        touched = set(self.call(b"XCLAIM", *who, 0, *ids, *options, b"JUSTID"))
        return [entry_id for entry_id in ids if entry_id not in touched]

    def ack_deleted(self, ids: Iterable[bytes]) -> list[bytes]:
        """Ack those of the entries that were deleted from the stream, and return them."""
        deleted = [i for i in ids if not self.call(b"XRANGE", self.key, i, i)]
        if deleted:
            self.call(b"XACK", self.key, self.group, *deleted)
        return deleted

    def count_trimmed(self, last_read: bytes = MIN, *, is_new: bool = False) -> Command:
        """Return the command that counts entries trimmed before the group read them, each once.

        What was trimmed before a new group is no loss to it. `last_read` makes it cheap: while that
        entry is there, none was.
        """
        state = b"new" if is_new else b"known"
        return (b"EVAL", _COUNT_TRIMMED, 1, self.key, self.group, state, last_read)

    def trimmed(self, reply: Any) -> int | None:
        """Return the count in the reply to `count_trimmed`.

        None if the server cannot count: before Redis 7, or if it refuses the commands.
        """
        if isinstance(reply, redis.ResponseError):
            if may_pass(reply) or "no such key" in str(reply):
                return 0
            logger.info(
                "entries of stream %r that are trimmed unread will not be counted: %s",
                *(self.name, reply),
            )
            return None
        if isinstance(reply, Exception):
            raise reply
        return int(reply) if reply >= 0 else None

    def ack(self, ids: Sequence[bytes]) -> None:
        """Ack; in an outbox delete in the same MULTI, so that an acked entry is always gone."""
        ack = (b"XACK", self.key, self.group, *ids)
        if self.deletes:
            self._wire.atomically(self.key, [ack, (b"XDEL", self.key, *ids)])
        else:
            self.call(*ack)


def remove_idle_consumers(
    client: Any, stream: str, group: str, *, idle: float = IDLE_SECONDS
) -> list[str]:
    """Remove consumers that were idle for `idle` seconds and hold nothing; return their names.

    `client` is a Redis, `stream` and `group` name the group.
    """
    wire = client if isinstance(client, Wire) else Wire(client)
    place = GroupStream(wire, stream, stream, group, "")
    removed = place.remove_consumers(place.idle_consumers(idle))
    return [name.decode(errors="backslashreplace") for name in removed]
