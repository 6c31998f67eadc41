"""Take part in the consumer group of a queue: a consumer, its streams and its lease."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable

import redis

from conquiet.kombu import scripts
from conquiet.kombu.connection import UNREACHABLE, Commands
from conquiet.kombu.layout import GROUP, Keys, QueueSettings
from conquiet.kombu.lease import Lease, Leases
from conquiet.kombu.settlement import Settlement
from conquiet.kombu.topology import Topology

logger = logging.getLogger(__name__)


class Consumer:
    """Be one consumer of the group: a channel has one, and a new one in a forked child.

    `streams` maps each stream in which entries may be pending with this consumer to its queue; it
    outlives the subscription while messages are unacked. `lease` is None until the first
    subscription, since a channel that only publishes needs none.
    """

    def __init__(
        self,
        name: str,
        commands: Commands,
        keys: Keys,
        topology: Topology,
        settlement: Settlement,
        leases: Leases,
        open_lease: Callable[[], Lease],
        priority_steps: Iterable[int],
    ) -> None:
        self.name = name
        self.lease: Lease | None = None
        self.streams: dict[str, str] = {}
        self._commands = commands
        self._keys = keys
        self._topology = topology
        self._settlement = settlement
        self._leases = leases
        self._open_lease = open_lease
        self._priority_steps = priority_steps
        self._subscribed: set[str] = set()

    def streams_of(self, queues: Iterable[str]) -> list[str]:
        """List the streams in the order of reading: by priority, then by queue."""
        stream, known = self._keys.stream, self.streams
        found = []
        for priority in self._priority_steps:
            for queue in queues:
                key = stream(queue, priority)
                known[key] = queue
                found.append(key)
        return found

    def queue_of(self, stream: str) -> str:
        """Return the queue of a stream, also if its last reply arrives after the cancel."""
        return self.streams.get(stream) or self._keys.queue(stream)

    def keep(self, streams: Iterable[str]) -> None:
        """Count streams as ours again, since a lost reply may have carried entries of them."""
        self.streams.update((stream, self.queue_of(stream)) for stream in streams)

    # --- subscriptions ----------------------------------------------------------------------

    def consume(self, queue: str) -> None:
        """Subscribe to a queue, and keep it from expiring while it is consumed."""
        lease = self.subscribe(queue)
        expires = self._topology.expires_ms.get(queue)
        if expires:
            lease.keep_alive(self.streams_of([queue]), expires)

    def subscribe(self, queue: str) -> Lease:
        """Register as a consumer of a queue; the first time, take a lease."""
        lease = self.lease
        if lease is None:
            lease = self.lease = self._open_lease()
            weakref.finalize(self, lease.end).atexit = False
        if queue not in self._subscribed:
            settings = self._commands.call(
                scripts.subscribe,
                [self._keys.leases, self._keys.queues, self._keys.stream(queue, 0)],
                [GROUP, self.name, lease.milliseconds, queue],
            )
            # Another process may have declared the queue.
            self._topology.remember_expires(queue, QueueSettings.decode(settings).expires_ms)
            lease.add(self.streams_of([queue]))
            self._leases.add(lease)
            self._subscribed.add(queue)
        return lease

    def unsubscribe(self, queue: str) -> None:
        """Leave the group of a queue; its streams stay known while messages are unacked."""
        self._subscribed.discard(queue)
        streams = self._keys.streams(queue)
        if self.lease:
            self.lease.let_expire(streams)
        try:
            self._send()
            holds_some = self._commands.call(scripts.unsubscribe, streams, [GROUP, self.name])
        except UNREACHABLE as error:
            logger.debug("%s could not unsubscribe from %r: %s", self.name, queue, error)
            return
        if holds_some:
            return
        for stream in streams:
            self.streams.pop(stream, None)
        if self.lease:
            self.lease.discard(streams)

    def _send(self) -> None:
        if self._settlement and self.lease:
            self._settlement.send(self.lease.client)

    # --- end --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Return everything that the server counts as ours, an unread reply included."""
        lease = self.lease
        if lease is None:
            return
        try:
            self._settlement.leave(lease.client, self.streams)
        except (redis.RedisError, OSError) as error:
            logger.warning(
                "%s could not give back its messages: %s; they come back when its lease ends",
                self.name,
                error,
            )
        finally:
            self._leases.remove(lease)

    def settle_after_close(self) -> None:
        """Send an ack that was recorded after `leave`; a thread tries again if Redis is away."""
        try:
            self._send()
        except (redis.RedisError, OSError) as error:
            logger.warning(
                "%s could not ack after its channel was closed: %s; it tries again until Redis "
                "answers",
                self.name,
                error,
            )
            if self.lease is not None:
                self._leases.remove(self.lease)
        else:
            self._leases.close_unused()
