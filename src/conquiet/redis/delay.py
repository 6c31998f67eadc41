"""Delays: failed entries wait beside their stream until they are due, then their group reads them.

    held ──TryLater──▶ waiting ──due by the clock of Redis──▶ again ──▶ held
           └ one script: out of the pending list and in here, or neither

conquiet:later:{orders}:billing       stream: what waits, with attempts and the last error
conquiet:due:{orders}:billing         sorted set: its entry ids by the time at which they are due
conquiet:again:{orders}:billing       stream: what is due, read by the group as the stream itself
conquiet:turns:{orders}:billing       sorted set, by name: in an ordered worker, who waits for whom

An entry has the fields of the original one, and `:attempts`, `:error`, `:traceback`, `:errors` of
all attempts, and `:stream` and `:entry`, the place it came from.

In an ordered worker each entry that waits has a turn, and `:turn` names it: the hash of its key,
and its place in the stream. The first turn of a key is due at its time, or in `again`; the others
of the key are due when they become the first. So entries of the key that are read meanwhile are
moved here, to wait for their turn. A turn ends with the ack of its entry, in one script.
"""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from conquiet.attempts import append
from conquiet.errors import TryLater
from conquiet.message import Message
from conquiet.redis.consumer import Delivery
from conquiet.redis.group import (
    ATTEMPTS,
    ENTRY,
    ERROR,
    ERRORS,
    STREAM,
    TRACEBACK,
    TURN,
    GroupStream,
)
from conquiet.redis.ids import parse
from conquiet.redis.topic import beside
from conquiet.redis.wire import Wire

KeyOf: TypeAlias = Callable[[Message[Any]], str]

_MAX_ERROR_CHARS = 1_000
_MAX_TRACEBACK_CHARS = 4_000
_AT_ONCE = 100
"""How many entries one script makes due, so that other clients get their turn."""
_LOOK_SECONDS = 1.0
"""How often at least a consumer looks for entries that are due; others may have added some."""

# The functions of the scripts below. `first` returns the name of a key's first turn, and the entry
# that waits for it. `finish` ends a turn, and makes the next one due unless it waits for its time.
_TURNS = b"""
local function named(fields, name)
    for i = 1, #fields, 2 do if fields[i] == name then return fields[i + 1] end end
end
local function first(turns, turn)
    local key = string.sub(turn, 1, 40)
    local min, max = '[' .. key .. ':', '(' .. key .. ';'
    local found = redis.call('ZRANGEBYLEX', turns, min, max, 'LIMIT', 0, 1)
    if not found[1] then return nil end
    return string.sub(found[1], 1, 81), string.sub(found[1], 83)
end
local function drop(turns, turn)
    local old = redis.call('ZRANGEBYLEX', turns, '[' .. turn .. ':', '(' .. turn .. ';')
    for _, member in ipairs(old) do redis.call('ZREM', turns, member) end
end
local function promote(later, again, id)
    local found = redis.call('XRANGE', later, id, id)
    if #found > 0 then
        redis.call('XADD', again, '*', unpack(found[1][2]))
        redis.call('XDEL', later, id)
    end
end
local function finish(later, due, again, turns, turn)
    drop(turns, turn)
    local next, id = first(turns, turn)
    if next and not redis.call('ZSCORE', due, id) then promote(later, again, id) end
end
"""

# KEYS: the stream, what waits, when it is due, the turns. ARGV: group, consumer, entry id, '1' if
# acked entries of the stream are deleted, its turn or '', milliseconds or '' to wait for its turn
# only, the errors of its attempts up to the time of the last one and behind it, then the fields.
# Returns 1 if it waits, 0 if the entry is not ours, -1 if it is its turn.
_DEFER = (
    _TURNS
    + b"""
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) == 0 then return 0 end
for i = 3, 4 do redis.call('ZCARD', KEYS[i]) end  -- fails before anything is written, not after
local turn = ARGV[5]
if ARGV[6] == '' then
    local head = first(KEYS[4], turn)
    if not head or head >= turn then return -1 end
end
local fields = {unpack(ARGV, 9)}
if ARGV[8] ~= '' then
    local t = redis.call('TIME')
    fields[#fields + 1] = ':errors'
    fields[#fields + 1] = ARGV[7] .. t[1] .. '.' .. string.format('%06d', t[2]) .. ARGV[8]
end
local id = redis.call('XADD', KEYS[2], '*', unpack(fields))
if turn ~= '' then
    drop(KEYS[4], turn)
    redis.call('ZADD', KEYS[4], 0, turn .. ':' .. id)
end
if ARGV[6] ~= '' then
    local t = redis.call('TIME')
    redis.call('ZADD', KEYS[3], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[6], id)
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
if ARGV[4] == '1' then redis.call('XDEL', KEYS[1], ARGV[3]) end
return 1
"""
)

