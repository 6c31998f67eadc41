"""Replay: what streams hold, in the order of time, without moving a group."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import redis

from conquiet.errors import InvalidMessage, StoreError
from conquiet.message import Message, printable
from conquiet.redis import ids
from conquiet.redis.entry import UndecodableEntry, from_fields
from conquiet.redis.group import GroupStream
from conquiet.redis.ids import FIRST, LAST

logger = logging.getLogger("conquiet.redis")

_PAGE = 500

Placed: TypeAlias = tuple[tuple[int, int], Message[Any]]
"""A message and where it stands."""


def replay(
    streams: Sequence[GroupStream], start: str | None, end: str | None
) -> Iterator[Message[Any]]:
    parts = [_replay(stream, start, end) for stream in streams]
    for _, message in heapq.merge(*parts, key=lambda item: item[0]):
        yield message


def _replay(stream: GroupStream, start: str | None, end: str | None) -> Iterator[Placed]:
    at: bytes | None = FIRST if start is None else start.encode()
    last = LAST if end is None else end.encode()
    while at is not None:
        try:
            page = stream.call(b"XRANGE", stream.key, at, last, b"COUNT", _PAGE)
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"{stream.name!r} cannot be replayed: {error}") from error
        for entry_id, fields in page:
            try:
                data, attributes, topic = from_fields(fields)
            except InvalidMessage as error:
                why = UndecodableEntry(stream.name, entry_id.decode(), str(error))
                logger.warning("left out of a replay: %s", printable(str(why)))
                continue
            message: Message[Any] = Message(data, attributes, topic=topic or stream.topic)
            message.locals["position"] = entry_id.decode()
            yield ids.parse(entry_id), message
        at = ids.next_after(page[-1][0]) if len(page) == _PAGE else None
