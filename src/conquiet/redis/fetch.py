"""Fetch: new entries of all streams, and at the start those that were ours before.

What is found goes into the caller's list at once: if a later command fails, it is not lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis

from conquiet.redis.delivery import Delivery
from conquiet.redis.group import GroupStream, Start, entries_by_stream
from conquiet.redis.wire import Argument, Wire

logger = logging.getLogger("conquiet.redis")

_POLL_SECONDS = 0.02


class Fetch:
    """XREADGROUP over the streams of one consumer."""

    def __init__(
        self,
        wire: Wire,
        streams: Sequence[GroupStream],
        start: Start,
        lease: float,
        *,
        had_some: bool,
    ) -> None:
        self._streams = list(streams)
        self.deleted = 0
        if had_some:  # the name is not new, so that it may have had something in hand
            for stream in streams:
                stream.own_from = b"0"
        self._by_slot = _by_slot(wire, streams)
        self._start: Start = start
        self._lease_ms = max(1, round(lease * 1000))
        self._is_ready = False
        self._turn = 0
        self._stopped = threading.Event()

    def get_ready(self) -> None:
        """Create the groups that do not exist yet."""
        if self._is_ready:
            return
        for stream in self._streams:
            stream.create(self._start)
            stream.tell_lease(self._lease_ms)
        self._is_ready = True

    def stop(self) -> None:
        self._stopped.set()

    def own(self, found: list[Delivery], room: int) -> None:
        """What this consumer's name had in hand before this process began (R6)."""
        for stream in self._streams:
            while stream.own_from is not None and len(found) < room:
                self._own_of(stream, found, room - len(found))

    def _own_of(self, stream: GroupStream, found: list[Delivery], count: int) -> None:
        assert stream.own_from is not None
        entries = stream.read_own(stream.own_from, count)
        if entries:
            now = time.monotonic()
            counts = stream.still_ours(entry_id for entry_id, _ in entries)
            for entry_id, fields in entries:
                row = counts.get(entry_id)
                if fields and row is not None and entry_id not in stream.held:
                    delivery = Delivery(stream, entry_id, fields, row.deliveries, now)
                    stream.held[entry_id] = delivery
                    found.append(delivery)
            self.deleted += stream.ack_deleted(
                [entry_id for entry_id, fields in entries if not fields]
            )
            stream.own_from = entries[-1][0]
        if len(entries) < count:
            stream.own_from = None

    def new(self, found: list[Delivery], room: int, wait: float) -> None:
        """Up to `room` new entries; waits `wait` seconds at most for the first of them."""
        if len(self._by_slot) == 1 and room >= len(self._streams):
            self._new_of(self._by_slot[0], found, room, wait)
            return
        # No one command can wait for streams of several slots, or of all streams for less
        # entries than there are streams: COUNT is per stream.
        groups = self._by_slot if room >= len(self._streams) else [[s] for s in self._streams]
        end = time.monotonic() + wait
        most = len(found) + room
        before = len(found)
        while True:
            self._turn += 1
            turn = self._turn % len(groups)
            for streams in groups[turn:] + groups[:turn]:
                if len(found) < most:
                    self._new_of(streams, found, most - len(found), 0.0)
            left = end - time.monotonic()
            if len(found) > before or left <= 0:
                return
            if self._stopped.wait(min(left, _POLL_SECONDS)):
                return

    def _new_of(
        self, streams: list[GroupStream], found: list[Delivery], room: int, wait: float
    ) -> None:
        """Shares `room` among the streams; those that had more to give get what others left."""
        while streams and room > 0:
            count = max(1, room // len(streams))
            asked = streams[:room]
            entries = self._read(asked, count, wait)
            wait = 0.0
            now = time.monotonic()
            full: list[GroupStream] = []
            for stream in asked:
                got = entries.get(stream.key, ())
                for entry_id, fields in got:
                    delivery = Delivery(stream, entry_id, fields, 1, now)
                    stream.held[entry_id] = delivery
                    found.append(delivery)
                room -= len(got)
                if len(got) == count:
                    full.append(stream)
            streams = full if len(self._streams) > 1 else []

    def _read(
        self, streams: Sequence[GroupStream], count: int, wait: float
    ) -> dict[bytes, list[Any]]:
        first = streams[0]
        command: list[Argument] = [b"GROUP", first.group, first.consumer, b"COUNT", count]
        if wait > 0:
            command += (b"BLOCK", math.ceil(wait * 1000))  # never 0, which is for ever (R15)
        command.append(b"STREAMS")
        command.extend(stream.key for stream in streams)
        command.extend([b">"] * len(streams))
        return entries_by_stream(first.call(b"XREADGROUP", *command, wait=max(wait, 0.0)))

    def repair(self, error: redis.ResponseError) -> bool:
        """Create again what somebody deleted, if that is what the error says."""
        if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
            return False
        for stream in self._streams:
            if stream.repair():
                stream.tell_lease(self._lease_ms)
                logger.warning(
                    "group %r of stream %r was gone and is created again: what the stream holds"
                    " is delivered again",
                    *(stream.group.decode(), stream.name),
                )
        return True


def _by_slot(wire: Wire, streams: Sequence[GroupStream]) -> list[list[GroupStream]]:
    by_key = {stream.key: stream for stream in streams}
    return [[by_key[key] for key in keys] for keys in wire.by_slot(list(by_key))]
