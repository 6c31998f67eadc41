"""Settlement: the entries that are done with, collected until they can be sent in one go."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from conquiet.kombu import scripts
from conquiet.kombu.keys import BACK, GROUP, Keys

# Redis' Lua can pass on some thousand values at once.
_MOST_AT_ONCE = 1000

Acks = dict[str, list[str]]
"""The ids of each stream."""


class Settlement:
    """What one consumer has finished, given back or found broken, until Redis knows.

    Any thread may add; whoever sends takes all of it, and puts it back if that failed, since every
    part may be sent twice.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._acks: deque[tuple[str, str]] = deque()
        self._rest: deque[tuple[str, str, str | None]] = deque()
        self._lock = threading.Lock()
        self.since: float | None = None

    def __bool__(self) -> bool:
        return bool(self._acks or self._rest)

    def ack(self, stream: str, entry: str) -> None:
        self._acks.append((stream, entry))
        if self.since is None:
            self.since = time.monotonic()

    def give_back(self, stream: str, entry: str) -> None:
        self._rest.append((stream, entry, None))
        self.since = self.since or time.monotonic()

    def bury(self, stream: str, entry: str, reason: str) -> None:
        self._rest.append((stream, entry, reason))
        self.since = self.since or time.monotonic()

    def places(self) -> list[tuple[str, str]]:
        """All that waits, by stream and entry."""
        return [*self._acks, *((stream, entry) for stream, entry, _ in self._rest)]

    def take_acks(self) -> Acks:
        """Up to a limit; empty if there are none, or if there is more to do than acking."""
        acks: Acks = {}
        if not self._acks:
            return acks
        with self._lock:
            # Before the first is taken: an ack that comes meanwhile must find it so, and set it.
            self.since = None
            for _ in range(min(len(self._acks), _MOST_AT_ONCE)):
                stream, entry = self._acks.popleft()
                acks.setdefault(stream, []).append(entry)
        if self:
            self.since = time.monotonic()
        return acks

    def put_back(self, acks: Acks) -> None:
        for stream, entries in acks.items():
            self._acks.extendleft((stream, entry) for entry in reversed(entries))
        if acks:
            self.since = self.since or time.monotonic()

    def send(self, client: Any, consumer: str) -> None:
        """All that there is, and return when Redis has confirmed it."""
        while acks := self.take_acks():
            try:
                scripts.settle.call(client, list(acks), arguments(acks, GROUP))
            except BaseException:
                self.put_back(acks)
                raise
        self.since = None
        while self._rest:
            try:
                item = self._rest.popleft()
            except IndexError:  # another thread sends as well
                return
            try:
                self._send_one(client, consumer, *item)
            except BaseException:
                self._rest.appendleft(item)
                self.since = time.monotonic()
                raise

    def _send_one(
        self, client: Any, consumer: str, stream: str, entry: str, reason: str | None
    ) -> None:
        if reason is None:
            scripts.giveback.call(client, [stream], [GROUP, consumer, BACK, entry])
        else:
            queue = self._keys.queue(stream)
            keys = [stream, self._keys.dead(queue)]
            scripts.bury.call(client, keys, [GROUP, entry, queue, reason])


def arguments(acks: Acks, *before: scripts.Argument) -> list[scripts.Argument]:
    """What the scripts want after their keys: of each stream how many, and the ids."""
    args: list[scripts.Argument] = list(before)
    for entries in acks.values():
        args.append(len(entries))
        args.extend(entries)
    return args
