"""Dead letters in a Redis stream, as sources and the `DeadLetter` middleware leave them."""

from __future__ import annotations

import json
import weakref
from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from conquiet.errors import ConquietError, InvalidMessage, NotFound
from conquiet.message import Message
from conquiet.middleware import dead_letter
from conquiet.operations.dead_letters import Filter, Letter, letter_of
from conquiet.operations.streams import (
    names_of,
    open_wire,
    range_parts,
    time_of,
    translate,
    translate_errors,
)
from conquiet.redis import ids
from conquiet.redis.dead_letter import UNREADABLE_TYPE
from conquiet.redis.entry import TOPIC_FIELD, from_fields, to_fields
from conquiet.redis.ids import FIRST, LAST
from conquiet.redis.topic import Topic, streams_of
from conquiet.redis.wire import Wire

_PAGE = 200
_BRIEF_BYTES = 64 * 1024
"""More than a reason and a traceback have."""

# KEYS: a stream. ARGV: a field. Returns the length, if the first or last entry has the field.
_HOLDS = b"""
for _, ends in ipairs({{'XRANGE', '-', '+'}, {'XREVRANGE', '+', '-'}}) do
  for _, entry in ipairs(redis.call(ends[1], KEYS[1], ends[2], ends[3], 'COUNT', 1)) do
    for at = 1, #entry[2], 2 do
      if entry[2][at] == ARGV[1] then return redis.call('XLEN', KEYS[1]) end
    end
  end
end
return 0
"""

# KEYS: the letters, where the message goes. ARGV: the letter, the fields of the message.
# One script, so that two replays at the same time do not publish it twice.
_SEND = b"""
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then return false end
local id = redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], ARGV[1])
return id
"""


