"""Take part in the consumer group of a queue: a consumer, its streams and its lease."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import redis

from conquiet.kombu import scripts
from conquiet.kombu.connection import UNREACHABLE, Commands
from conquiet.kombu.layout import GROUP, Keys, QueueSettings
from conquiet.kombu.lease import Lease, Leases, Silence
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
            lease.serve_loop(True)
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

    def unsubscribe(self, queue: str) -> bool:
        """Leave the group of a queue; its streams stay known while messages are unacked.

        Return False if Redis did not answer.
        """
        self._subscribed.discard(queue)
        lease, streams = self.lease, self._keys.streams(queue)
        if lease is None:
            return True
        lease.let_expire(streams)
        lease.serve_loop(bool(self._subscribed))

        def leave_group(client: Any) -> Any:
            self._settlement.send(client)
            return scripts.unsubscribe.call(client, streams, [GROUP, self.name])

        try:
            holds_some = self._leases.reach(leave_group)
        except UNREACHABLE as error:
            logger.debug("%s could not unsubscribe from %r: %s", self.name, queue, error)
            return False
        if not holds_some:
            for stream in streams:
                self.streams.pop(stream, None)
            lease.discard(streams)
        return True

    # --- end --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Return everything that the server counts as ours, an unread reply included.

        If Redis does not answer, a thread tries again until it does.
        """
        lease = self.lease
        if lease is None:
            return
        try:
            self._leases.reach(lambda client: self._settlement.leave(client, self.streams))
        except (redis.RedisError, OSError) as error:
            lease.leave_later(self.streams)
            logger.log(
                logging.DEBUG if isinstance(error, Silence) else logging.WARNING,
                "%s could not give back its messages: %s; it tries again until Redis answers, and "
                "they come back at the latest when its lease ends",
                self.name,
                error,
            )
        finally:
            self._leases.remove(lease)

    def settle_after_close(self) -> None:
        """Send an ack that was recorded after `leave`; a thread tries again if Redis is away."""
        try:
            self._leases.reach(self._settlement.send)
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
            self._leases.close_idle()
