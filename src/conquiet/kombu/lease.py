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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis

from conquiet.kombu import scripts
from conquiet.kombu.connection import UNREACHABLE, close_idle
from conquiet.kombu.layout import BACK, GROUP, Keys
from conquiet.kombu.settlement import Settlement

logger = logging.getLogger(__name__)

SETTLE_AFTER = 0.02
"""Seconds that an ack waits for a fetch to travel with."""

NAMES_KEPT = 86_400.0
"""Seconds that the name of an expired queue is kept; a message to it is dropped meanwhile."""

_LAST_TRIES = 600.0  # seconds after the end in which unconfirmed acks are still sent


class Lease:
    """Keep one consumer alive in Redis, and do its work in the background.

    It lasts 0.8 of `seconds`, is renewed every 0.2, and consumers look for ended leases every 0.1,
    so that the messages of a dead process are back within `seconds`. A new consumer looks for the
    first time after 0.3: if the server was unreachable for a while, the living renew theirs first.

    It must not refer to its channel, which the keeper would then hold alive. Other threads read
    `streams` and `expires_ms`, so both are replaced and never changed in place.
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
            times = [time.monotonic() + 1.0 if self.settlement else 0.0]
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
            self.settlement.postpone(1.0)

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
        self.settlement.postpone(1.0)


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
            self._work(leases)
            due = min((lease.due() for lease in leases), default=0.0)

    def _work(self, leases: Iterable[Lease]) -> None:
        """A server that does not answer is waited for once: other servers' leases must go on."""
        now, unreachable = time.monotonic(), set()
        for lease in leases:
            if id(lease.client) in unreachable:
                continue
            try:
                lease.work(now)
            except UNREACHABLE as error:
                unreachable.add(id(lease.client))
                lease.put_off(error)
            except Exception:  # whatever it is, the others' leases must go on
                logger.exception("the lease of %s failed in the background", lease.consumer)


keeper = Keeper()


def _forget() -> None:
    """In a forked child: the leases are the parent's, and the thread was not copied."""
    keeper.__init__()  # type: ignore[misc]  # the same object: others hold it


os.register_at_fork(after_in_child=_forget)