class StreamLetters:
    """The letters of one stream.

    >>> StreamLetters(client, "dead-letters").exists()
    False
    """

    def __init__(self, client: Any, stream: str) -> None:
        self.name = f"stream {stream!r}"
        self.stream = stream
        self._key = stream.encode()
        self._wire = Wire(client)
        weakref.finalize(self, self._wire.close)

    def exists(self) -> bool:
        with translate_errors(self.name):
            return bool(self._wire.call(self._key, b"EXISTS", self._key))

    def scan(self, filter_: Filter, *, brief: bool = False) -> Iterator[tuple[Letter, Any]]:
        found = self._entries(filter_.ids) if filter_.ids else []
        is_all = bool(found) and len(found) == len(set(filter_.ids))
        for entry_id, fields in found if is_all else self._range(filter_, brief):
            letter = self._letter(entry_id, fields)
            if letter is not None:
                yield letter, fields

    def _entries(self, wanted: Sequence[str]) -> list[tuple[bytes, list[bytes]]]:
        """Read entries by id, in order; none if one of the texts is not an entry id."""
        if not all("-" in item and ids.is_valid(item) for item in wanted):
            return []
        places = sorted({item.encode() for item in wanted}, key=ids.parse)
        with translate_errors(self.name):
            pages = [self._wire.call(self._key, b"XRANGE", self._key, at, at) for at in places]
        return [entry for page in pages for entry in page]

    def _range(self, filter_: Filter, brief: bool) -> Iterator[tuple[bytes, list[bytes]]]:
        with translate_errors(self.name):
            # Only up to the present end: a message that fails again is appended there.
            last = range_parts(self._wire, self.stream, LAST, FIRST, 1, newest=True, max_fields=0)
        if not last:
            return
        starts = [ids.MIN]
        if filter_.since is not None:
            starts.append(b"%d-0" % max(0, int(filter_.since.timestamp() * 1000)))
        if filter_.after:
            starts.append(ids.next_after(filter_.after.encode()))
        at = max(starts, key=ids.parse)
        while ids.parse(at) <= ids.parse(last[0][0]):
            with translate_errors(self.name):
                if brief:
                    page = range_parts(
                        self._wire, self.stream, at, last[0][0], _PAGE, max_bytes=_BRIEF_BYTES
                    )
                else:
                    page = self._wire.call(
                        self._key, b"XRANGE", self._key, at, last[0][0], b"COUNT", _PAGE
                    )
            yield from page
            if len(page) < _PAGE:
                return
            at = ids.next_after(page[-1][0])

    def _letter(self, entry_id: bytes, fields: list[bytes]) -> Letter | None:
        try:
            data, attributes, _ = from_fields(fields)
        except InvalidMessage:
            return None
        if dead_letter.REASON not in attributes:
            return None  # not a dead letter
        return letter_of(entry_id.decode(), attributes, data, time=time_of(entry_id))

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        data, attributes, _ = from_fields(raw)
        fields = original_fields(data, attributes)
        target = (to or self._home(letter)).encode()
        what = f"letter {letter.id} to stream {target.decode()!r}"
        with translate_errors(what):
            if len(self._wire.by_slot([self._key, target])) == 1:
                both = (self._key, target)
                sent = self._wire.call(self._key, b"EVAL", _SEND, 2, *both, letter.id, *fields)
                return bool(sent)
            if not self._wire.call(self._key, b"XRANGE", self._key, letter.id, letter.id):
                return False
            self._wire.call(target, b"XADD", target, b"*", *fields)
            self._wire.call(self._key, b"XDEL", self._key, letter.id)
            return True

    def remove(self, letter: Letter, raw: Any) -> bool:
        with translate_errors(self.name):
            return bool(self._wire.call(self._key, b"XDEL", self._key, letter.id))

    def _home(self, letter: Letter) -> str:
        """Return the stream it came from: as the letter says, or by its topic."""
        if letter.stream:
            return letter.stream
        if not letter.topic:
            raise ConquietError(
                f"{letter.event_id or letter.id}: its origin is unknown; name a stream with --to"
            )
        with translate_errors(f"topic {letter.topic!r}"):
            if self._exists(letter.topic):
                return letter.topic
            partitions = 0
            while self._exists(f"{letter.topic}:{{{partitions}}}"):
                partitions += 1
        if not partitions:
            raise NotFound(
                f"{letter.event_id or letter.id}: its topic {letter.topic!r} has no stream here;"
                " name one with --to"
            )
        key = letter.attributes.get("partitionkey") or letter.attributes.get("subject")
        topic = Topic(letter.topic, partitions)
        return topic.streams[topic.partition(key or letter.event_id)]

    def _exists(self, stream: str) -> bool:
        return bool(self._wire.call(stream.encode(), b"TYPE", stream) == b"stream")


def original_fields(data: bytes, attributes: dict[str, Any]) -> list[bytes]:
    """Return the fields of the entry that became this letter."""
    if attributes.get("type") == UNREADABLE_TYPE:
        return _unreadable(data)
    message = dead_letter.replay(Message(data, attributes))
    stream = message.attributes.pop(dead_letter.STREAM, None)
    message.attributes.pop(dead_letter.ENTRY, None)
    fields = to_fields(message)
    if stream is not None and message.topic not in (None, streams_of(stream)[stream]):
        fields = [TOPIC_FIELD, str(message.topic).encode(), *fields]  # it came from an outbox
    return fields


def _unreadable(data: bytes) -> list[bytes]:
    """Restore the fields of an entry that was not a CloudEvent."""
    try:
        return [
            b64decode(item["base64"]) if isinstance(item, dict) else str(item).encode()
            for pair in json.loads(data)
            for item in pair
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidMessage(f"the fields of the entry cannot be read: {error}") from error


def list_streams(client: Any, pattern: str = "*") -> dict[str, int]:
    """Return the streams whose first or last entry is a dead letter, and their lengths."""
    with open_wire(client, f"streams {pattern!r}") as wire:
        names = names_of(wire, pattern)
        field = dead_letter.REASON
        questions = [(name.encode(), (b"EVAL", _HOLDS, 1, name, field)) for name in names]
        replies = wire.send(questions) if questions else []
        found: dict[str, int] = {}
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, redis.RedisError):
                raise translate(reply, f"stream {name!r}")
            if reply:
                found[name] = int(reply)
        return found
