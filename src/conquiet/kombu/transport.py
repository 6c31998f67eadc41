"""Give Kombu a transport over Redis Streams: the connection behind `redis-streams://`."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from kombu.transport import get_transport_cls
from kombu.transport import redis as lists
from kombu.utils.url import url_to_parts

from conquiet.errors import ConfigError
from conquiet.kombu import options
from conquiet.kombu.channel import Channel, SentinelChannel
from conquiet.kombu.connection import check_server
from conquiet.kombu.lease import Leases, Pulse

_LONGEST_POLL = 1.0  # seconds
_WITHOUT_CREDIT = 0.05  # seconds; an ack by another thread or greenlet frees credit, wakes no poll


class AlternateError(ConfigError, ValueError):
    """An alternate URL would fail over to another transport, which has other keys."""


class Wakeup:
    """Keep a file descriptor readable while set, so that an event loop does not sleep.

    The pipe is opened when it is first set; most loops never need it.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._ends: tuple[int, int] | None = None

    @property
    def fd(self) -> int:
        return self._pipe()[0]

    def _pipe(self) -> tuple[int, int]:
        if self._ends is None:
            self._ends = os.pipe()
        return self._ends

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            os.write(self._pipe()[1], b"!")

    def clear(self) -> None:
        if self.is_set:
            self.is_set = False
            os.read(self.fd, 1)

    def close(self) -> None:
        ends, self._ends, self.is_set = self._ends, None, False
        for end in ends or ():
            os.close(end)


