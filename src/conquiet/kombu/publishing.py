"""Publishing: the queues that a message goes to, and one script that puts it there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from kombu.transport.virtual.base import UNDELIVERABLE_FMT, UndeliverableWarning
from kombu.utils.json import dumps

from conquiet.kombu import scripts
from conquiet.kombu.keys import BACK, GROUP
from conquiet.kombu.topology import Topology


class Publishing(Topology):
    """Direct, topic and fanout, one round trip for the message whatever the number of queues."""

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        self._plain: set[str] = set()
        self._script_is_there = False
        super().__init__(connection, **kwargs)

    def basic_publish(self, message: Any, exchange: str, routing_key: str, **kwargs: Any) -> Any:
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            return self._put(routing_key, message, **kwargs)
        kind = self.typeof(exchange)
        if kind.type == "fanout":
            return self._put_fanout(exchange, message, routing_key, **kwargs)
        if kind.type not in ("direct", "topic"):  # one that the user has added
            return kind.deliver(message, exchange, routing_key, **kwargs)
        queues = self._lookup(exchange, routing_key)
        if kind.type == "topic":
            queues = [queue for queue in queues if queue and queue != self.deadletter_queue]
        return self._send(queues, message, **kwargs)

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        self._send((queue,), message, **kwargs)

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **kwargs: Any) -> None:
        queues = self._fanout_queues_of(exchange, routing_key)
        self._send(queues, message, declared_only=True, **kwargs)

    def _fanout_queues_of(self, exchange: str, routing_key: str) -> list[str]:
        """All that are bound; one bound with a routing key gets only what fits it."""
        table = self.get_table(exchange)
        if not routing_key or not self.fanout_patterns:
            return list({queue for _, _, queue in table})
        topic = self.exchange_types["topic"]
        return list(
            {
                queue
                for bound, _, queue in table
                if not bound or topic._match(topic.key_to_pattern(bound), routing_key)
            }
        )

    def _send(
        self,
        queues: Iterable[str],
        message: Any,
        declared_only: bool = False,
        _publish_batch: Any = None,
        **kwargs: Any,
    ) -> None:
        names = list(queues)
        if not names:
            return
        priority = self.priority(self._get_message_priority(message))
        stream = self.keys.stream
        lives = _milliseconds(message["properties"].get("expiration"))
        batch = _publish_batch
        if batch is not None and not lives and not declared_only and self._are_plain(names):
            payload = dumps(message)
            for queue in names:
                batch.add("execute_command", "XADD", stream(queue, priority), "*", "m", payload)
            return
        keys = [self.keys.queues, *(stream(queue, priority) for queue in names)]
        args: list[scripts.Argument] = [
            GROUP,
            self.keys.namespace,
            dumps(message),
            lives,
            "1" if declared_only else "",
            BACK,
            *names,
        ]
        if batch is not None:
            if not self._script_is_there:
                # A pipeline cannot send the script again, so it must be there beforehand.
                self.commands.script_load(scripts.publish.body)
                self._script_is_there = True
            batch.add("execute_command", *scripts.publish.by_hash(keys, args))
            return
        for gone in self.call(scripts.publish, keys, args):
            self._delete_queue(gone.decode(), expired=True)

    def create_publish_batch(self, max_size: int) -> Any:
        self._plain.clear()
        self._script_is_there = False
        return super().create_publish_batch(max_size)

    def _are_plain(self, queues: list[str]) -> bool:
        """Whether they have no settings, so that XADD will do; asked once in a batch."""
        return self._plain.issuperset(queues) or all(self._is_plain(queue) for queue in queues)

    def _is_plain(self, queue: str) -> bool:
        with self.commands.pipeline() as pipe:
            pipe.hsetnx(self.keys.queues, queue, "")
            pipe.hget(self.keys.queues, queue)
            _, settings = pipe.execute()
        if settings:
            return False
        self._plain.add(queue)
        return True

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        if not exchange:
            return [routing_key or default or self.deadletter_queue]
        kind = self.typeof(exchange)
        found = list(kind.lookup(self.get_table(exchange), exchange, routing_key, default))
        default = default if default is not None else self.deadletter_queue
        if found or default is None:
            return found
        text = UNDELIVERABLE_FMT.format(exchange=exchange, routing_key=routing_key)
        warnings.warn(UndeliverableWarning(text), stacklevel=2)
        return [default]


def _milliseconds(expiration: Any) -> str:
    """Kombu writes the property `expiration` in milliseconds, as AMQP wants it."""
    if expiration is None:
        return ""
    try:
        return str(max(int(expiration), 0))
    except (TypeError, ValueError):
        return ""
