"""Topology: queues, exchanges and the bindings between them, as Redis knows them."""

from __future__ import annotations

import json
import logging
from typing import Any

from amqp.protocol import queue_declare_ok_t  # type: ignore[import-untyped]  # amqp has none
from kombu.exceptions import ChannelError
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from conquiet.kombu import scripts
from conquiet.kombu.connecting import Connecting
from conquiet.kombu.keys import BACK, GROUP

logger = logging.getLogger(__name__)

_LIMITS = (("x-expires", 1), ("x-message-ttl", 0), ("x-max-length", 0))

Binding = tuple[str, str | None, str]
"""Routing key, pattern, queue."""


class Topology(Connecting):
    """Declaring, binding, counting, purging and deleting."""

    consumer: str

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._declared: dict[str, str] = {}  # queue -> settings, as the scripts want them
        self._expires: dict[str, int] = {}  # queue -> milliseconds of x-expires
        # Kombu's own is one for all channels of the process, and would have us listen to PUB/SUB.
        self._fanout_queues: dict[str, Any] = {}

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            self._new_queue(queue, **kwargs)
        elif not self._has_queue(queue):
            vhost = self.connection.client.virtual_host or "/"
            raise ChannelError(
                f"NOT_FOUND - no queue {queue!r} in vhost {vhost!r}",
                (50, 10),
                "Channel.queue_declare",
                "404",
            )
        return queue_declare_ok_t(queue, self._size(queue), self._consumers_of(queue))

    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:
        if auto_delete:
            self.auto_delete_queues.add(queue)
        arguments = kwargs.get("arguments") or {}
        expires, ttl, most = (_limit(queue, arguments, name, least) for name, least in _LIMITS)
        if expires:
            self._expires[queue] = int(expires)
        else:
            self._expires.pop(queue, None)
        settings = f"{expires}|{ttl}|{most}"
        self._declare(queue, "" if settings == "||" else settings)

    def _declare(self, queue: str, settings: str) -> None:
        self._declared[queue] = settings
        self.call(
            scripts.declare,
            [self.keys.queues, *self.keys.streams(queue)],
            [GROUP, queue, settings, settings.partition("|")[0]],
        )

    def declare_if_lost(self, queue: str) -> None:
        """Somebody emptied the database under us, or deleted a queue that is consumed."""
        if self.commands.hexists(self.keys.queues, queue):
            return
        self._declare(queue, self._declared.get(queue, ""))
        for exchange, routing_key, arguments in list(self.state.queue_bindings(queue)):
            self._queue_bind(exchange, *self._meta(exchange, routing_key, queue, arguments))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self.commands.exists(*self.keys.streams(queue)))

    def _consumers_of(self, queue: str) -> int:
        return 0  # as all virtual transports of Kombu answer

    def _size(self, queue: str) -> int:
        ready, _ = self.call(scripts.size, self.keys.streams(queue), [GROUP, BACK])
        return int(ready)

    def _purge(self, queue: str) -> int:
        total, streams = 0, self.keys.streams(queue)
        while True:
            removed = int(self.call(scripts.purge, streams, [GROUP, BACK, scripts.AT_ONCE]))
            total += removed
            if removed < scripts.AT_ONCE:
                return total

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        if self._delete_queue(queue, if_unused=if_unused, if_empty=if_empty):
            self.forget_queue(queue)

    def forget_queue(self, queue: str) -> None:
        self.auto_delete_queues.discard(queue)
        self._declared.pop(queue, None)
        self._expires.pop(queue, None)
        self.state.queue_bindings_delete(queue)

    def _delete_queue(
        self, queue: str, *, if_unused: bool = False, if_empty: bool = False, expired: bool = False
    ) -> bool:
        keys = [self.keys.queues, self.keys.exchanges, self.keys.leases]
        asks = ["1" if asked else "" for asked in (if_unused, if_empty, expired)]
        return bool(
            self.call(
                scripts.delete,
                keys + self.keys.streams(queue),
                [queue, self.keys.namespace, GROUP, self.consumer, *asks],
            )
        )

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Remove the exchange and its bindings; the queues stay, as in AMQP."""
        table = self.get_table(exchange)
        if if_unused and table:
            return
        for routing_key, _, queue in table:
            self.state.binding_delete(queue, exchange, routing_key)
        self.commands.delete(self.keys.bindings(exchange))
        self.commands.srem(self.keys.exchanges, exchange)
        self.state.exchanges.pop(exchange, None)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        exchange = exchange or "amq.direct"
        self.state.exchanges.setdefault(exchange, _unknown_exchange())
        # Even if this connection bound it before: the queue may have expired since.
        self.state.binding_declare(queue, exchange, routing_key, arguments)
        self._queue_bind(exchange, *self._meta(exchange, routing_key, queue, arguments))

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        meta = self._meta(exchange, routing_key, queue, arguments)
        self.commands.srem(self.keys.bindings(exchange), _member(*meta))

    def _meta(self, exchange: str, routing_key: str, queue: str, arguments: Any) -> Binding:
        meta: Binding = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
        return meta

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        with self.commands.pipeline() as pipe:
            pipe.sadd(self.keys.exchanges, exchange)
            pipe.sadd(self.keys.bindings(exchange), _member(routing_key, pattern, queue))
            pipe.execute()

    def get_table(self, exchange: str) -> list[Binding]:
        members = self.commands.smembers(self.keys.bindings(exchange))
        return [found for member in members if (found := _binding(member)) is not None]

    # Kombu 5.7 keeps the tables of expiring queues alive by these; ours go with their queue.

    def maybe_refresh_binding_expiry(self) -> None:
        pass

    def sweep_bindings(self, limit: int = 100) -> int:
        return 0


def _member(routing_key: str | None, pattern: str | None, queue: str) -> str:
    return json.dumps([routing_key or "", pattern or "", queue])


def _binding(member: bytes) -> Binding | None:
    """What `_member` wrote; what a stranger put there must not stop whoever publishes."""
    try:
        routing_key, pattern, queue = json.loads(member)
    except (ValueError, TypeError, RecursionError):
        routing_key = pattern = queue = None
    if isinstance(routing_key, str) and isinstance(pattern, str) and isinstance(queue, str):
        return routing_key, pattern, queue
    logger.warning("no binding, and passed over: %.100r", member)
    return None


def _unknown_exchange() -> dict[str, Any]:
    return {
        "type": "direct",
        "durable": False,
        "auto_delete": False,
        "arguments": {},
        "table": [],
    }


def _limit(queue: str, arguments: Any, name: str, least: int) -> str:
    """Milliseconds or a number as the scripts want it; empty if there is none."""
    value = arguments.get(name)
    if value is None:
        return ""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        found = -1
    if found < least:
        raise ChannelError(
            f"PRECONDITION_FAILED - {name} of queue {queue!r} is {value!r}; it must be a whole "
            f"number, {least} or more",
            (50, 10),
            "Channel.queue_declare",
            "406",
        )
    return str(found)
