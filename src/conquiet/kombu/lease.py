"""Lease: the sign that a consumer's process lives, renewed by one small thread per process.

A thread, because an event loop stands still while a callback runs, and on Celery's solo pool that
is as long as the task. It also sends what was settled and found no fetch to travel with.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis

from conquiet.kombu import scripts
from conquiet.kombu.connecting import close_idle
from conquiet.kombu.keys import BACK, GROUP, Keys
from conquiet.kombu.settlement import Settlement

logger = logging.getLogger(__name__)

SETTLE_AFTER = 0.02
"""Seconds that an ack waits for a fetch to travel with."""

NAMES_KEPT = 86_400.0
"""Seconds that the name of an expired queue is kept; a message to it is dropped meanwhile."""

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError, OSError)

_LAST_TRIES = 600.0  # seconds after the end in which what was settled is still sent


class Lease:
    """One consumer's claim to be alive, and what is done in its name in the background.

    It lasts 0.8 of `seconds`, is renewed every 0.2 and others look every 0.1, so that the work of a
    dead process is back within `seconds`. Whoever is new looks only after 0.3: if nobody could
    reach the server for a while, those who live renew their leases first.
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
        # Replaced, never changed: another thread looks at them.
        self.streams: frozenset[str] = frozenset()
        self.expires: Mapping[str, int] = {}  # stream -> milliseconds of x-expires
        self.settlement = settlement
        self.client = client
        self._keys = keys
        self._renew_every = seconds * 0.2
        self._reap_every = reap_every or seconds * 0.1
        self._renew_at = self._touch_at = 0.0
        self._sweep_every = seconds
        now = time.monotonic()
        self._reap_at, self._sweep_at = now + seconds * 0.3, now + seconds
        self.ended: float | None = None
        self._is_cut_off = False

    def end(self) -> None:
        """Renew no more; without a lock, since the garbage collector may call it anywhere."""
        self.ended = time.monotonic()

    def is_over(self, now: float) -> bool:
        """Nothing is left to do; an ack that waits for the server outlives its channel."""
        if self.ended is None:
            return False
        return not self.settlement or now - self.ended > _LAST_TRIES

    def due(self) -> float:
        """When to come back, in monotonic seconds."""
        if self.ended:
            times = [time.monotonic() + 1.0 if self.settlement else 0.0]
        else:
            times = [self._renew_at, self._reap_at, self._sweep_at]
            times += [self._touch_at] if self.expires else []
        if self.settlement.since is not None:
            times.append(self.settlement.since + SETTLE_AFTER)
        return min(times)

    def tend(self, now: float) -> None:
        """Do what is due, as far as the server answers."""
        since = self.settlement.since
        if since is not None and since + SETTLE_AFTER <= now:
            self._try(self._settle)
        if self.ended:
            return
        if self._renew_at <= now:
            self._renew_at = now + self._renew_every
            self._try(self.renew)
        if self.expires and self._touch_at <= now:
            self._touch_at = now + min(self.expires.values()) / 4000
            self._try(self._touch)
        if self._reap_at <= now:
            self._reap_at = now + self._reap_every
            self._try(self._reap)
        if self._sweep_at <= now:
            self._sweep_at = now + self._sweep_every
            self._try(self._sweep)

    def renew(self) -> None:
        scripts.renew.call(self.client, [self._keys.leases], [self.milliseconds, self.consumer])
        if self._is_cut_off:
            self._is_cut_off = False
            logger.warning("%s: Redis answers again", self.consumer)

    def _settle(self) -> None:
        self.settlement.send(self.client, self.consumer)

    def _touch(self) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for stream, milliseconds in self.expires.items():
                pipe.pexpire(stream, milliseconds)
            pipe.execute()

    def _reap(self) -> None:
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

    def _sweep(self) -> None:
        keys = self._keys
        every = int(self._sweep_every * 1000)
        scripts.sweep.call(
            self.client,
            [keys.queues, keys.exchanges, keys.gone],
            [keys.namespace, int(NAMES_KEPT * 1000), every],
        )

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except UNREACHABLE:
            raise
        except redis.RedisError as error:
            what = work.__name__.strip("_")
            logger.warning("%s: could not %s, and tries again: %s", self.consumer, what, error)
            self._settle_later()

    def put_off(self, error: Exception) -> None:
        """The server did not answer."""
        level = logging.DEBUG if self._is_cut_off else logging.WARNING
        logger.log(level, "%s: no answer from Redis, trying again: %s", self.consumer, error)
        self._is_cut_off = True
        now = time.monotonic()
        self._renew_at = now + self._renew_every / 4
        # Whoever cannot renew a lease knows nothing of the others': they may be as unable.
        self._reap_at = now + 2 * self._renew_every
        self._settle_later()

    def _settle_later(self) -> None:
        if self.settlement.since is not None:
            self.settlement.since = time.monotonic() + 1.0


class Keeper:
    """The thread; it lives while there are leases to renew."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._hurried = False

    def add(self, lease: Lease) -> None:
        with self._changed:
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._keep, name="conquiet-kombu-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, lease: Lease) -> None:
        """Its time is over; what was settled and not sent yet still is."""
        lease.end()
        if lease.settlement:
            self.add(lease)
        else:
            with self._changed:
                self._leases.discard(lease)
                self._changed.notify()

    def let_go(self, client: Any) -> None:
        """Close its connections, unless another lease needs them; it connects again if it must."""
        with self._changed:
            if any(lease.client is client for lease in self._leases):
                return
        close_idle(client.connection_pool)

    def hurry(self) -> None:
        """Something was settled; see to it that it does not wait long."""
        if not self._hurried:
            self._hurried = True
            with self._changed:
                self._changed.notify()

    def _keep(self) -> None:
        due = 0.0
        leases: set[Lease] = set()
        while True:
            with self._changed:
                if self._leases and not self._hurried:
                    self._changed.wait(max(due - time.monotonic(), 0.001))
                now, known = time.monotonic(), leases | self._leases
                self._leases = {lease for lease in self._leases if not lease.is_over(now)}
                leases = set(self._leases)
                if not leases:
                    self._thread = None
            for lease in known - leases:
                self.let_go(lease.client)  # whoever closed it could not, while it was in use here
            if not leases:
                return
            if self._hurried:
                # Most acks travel with a fetch meanwhile; waking for each would only cost time.
                time.sleep(SETTLE_AFTER)
                self._hurried = False
            self._tend(leases)
            due = min((lease.due() for lease in leases), default=0.0)

    def _tend(self, leases: Iterable[Lease]) -> None:
        """A server that does not answer is waited for once: other servers' leases must go on."""
        now, unreachable = time.monotonic(), set()
        for lease in leases:
            if id(lease.client) in unreachable:
                continue
            try:
                lease.tend(now)
            except UNREACHABLE as error:
                unreachable.add(id(lease.client))
                lease.put_off(error)
            except Exception:  # whatever it is, the others' leases must go on
                logger.exception("the lease of %s could not be tended", lease.consumer)


keeper = Keeper()


def _forget() -> None:
    """In a forked child: the leases are the parent's, and the thread was not copied."""
    keeper.__init__()  # type: ignore[misc]  # the same object: others hold it


os.register_at_fork(after_in_child=_forget)