class Poller(lists.MultiChannelPoller):  # type: ignore[misc]  # Kombu has no types
    """Hand over the buffered messages of channels before the server is asked for more."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse
        self._turn = 0
        self._wakeup = Wakeup()
        self._loop: Any = None

    # --- for drain_events -------------------------------------------------------------------

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        if self._hand_over_one():
            return None
        self._confirm_leases()
        longest = _WITHOUT_CREDIT if self._lacks_credit() else _LONGEST_POLL
        return super().get(callback, longest if timeout is None else min(timeout, longest))

    def _lacks_credit(self) -> bool:
        return any(
            channel._active_queues and not channel.qos.can_consume() for channel in self._channels
        )

    def _hand_over_one(self) -> bool:
        ready = [channel for channel in self._channels if channel.delivery.can_hand_over]
        if not ready:
            return False
        self._turn += 1
        self._in_protected_read = True
        try:
            return bool(ready[self._turn % len(ready)].delivery.hand_over())
        finally:
            self._in_protected_read = False
            while self.after_read:
                self.after_read.pop()()

    # --- for the event loop -----------------------------------------------------------------

    def use(self, loop: Any) -> None:
        self._loop = loop
        self._pulse.watch(loop)

    def on_poll_start(self) -> None:
        self._confirm_leases()
        super().on_poll_start()
        if self._loop is not None and not self._in_protected_read:
            self._pulse.turn()
            self._wake_if_any_waits()

    def _wake_if_any_waits(self) -> None:
        """Keep the loop from sleeping while there is a message that may be handed over."""
        waits = any(channel.delivery.can_hand_over for channel in self._channels)
        if waits and not self._wakeup.is_set:
            self._wakeup.set()
            self._loop.add_reader(self._wakeup.fd, self._hand_over_in_turn)
        elif not waits and self._wakeup.is_set:
            self._let_sleep()

    def _hand_over_in_turn(self) -> None:
        for channel in list(self._channels):
            if channel.delivery.can_hand_over:
                channel.delivery.hand_over_in_turn()

    def _let_sleep(self) -> None:
        self._loop.remove(self._wakeup.fd)
        self._wakeup.clear()

    def close(self) -> None:
        if self._wakeup.is_set:
            self._let_sleep()
        self._wakeup.close()
        super().close()

    # --- for both ---------------------------------------------------------------------------

    def _confirm_leases(self) -> None:
        for channel in list(self._channels):
            channel.confirm_lease()

    def listen(self, channel: Any) -> None:
        """Subscribe to broadcasts at once; at the next poll, some would be lost."""
        if channel._in_listen:
            channel._subscribe()
        else:
            self._register_LISTEN(channel)

    def _register_LISTEN(self, channel: Any) -> None:  # noqa: N802 - the name is Kombu's
        """Poll also a socket that redis-py opened by itself in place of a broken one."""
        client = channel.subclient
        polled = self._chan_to_sock.get((channel, client, "LISTEN"))
        if polled is not None and polled is not getattr(client.connection, "_sock", None):
            del self._chan_to_sock[channel, client, "LISTEN"]
        super()._register_LISTEN(channel)

    def _register(self, channel: Any, client: Any, type: str) -> None:
        super()._register(channel, client, type)
        if type != "BRPOP":
            return

        def execute(*command: Any) -> Any:
            # Over this connection, which is new; the others may be half-open.
            client.connection.send_command(*command)
            return client.connection.read_response()

        channel.on_connect(execute)

    def check_reads(self) -> None:
        """Drop a connection whose reply is overdue, for Kombu before 5.7, which does not.

        The loop of those versions connects again only after an error, so one is raised.
        """
        now = time.monotonic()
        for channel in list(self._channels):
            connection, sent = channel._in_poll, channel._brpop_sent_at
            if not connection or sent is None or not channel.health_check_interval:
                continue
            if now - sent > channel.brpop_timeout + channel.health_check_interval:
                connection.disconnect()
                raise redis.ConnectionError(f"no reply for {now - sent:.0f} seconds")


class Transport(lists.Transport):  # type: ignore[misc]  # Kombu has no types
    """Run Kombu's Redis transport with streams in place of lists.

    Kombu creates it: `client` is its `Connection`, whose `transport_options` are checked.
    """

    Channel = Channel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        options.check(client.transport_options)
        self._refuse_other_transports(client)
        super().__init__(client, **kwargs)
        # A read blocks for so long; `drain_events` of Kombu would also sleep for it between two.
        self.polling_interval = None
        self.broadcasts: dict[str, tuple[str, str]] = {}
        self.leases = Leases()
        self.cycle = Poller(self.leases.pulse)
        self._pid = os.getpid()
        self._is_checked = False

    def _refuse_other_transports(self, client: Any) -> None:
        """Check the alternates, since the scheme of each decides which transport it gets."""
        for url in client.alt or ():
            scheme = url_to_parts(url).scheme if "://" in url else ""
            scheme = scheme.partition("+")[0]
            found = get_transport_cls(scheme) if scheme else None
            if found is not None and not issubclass(found, Transport):
                raise AlternateError(
                    f"failing over to {scheme}:// would leave this transport for "
                    f"{found.__module__}, which has other keys and would not see these messages; "
                    f"write every URL with "
                    f"redis-streams://, rediss-streams:// or sentinel-streams://"
                )

    def check_server_once(self, channel: Any) -> None:
        if not self._is_checked:
            check_server(channel.commands.client)
            self._is_checked = True

    def start_over_in_child(self) -> None:
        """Leave the poller to the parent after a fork; once, although every channel calls it."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.cycle = Poller(self.leases.pulse)

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        self.leases.close_idle()  # its client connects again for a late ack

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.cycle.use(loop)
        super().register_with_event_loop(connection, loop)
        if not hasattr(lists.MultiChannelPoller, "maybe_check_brpop_health"):
            every = connection.client.transport_options.get(
                "health_check_interval", lists.DEFAULT_HEALTH_CHECK_INTERVAL
            )
            if every:
                loop.call_repeatedly(every, self.cycle.check_reads)


class SentinelTransport(Transport):
    """Reach `sentinel-streams://host:26379;sentinel-streams://other:26379`; needs `master_name`."""

    default_port = 26379
    Channel = SentinelChannel
