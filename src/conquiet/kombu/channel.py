"""Channel: what Kombu talks to; its parts are in the modules that it is put together from."""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from typing import Any

from kombu.transport import redis as lists
from kombu.transport import virtual

from conquiet.kombu.consuming import Consuming
from conquiet.kombu.options import DEFAULT_LEASE
from conquiet.kombu.qos import QoS

# Their meaning is gone, or they would switch off what the transport is for.
_WITHOUT_MEANING = {"ack_emulation", "sep", "fanout_prefix"}

_living: weakref.WeakSet[Channel] = weakref.WeakSet()


class Channel(Consuming):
    """A channel over Redis Streams."""

    QoS = QoS

    lease_seconds = DEFAULT_LEASE
    delivery_limit = 0
    consumer_id: str | None = None
    autoclaim_interval: float | None = None
    prefetch_count = 0
    _closing: bool

    from_transport_options = (
        *(name for name in lists.Channel.from_transport_options if name not in _WITHOUT_MEANING),
        "delivery_limit",
        "consumer_id",
        "autoclaim_interval",
        "prefetch_count",
    )

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        options = connection.client.transport_options
        self.lease_seconds = options.get("lease") or DEFAULT_LEASE
        super().__init__(connection, **kwargs)
        self.consumer = self._new_name()
        self.forget_consuming()
        try:
            connection.check_server_once(self)
        except BaseException:
            self.close()
            raise
        if self.prefetch_count:
            self.qos.prefetch_count = int(self.prefetch_count)
        _living.add(self)

    def _new_name(self) -> str:
        """Never used before: another's entries must not look like ours."""
        name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        return f"{self.consumer_id}:{name}" if self.consumer_id else name

    def close(self) -> None:
        if not self.closed and not self._closing:
            self._closing = True
            for tag in list(self._consumers):
                self._basic_cancel(tag)
            self.end_read()
            if self._qos is not None:
                self._qos.restore_unacked_once()
            else:
                self.leave()
        super().close()

    def _after_fork(self) -> None:
        """In a forked child: the sockets, the poller and all that was fetched are the parent's."""
        self._registered = False  # so that closing our copies does not reach the parent's poller
        super()._after_fork()
        self.__dict__.pop("client", None)
        self.consumer = self._new_name()
        self._in_poll = None
        takers = self._takers
        self.forget_consuming()
        self._takers = takers  # a child that goes on consuming gets a lease then
        if self._qos is not None:
            self._qos._delivered.clear()
            self._qos._dirty.clear()
        if self.connection is not None:
            self.connection.begin_anew_in_child()
            self.connection.cycle.add(self)
            self._registered = True

    # Kombu's fanout by PUB/SUB is not used; its queues are streams like the others.

    def _subscribe(self) -> None:
        pass

    def _unsubscribe_from(self, queue: str) -> None:
        pass

    def _restore(self, message: virtual.Message, leftmost: bool = False) -> None:
        self.qos.reject(message.delivery_tag, requeue=True)


def _renew_in_child() -> None:
    for channel in list(_living):
        if not channel.closed:
            channel._after_fork()


os.register_at_fork(after_in_child=_renew_in_child)
