"""Hold the leases of consumers: the sign in Redis that a consumer's process is alive.

A thread renews them, because an event loop is blocked while a callback runs, and on Celery's solo
pool that is as long as the task. The thread also sends what was settled and found no fetch to
travel with, gives back the messages of dead consumers, and forgets expired queues.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis

from conquiet.kombu import scripts
from conquiet.kombu.connection import UNREACHABLE, close_idle
from conquiet.kombu.layout import BACK, GROUP, Keys
from conquiet.kombu.settlement import Settlement
from conquiet.lease import LeaseKeeper

logger = logging.getLogger(__name__)

SETTLE_AFTER = 0.02
"""Seconds that an ack waits for a fetch to travel with."""

NAMES_KEPT = 86_400.0
"""Seconds that the name of an expired queue is kept; a message to it is dropped meanwhile."""

_LAST_TRIES = 600.0  # seconds after the end in which unconfirmed acks are still sent
_RETRY_AFTER = 1.0  # seconds
_SHORTEST_WAIT = 0.001  # seconds


class Lease:
    """Keep one consumer alive in Redis, and do its work in the background.

    It lasts 0.8 of `seconds`, is renewed every 0.2, and consumers look for ended leases every 0.1,
    so that the messages of a dead process are back within `seconds`. A new consumer looks for the
    first time after 0.3: if the server was unreachable for a while, the living renew theirs first.

    It must not refer to its channel, which the keeper's thread would then keep alive. That thread
    reads `streams` and `expires_ms`, so both are replaced and never changed in place.
    """

    def __init__(
        self,
        client: Any,
        keys: Keys,
        consumer: str,
        settlement: Settlement,
        seconds: float,
        reap_every: float | None,
    ) -> None:
        self.consumer = consumer
        self.milliseconds = int(seconds * 800)
        self.streams: frozenset[str] = frozenset()
        self.expires_ms: Mapping[str, int] = {}  # of the streams that must not expire
        self.settlement = settlement
        self.client = client
        self.ended: float | None = None
        self._keys = keys
        self._renew_every = seconds * 0.2
        self._reap_every = reap_every or seconds * 0.1
        self._renew_at = self._touch_at = 0.0
        self._sweep_every = seconds
        now = time.monotonic()
        self._reap_at, self._sweep_at = now + seconds * 0.3, now + seconds
        self._is_cut_off = False

    # --- streams, by the channel's thread -----------------------------------------------------

    def add(self, streams: Iterable[str]) -> None:
        """Look for dead consumers of more streams."""
        self.streams |= frozenset(streams)

    def discard(self, streams: Iterable[str]) -> None:
        self.streams -= frozenset(streams)

    def keep_alive(self, streams: Iterable[str], milliseconds: int) -> None:
        """Restart the x-expires of streams again and again."""
        self.expires_ms = {**self.expires_ms, **dict.fromkeys(streams, milliseconds)}

    def let_expire(self, streams: Iterable[str]) -> None:
        gone = set(streams)
        self.expires_ms = {key: ms for key, ms in self.expires_ms.items() if key not in gone}

    def end(self) -> None:
        """Renew no more; takes no lock, since the garbage collector may call it anywhere."""
        self.ended = time.monotonic()

    # --- work in the background ---------------------------------------------------------------

    def is_over(self, now: float) -> bool:
        """Check that nothing is left to do; an unconfirmed ack outlives its channel."""
        if self.ended is None:
            return False
        return not self.settlement or now - self.ended > _LAST_TRIES

    def due(self) -> float:
        """Return the time of the next work, in monotonic seconds."""
        if self.ended:
            times = [time.monotonic() + _RETRY_AFTER if self.settlement else 0.0]
        else:
            times = [self._renew_at, self._reap_at, self._sweep_at]
            times += [self._touch_at] if self.expires_ms else []
        if self.settlement.since is not None:
            times.append(self.settlement.since + SETTLE_AFTER)
        return min(times)

    def work(self, now: float) -> None:
        """Do what is due; raise one of `UNREACHABLE` if the server does not answer."""
        since = self.settlement.since
        if since is not None and since + SETTLE_AFTER <= now:
            self._try("send acks", self._settle)
        if self.ended:
            return
        if self._renew_at <= now:
            self._renew_at = now + self._renew_every
            self._try("renew its lease", self.renew)
        if self.expires_ms and self._touch_at <= now:
            self._touch_at = now + min(self.expires_ms.values()) / 4000
            self._try("keep its queues from expiring", self._touch)
        if self._reap_at <= now:
            self._reap_at = now + self._reap_every
            self._try("give back the messages of dead consumers", self.reap)
        if self._sweep_at <= now:
            self._sweep_at = now + self._sweep_every
            self._try("forget expired queues", self.sweep)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except UNREACHABLE:
            raise
        except redis.RedisError as error:
            logger.warning("%s could not %s, trying again: %s", self.consumer, what, error)
            self.settlement.postpone(_RETRY_AFTER)

    def _settle(self) -> None:
        self.settlement.send(self.client)

    def renew(self) -> None:
        scripts.renew.call(self.client, [self._keys.leases], [self.milliseconds, self.consumer])
        if self._is_cut_off:
            self._is_cut_off = False
            logger.warning("%s: Redis answers again", self.consumer)

    def _touch(self) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for stream, milliseconds in self.expires_ms.items():
                pipe.pexpire(stream, milliseconds)
            pipe.execute()

    def reap(self) -> None:
        """Give back the messages of consumers whose lease has ended."""
        keys = [self._keys.leases, *sorted(self.streams)]
        more = len(keys) > 1
        while more:
            moved, removed, more = scripts.reap.call(
                self.client, keys, [GROUP, BACK, scripts.AT_ONCE]
            )
            if moved:
                logger.warning(
                    "%d message(s) of %d dead consumer(s) were given back", moved, removed
                )

    def sweep(self) -> None:
        """Forget the bindings of expired queues, and later their names."""
        keys = self._keys
        every = int(self._sweep_every * 1000)
        scripts.sweep.call(
            self.client,
            [keys.queues, keys.exchanges, keys.gone],
            [keys.namespace, int(NAMES_KEPT * 1000), every],
        )

    def put_off(self, error: Exception) -> None:
        """Try again soon, after the server did not answer."""
        level = logging.DEBUG if self._is_cut_off else logging.WARNING
        logger.log(level, "%s: no answer from Redis, trying again: %s", self.consumer, error)
        self._is_cut_off = True
        now = time.monotonic()
        self._renew_at = now + self._renew_every / 4
        # The other consumers may have been as unable to renew their leases as this one.
        self._reap_at = now + 2 * self._renew_every
        self.settlement.postpone(_RETRY_AFTER)


class Leases:
    """Renew the leases of one transport one after another, over one client.

    The keeper sees one lease for all of them, so that a server which does not answer is waited for
    once in a round, and the leases on other servers are renewed in between. The client's
    connections are closed when the last lease is over; it connects again for a late ack.
    """

    def __init__(self) -> None:
        self._reset()
        _groups.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._leases: set[Lease] = set()
        self._client: Any = None
        self._is_hurried = False

    def client(self, create: Callable[[], Any]) -> Any:
        """Return the client of all leases; the first caller creates it."""
        if self._client is None:
            self._client = create()
        return self._client

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._leases.add(lease)
        keeper.add(self, _RETRY_AFTER)
        keeper.hurry(self)

    def remove(self, lease: Lease) -> None:
        """End a lease; its unconfirmed acks are still sent."""
        lease.end()
        if lease.settlement:
            self.add(lease)
            return
        with self._lock:
            self._leases.discard(lease)
        keeper.hurry(self)

    def hurry(self) -> None:
        """Send what was settled soon; cheap, since most acks travel with a fetch before that."""
        if not self._is_hurried:
            self._is_hurried = True
            keeper.hurry(self, SETTLE_AFTER)

    def close_unused(self) -> None:
        """Close the idle connections, unless a lease needs them."""
        with self._lock:
            if self._leases:
                return
        self.close_idle()

    def close_idle(self) -> None:
        if self._client is not None:
            close_idle(self._client.connection_pool)

    def renew(self) -> float | None:
        """Do the work that is due, for the keeper; return the seconds until the next work."""
        self._is_hurried = False
        now = time.monotonic()
        with self._lock:
            self._leases = {lease for lease in self._leases if not lease.is_over(now)}
            leases = list(self._leases)
        if not leases:
            self.close_idle()  # `remove` could not close the connection that was in use here
            return None
        for lease in leases:
            try:
                lease.work(now)
            except UNREACHABLE as error:
                lease.put_off(error)
                break
            except Exception:  # the other leases must be renewed
                logger.exception("%s failed in the background", lease.consumer)
        return max(min(lease.due() for lease in leases) - time.monotonic(), _SHORTEST_WAIT)


keeper = LeaseKeeper("conquiet-kombu-leases")

_groups: weakref.WeakSet[Leases] = weakref.WeakSet()


def _forget_leases_of_parent() -> None:
    for group in _groups:
        group._reset()  # also the lock, which a thread of the parent may have held


os.register_at_fork(after_in_child=_forget_leases_of_parent)