# KEYS: what waits, when it is due, the stream that the group reads, the turns. ARGV: how many at
# most. Returns how many became due, and the milliseconds until the next one, or -1.
_PROMOTE = (
    _TURNS
    + b"""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, id in ipairs(ids) do
    local found = redis.call('XRANGE', KEYS[1], id, id)
    local turn = found[1] and named(found[1][2], ':turn')
    if not turn or first(KEYS[4], turn) == turn then promote(KEYS[1], KEYS[3], id) end
    redis.call('ZREM', KEYS[2], id)
end
local next = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if not next[2] then return {#ids, -1} end
return {#ids, math.max(0, math.ceil(next[2] - now))}
"""
)

# KEYS: what waits, when it is due, the stream that the group reads, the turns. ARGV: group, ids.
_ACK = (
    _TURNS
    + b"""
for i = 2, #ARGV do
    local found = redis.call('XRANGE', KEYS[3], ARGV[i], ARGV[i])
    redis.call('XACK', KEYS[3], ARGV[1], ARGV[i])
    redis.call('XDEL', KEYS[3], ARGV[i])
    local turn = found[1] and named(found[1][2], ':turn')
    if turn then finish(KEYS[1], KEYS[2], KEYS[3], KEYS[4], turn) end
end
"""
)

# KEYS: the turns. ARGV: turns. Returns the places in ARGV of those that wait for an earlier one.
_FIND_WAITING = (
    _TURNS
    + b"""
local waiting = {}
if redis.call('EXISTS', KEYS[1]) == 0 then return waiting end
for i, turn in ipairs(ARGV) do
    local head = first(KEYS[1], turn)
    if head and head < turn then waiting[#waiting + 1] = i end
end
return waiting
"""
)

# KEYS: what waits, when it is due, the stream that the group reads, the turns, the dead letters.
# ARGV: the id, then the fields of its letter. Returns 0 if it does not wait.
_BURY = (
    _TURNS
    + b"""
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if not found[1] then return 0 end
redis.call('XADD', KEYS[5], '*', unpack(ARGV, 2))
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local turn = named(found[1][2], ':turn')
if turn then finish(KEYS[1], KEYS[2], KEYS[3], KEYS[4], turn) end
return 1
"""
)


class DelayKeys(NamedTuple):
    """The keys of what waits for a group of a stream."""

    later: str
    due: str
    again: str
    turns: str

    @classmethod
    def of(cls, stream: str, group: str) -> DelayKeys:
        return cls(*(f"{beside(stream, f'conquiet:{name}:')}:{group}" for name in cls._fields))

    def bury(self, dead_letters: str, id: bytes, letter: Sequence[Any]) -> tuple[Any, ...]:
        """Return the command that makes a dead letter of an entry that waits."""
        return (b"EVAL", _BURY, 5, *self, dead_letters, id, *letter)


class AgainStream(GroupStream):
    """The stream of a group's entries that have waited; an ack makes the next of its key due."""

    def __init__(self, wire: Wire, home: GroupStream) -> None:
        self.keys = DelayKeys.of(home.name, home.group.decode())
        super().__init__(
            *(wire, self.keys.again, home.topic, home.group.decode(), home.consumer.decode()),
            deletes=True,
            decode=home.decode,
            origin=home.name,
        )

    def ack(self, ids: Sequence[bytes]) -> None:
        self.call(b"EVAL", _ACK, 4, *self.keys, self.group, *ids)


