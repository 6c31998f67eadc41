"""Settle entries: ack, give back, requeue, or turn into dead letters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from conquiet.kombu import scripts
from conquiet.kombu.layout import BACK, GROUP, Keys, Place
from conquiet.lease import native_lock

# Redis' Lua can pass on some thousand values at once.
_MOST_AT_ONCE = 1000

Acks = dict[str, list[str]]
"""The ids to ack, by stream."""


class Settlement:
    """Settle the entries of one consumer, and hold what Redis has not confirmed yet.

    `ack`, `give_back` and `bury` only record: the next fetch takes the acks along, and a background
    thread, which `hurry` wakes, sends the rest. Any thread may record, and any thread may send.
    A sender takes items out and puts them back if it failed; Redis accepts each of them twice.
    `since` is the time of the oldest unconfirmed item, or None if there is none.

    The methods that take a client send at once. The settlement holds no client of a channel, since
    it must not keep a dropped channel alive.
    """

    def __init__(self, keys: Keys, consumer: str, hurry: Callable[[], None]) -> None:
        self.since: float | None = None
        self._keys = keys
        self._consumer = consumer
        self._hurry = hurry
        self._acks: deque[Place] = deque()
        self._rest: deque[tuple[str, str, str | None]] = deque()
        self._lock = native_lock()

    def __bool__(self) -> bool:
        return bool(self._acks or self._rest)

    # --- record -----------------------------------------------------------------------------

    def ack(self, stream: str, entry: str) -> None:
        self._acks.append((stream, entry))
        if self.since is None:
            self.since = time.monotonic()
        self._hurry()

    def give_back(self, stream: str, entry: str) -> None:
        """Return an entry to its place in the queue."""
        self._record(stream, entry, None)

    def bury(self, stream: str, entry: str, reason: str) -> None:
        """Turn an entry into a dead letter."""
        self._record(stream, entry, reason)

    def _record(self, stream: str, entry: str, reason: str | None) -> None:
        self._rest.append((stream, entry, reason))
        self.since = self.since or time.monotonic()
        self._hurry()

    def places(self) -> list[Place]:
        """List all unconfirmed entries."""
        return [*self._acks, *((stream, entry) for stream, entry, _ in self._rest)]

    # --- send -------------------------------------------------------------------------------

    def take_acks(self) -> Acks:
        """Take out as many acks as one script can pass on."""
        acks: Acks = {}
        if not self._acks:
            return acks
        with self._lock:
            # Reset before the first is taken, so that an ack which arrives meanwhile sets it again.
            self.since = None
            for _ in range(min(len(self._acks), _MOST_AT_ONCE)):
                stream, entry = self._acks.popleft()
                acks.setdefault(stream, []).append(entry)
        if self:
            self.since = time.monotonic()
        return acks

    def put_back(self, acks: Acks) -> None:
        """Restore acks that were taken and not confirmed."""
        for stream, entries in acks.items():
            self._acks.extendleft((stream, entry) for entry in reversed(entries))
        if acks:
            self.since = self.since or time.monotonic()

    def postpone(self, seconds: float) -> None:
        """Let the background thread wait before it sends again."""
        if self.since is not None:
            self.since = time.monotonic() + seconds

    def send(self, client: Any) -> None:
        """Send everything, and return when Redis has confirmed it."""
        while acks := self.take_acks():
            try:
                scripts.settle.call(client, list(acks), encode_acks(acks, GROUP))
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
                self._send_one(client, *item)
            except BaseException:
                self._rest.appendleft(item)
                self.since = time.monotonic()
                raise

    def _send_one(self, client: Any, stream: str, entry: str, reason: str | None) -> None:
        if reason is None:
            scripts.giveback.call(client, [stream], [GROUP, self._consumer, BACK, entry])
        else:
            queue = self._keys.queue(stream)
            keys = [stream, self._keys.dead(queue)]
            scripts.bury.call(client, keys, [GROUP, entry, queue, reason])

    def requeue(self, client: Any, stream: str, entry: str, delivery_limit: int) -> None:
        """Move an entry to the end of its queue, or to the dead letters at the limit."""
        args: list[scripts.Argument] = [GROUP, self._consumer, entry, delivery_limit]
        scripts.requeue.call(client, [stream], [*args, self._keys.namespace])

    def give_back_now(self, client: Any, places: Iterable[Place]) -> None:
        """Return entries to their places in the queues, with one script for many entries."""
        for stream, entries in _by_stream(places).items():
            for at in range(0, len(entries), scripts.AT_ONCE):
                some = entries[at : at + scripts.AT_ONCE]
                scripts.giveback.call(client, [stream], [GROUP, self._consumer, BACK, *some])

    def give_back_strays(
        self, execute: Callable[..., Any], streams: Iterable[str], held: Iterable[Place]
    ) -> None:
        """Return the entries that a lost reply carried.

        The server counts them as pending with this consumer, but they are not among those that it
        has `held`.
        """
        entries = _by_stream(held)
        for stream in streams:
            args: list[Any] = [GROUP, self._consumer, BACK, *entries.get(stream, ())]
            execute(*scripts.strays.whole([stream], args))

    def find_taken(self, client: Any, places: Iterable[Place]) -> set[Place]:
        """Find those entries that other consumers took over, or have finished since."""
        taken: set[Place] = set()
        for stream, entries in _by_stream(places).items():
            for at in range(0, len(entries), scripts.AT_ONCE):
                some = entries[at : at + scripts.AT_ONCE]
                reply = scripts.taken.call(client, [stream], [GROUP, self._consumer, *some])
                taken.update((stream, entry.decode()) for entry in reply)
        return taken

    def leave(self, client: Any, streams: Iterable[str]) -> None:
        """Send everything, return what is still pending with the consumer, and remove it."""
        self.send(client)
        args: list[scripts.Argument] = [GROUP, self._consumer, BACK, scripts.AT_ONCE]
        keys = [self._keys.leases, *streams]
        while scripts.leave.call(client, keys, args):
            pass


def encode_acks(acks: Acks, *before: scripts.Argument) -> list[scripts.Argument]:
    """Build the arguments of a script that acks: for each stream the number of ids, and the ids."""
    args: list[scripts.Argument] = list(before)
    for entries in acks.values():
        args.append(len(entries))
        args.extend(entries)
    return args


def _by_stream(places: Iterable[Place]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stream, entry in places:
        found.setdefault(stream, []).append(entry)
    return found
