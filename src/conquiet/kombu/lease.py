"""Hold the leases of consumers: the sign in Redis that a consumer's process is alive.

A thread renews them, because an event loop is blocked while a callback runs, and on Celery's solo
pool that is as long as the task. It stops when the loop is blocked by anything else, since a worker
that hangs must not keep its messages from others. The thread also sends what was settled and found
no fetch to travel with, gives back the messages of dead consumers, and forgets expired queues.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import redis

from conquiet.kombu import scripts
from conquiet.kombu.connection import UNREACHABLE, close_idle
from conquiet.kombu.layout import BACK, GROUP, Keys
from conquiet.kombu.settlement import Settlement
from conquiet.kombu.topology import forget_expired
from conquiet.lease import LeaseKeeper, native_lock

logger = logging.getLogger(__name__)

SETTLE_AFTER = 0.02
"""Seconds that an ack waits for a fetch to travel with."""

NAMES_KEPT = 86_400.0
"""Seconds that the name of an expired queue is kept; a message to it is dropped meanwhile."""

LEAST_PATIENCE = 30.0
"""Seconds for which an event loop may be blocked at least, however short the lease is."""

_LAST_TRIES = 600.0  # seconds after the end in which unconfirmed acks are still sent
_RETRY_AFTER = 1.0  # seconds
_SILENCE = 5.0  # seconds for which a server that did not answer is not asked again by a channel
_SHORTEST_WAIT = 0.001  # seconds

Answer = TypeVar("Answer")


class Silence(redis.ConnectionError):
    """The server did not answer another channel a moment ago."""


class Pulse:
    """Know for how long the event loop of a transport has been blocked.

    A callback of a consumer may take as long as it likes, and so may a Celery task that runs in the
    thread of the loop, as on the solo pool. Without a loop, as with `drain_events`, it is never
    blocked: the application reads when it wants to.
    """

    def __init__(self) -> None:
        self._turned: float | None = None
        self._thread: int | None = None
        self._busy = 0

    def watch(self, loop: Any) -> None:
        """Expect turns of a loop until it is closed."""
        self.turn()
        self._busy = 0
        loop.on_close.add(self.stop)
        signals: Any = sys.modules.get("celery.signals")
        if signals is not None:
            signals.task_prerun.connect(self._begin_task)
            signals.task_postrun.connect(self._end_task)

    def turn(self) -> None:
        self._turned, self._thread = time.monotonic(), threading.get_ident()

    def stop(self, *args: Any) -> None:
        """Expect no more turns."""
        self._turned = None

    def begin(self) -> None:
        """Note that the application has control, for as long as it likes."""
        self._busy += 1

    def end(self) -> None:
        self._busy = max(self._busy - 1, 0)
        if self._turned is not None:
            self.turn()

    def _begin_task(self, **kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self.begin()

    def _end_task(self, **kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self.end()

    def blocked_seconds(self) -> float:
        """Return the seconds since the last turn; 0 while none is expected."""
        turned = self._turned
        return 0.0 if turned is None or self._busy else time.monotonic() - turned


class Lease:
    """Keep one consumer alive in Redis, and do its work in the background.

    It lasts 0.8 of `seconds`, is renewed every 0.2, and consumers look for ended leases every 0.1,
    so that the messages of a dead process are back within `seconds`. A new consumer looks for the
    first time after 0.3: if the server was unreachable for a while, the living renew theirs first.

    It must not refer to its channel, which the keeper's thread would then keep alive. That thread
    reads `streams` and `expires_ms`, so both are replaced and never changed in place. Only that
    thread uses `client`.

    `has_lapsed` is set when a renewal found that the lease had ended, and other consumers may have
    taken over its messages; the channel calls `forget_lapse` once it has dropped them.
    """

    def __init__(
        self,
        client: Any,
        keys: Keys,
        consumer: str,
        settlement: Settlement,
        seconds: float,
        reap_every: float | None,
        pulse: Pulse,
    ) -> None:
        self.consumer = consumer
        self.milliseconds = int(seconds * 800)
        self.streams: frozenset[str] = frozenset()
        self.expires_ms: Mapping[str, int] = {}  # of the streams that must not expire
        self.settlement = settlement
        self.client = client
        self.ended: float | None = None
        self.has_lapsed = False
        self.serves_loop = True  # False once it has no subscription, and only unacked messages
        self._leaves: tuple[str, ...] = ()
        self._sure_until = time.monotonic() + self.milliseconds / 1000
        self._keys = keys
        self._pulse = pulse
        self._patience = max(seconds, LEAST_PATIENCE)
        self._is_withheld = False
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

    def leave_later(self, streams: Iterable[str]) -> None:
        """Give back what is pending in these streams as soon as Redis answers.

        Others do so when the lease has ended in Redis, so that it need not be tried for longer.
        """
        self._leaves = tuple(streams)

    def serve_loop(self, is_serving: bool) -> None:
        """Note whether it has a subscription; without one, a blocked loop does not end it."""
        self.serves_loop = is_serving

    def forget_lapse(self) -> None:
        self.has_lapsed = False

    @property
    def is_in_doubt(self) -> bool:
        """Return whether it may have ended: no renewal was confirmed for as long as it lasts."""
        return self.has_lapsed or time.monotonic() > self._sure_until

    def doubt_later(self, error: Exception) -> None:
        """Go on for a while although Redis refused to renew it, since a full one must be read."""
        logger.warning("%s could not renew its lease, and goes on: %s", self.consumer, error)
        self._sure_until = time.monotonic() + self._renew_every

    # --- work in the background ---------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether messages are left to ack or to give back, which outlives the channel."""
        return bool(self.settlement or self._leaves)

    def is_over(self, now: float) -> bool:
        """Check that nothing is left to do."""
        if self.ended is None:
            return False
        if now - self.ended > self.milliseconds / 1000:
            self._leaves = ()
        return not self.has_work or now - self.ended > _LAST_TRIES

    def due(self) -> float:
        """Return the time of the next work, in monotonic seconds."""
        if self.ended:
            times = [time.monotonic() + _RETRY_AFTER if self.has_work else 0.0]
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
            if self._leaves:
                self._try("give back its messages", self._leave)
            return
        if self._renew_at <= now:
            self._renew_at = now + self._renew_every
            if not self._is_blocked():
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

    def _leave(self) -> None:
        self.settlement.leave(self.client, self._leaves)
        self._leaves = ()

    def _is_blocked(self) -> bool:
        blocked = self._pulse.blocked_seconds() if self.serves_loop else 0.0
        if blocked > self._patience and not self._is_withheld:
            logger.error(
                "%s: the event loop has been blocked for %.0f seconds; its lease is not renewed, "
                "and other consumers get its messages",
                self.consumer,
                blocked,
            )
        self._is_withheld = blocked > self._patience
        return self._is_withheld

    def renew(self, client: Any = None) -> None:
        """Renew it in Redis, by the client of another thread if one is given."""
        began = time.monotonic()
        args: list[scripts.Argument] = [self.milliseconds, self.consumer]
        if scripts.renew.call(client or self.client, [self._keys.leases], args):
            self.has_lapsed = True
        self._sure_until = began + self.milliseconds / 1000
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
        moved = removed = 0
        more = len(keys) > 1
        try:
            while more:
                some, gone, more = scripts.reap.call(
                    self.client, keys, [GROUP, BACK, scripts.AT_ONCE, self.consumer]
                )
                moved, removed = moved + some, removed + gone
        finally:
            if moved:
                logger.warning(
                    "%d message(s) of %d dead consumer(s) were given back", moved, removed
                )

    def sweep(self) -> None:
        """Forget the bindings of expired queues, and later their names."""
        every_ms = int(self._sweep_every * 1000)
        forget_expired(self.client, self._keys, int(NAMES_KEPT * 1000), every_ms)

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
    connections are closed when the last lease is over; it connects again for a late ack. Channels
    that end have a client of their own, since gevent binds a socket to its thread.
    """

    def __init__(self) -> None:
        self._reset()
        _groups.add(self)

    def _reset(self) -> None:
        self.pulse = Pulse()
        self._lock = native_lock()
        self._leases: set[Lease] = set()
        self._client: Any = None
        self._client_of_channels: Any = None
        self._silent_until = 0.0
        self._is_hurried = False

    def client(self, create: Callable[[], Any]) -> Any:
        """Return the client of all leases; the first caller creates it."""
        if self._client is None:
            self._client_of_channels, self._client = create(), create()
        return self._client

    def reach(self, command: Callable[[Any], Answer]) -> Answer:
        """Run a command with a client that waits seconds, for a channel that ends.

        While the server is silent, raise one of `UNREACHABLE` at once: many channels end together.
        """
        if time.monotonic() < self._silent_until:
            raise Silence("Redis did not answer a moment ago")
        try:
            return command(self._client_of_channels)
        except UNREACHABLE:
            self._silent_until = time.monotonic() + _SILENCE
            raise

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._leases.add(lease)
        keeper.add(self, _RETRY_AFTER)
        keeper.hurry(self)

    def remove(self, lease: Lease) -> None:
        """End a lease; what is left to ack or to give back is still sent."""
        lease.end()
        if lease.has_work:
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

    def close_idle(self) -> None:
        """Close the idle connections of channels that ended."""
        if self._client_of_channels is not None:
            close_idle(self._client_of_channels.connection_pool)

    def renew(self) -> float | None:
        """Do the work that is due, for the keeper; return the seconds until the next work."""
        self._is_hurried = False
        now = time.monotonic()
        with self._lock:
            self._leases = {lease for lease in self._leases if not lease.is_over(now)}
            leases = list(self._leases)
        if not leases:
            if self._client is not None:
                close_idle(self._client.connection_pool)
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


keeper = LeaseKeeper("conquiet-kombu-leases", native=True)

_groups: weakref.WeakSet[Leases] = weakref.WeakSet()


def _forget_leases_of_parent() -> None:
    for group in _groups:
        group._reset()  # also the lock, which a thread of the parent may have held


os.register_at_fork(after_in_child=_forget_leases_of_parent)