class Delays:
    """Lets entries of a group's streams wait, and makes those due whose time has come."""

    def __init__(self, wire: Wire, streams: Sequence[GroupStream], key: KeyOf | None) -> None:
        """Take the key by which entries keep their order; None if they need not."""
        self.streams = [AgainStream(wire, stream) for stream in streams]
        """The streams with the entries that are due."""
        self._keys: dict[GroupStream, DelayKeys] = {}
        for home, again in zip(streams, self.streams, strict=True):
            self._keys[home] = self._keys[again] = again.keys
        self._key = key
        self.next_look = 0.0
        """When to look for due entries, by the monotonic clock."""

    def defer(self, delivery: Delivery, attempts: int, error: TryLater) -> bool:
        """Move an entry out of the pending list; return False if it is no longer ours."""
        milliseconds = math.ceil(error.seconds * 1000)
        fields = [*_own_fields(delivery), *_error_fields(delivery, attempts, error)]
        errors = append(delivery.errors, attempts, error)
        moved = self._move(delivery, self._turn_of(delivery), milliseconds, errors, fields)
        self.next_look = min(self.next_look, time.monotonic() + error.seconds)
        return moved > 0

    def _move(
        self,
        delivery: Delivery,
        turn: bytes,
        milliseconds: int | bytes,
        errors: tuple[str, str],
        fields: Sequence[Any],
    ) -> int:
        stream, keys = delivery.stream, self._keys[delivery.stream]
        about = (TURN, turn) if turn else ()
        return int(
            stream.call(
                *(b"EVAL", _DEFER, 4, stream.key, keys.later, keys.due, keys.turns),
                *(stream.group, stream.consumer, delivery.id, int(stream.deletes)),
                *(turn, milliseconds, *errors, *fields, *about),
            )
        )

    def hold_back(self, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Move entries out of the pending list that must wait for an earlier one of their key.

        Return those that the consumer holds no longer. An entry that is due has its turn already.
        """
        if self._key is None:
            return set()
        turns: dict[GroupStream, dict[Delivery, bytes]] = {}
        for delivery in deliveries:
            if delivery.stream not in self.streams and (turn := self._turn_of(delivery)):
                turns.setdefault(delivery.stream, {})[delivery] = turn
        gone: set[Delivery] = set()
        for stream, found in turns.items():
            waiting = stream.call(
                b"EVAL", _FIND_WAITING, 1, self._keys[stream].turns, *found.values()
            )
            ordered = list(found.items())
            for place in waiting:
                delivery, turn = ordered[place - 1]
                attempts = delivery.attempts_before + delivery.deliveries - 1
                fields = [*_own_fields(delivery), *_place_fields(delivery, attempts)]
                if self._move(delivery, turn, b"", ("", ""), fields) >= 0:
                    gone.add(delivery)
        return gone

    def _turn_of(self, delivery: Delivery) -> bytes:
        """Return the name of an entry's turn; empty if it need not keep an order.

        An entry that had one keeps it, also without order: others may wait for it.
        """
        if delivery.turn is not None:
            return delivery.turn
        if self._key is None:
            return b""
        try:
            data, attributes, _ = delivery.stream.decode(delivery.fields)
            key = self._key(Message(data, attributes))
        except Exception:  # noqa: BLE001 - the router refuses such a message, with the reason
            return b""
        if not key:
            return b""
        hashed = hashlib.sha1(key.encode(errors="replace"), usedforsecurity=False).hexdigest()
        milliseconds, number = parse(delivery.origin[1].encode())
        return f"{hashed}:{milliseconds:020d}{number:020d}".encode()

    def promote(self) -> None:
        """Make entries due; one that several consumers find is made due once."""
        wait = _LOOK_SECONDS
        for stream in self.streams:
            count, left = stream.call(b"EVAL", _PROMOTE, 4, *stream.keys, _AT_ONCE)
            if count == _AT_ONCE:
                wait = 0.0
            elif left >= 0:
                wait = min(wait, left / 1000)
        self.next_look = time.monotonic() + wait


_OURS = (ATTEMPTS, ERROR, TRACEBACK, STREAM, ENTRY, TURN, ERRORS)


def _own_fields(delivery: Delivery) -> list[Any]:
    """Return the fields of the original entry."""
    pairs = zip(delivery.fields[::2], delivery.fields[1::2], strict=False)
    return [part for pair in pairs if pair[0] not in _OURS for part in pair]


def _place_fields(delivery: Delivery, attempts: int) -> list[Any]:
    stream, entry = delivery.origin
    return [ATTEMPTS, attempts, STREAM, stream.encode(errors="replace"), ENTRY, entry]


def _error_fields(delivery: Delivery, attempts: int, error: TryLater) -> list[Any]:
    lines = "".join(traceback.format_exception(error.cause))[-_MAX_TRACEBACK_CHARS:]
    return [
        *_place_fields(delivery, attempts),
        *(ERROR, str(error)[:_MAX_ERROR_CHARS].encode(errors="replace")),
        *(TRACEBACK, lines.encode(errors="replace")),
    ]
