"""Publish a message to the queues of its route, with one script whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kombu.utils.json import dumps

from conquiet.kombu import scripts
from conquiet.kombu.connection import Commands
from conquiet.kombu.layout import BACK, GROUP, Keys, QueueSettings
from conquiet.kombu.topology import Topology


class Publisher:
    """Send messages at once, or collect their commands in a publish batch of Kombu.

    A batch is a pipeline, so it cannot resend a script that the server lacks, and it cannot look
    up the settings of a queue. The publisher remembers for the length of a batch which queues have
    no settings, and whether the script was loaded.
    """

    def __init__(
        self,
        commands: Commands,
        keys: Keys,
        topology: Topology,
        priority_of: Callable[[Any], int],
    ) -> None:
        self._commands = commands
        self._keys = keys
        self._topology = topology
        self._priority_of = priority_of
        self._plain: set[str] = set()
        self._is_loaded = False

    def publish(self, message: Any, exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Route a message through its exchange, or to the queue called `routing_key`."""
        if not exchange:
            return self.send((routing_key,), message, **kwargs)
        topology = self._topology
        kind = topology.typeof(exchange)
        if kind.type == "fanout":
            return self.publish_fanout(message, exchange, routing_key, **kwargs)
        if kind.type not in ("direct", "topic"):  # a type that the application registered
            return kind.deliver(message, exchange, routing_key, **kwargs)
        queues = topology.route(exchange, routing_key)
        if kind.type == "topic":
            queues = [queue for queue in queues if queue and queue != topology.deadletter_queue]
        return self.send(queues, message, **kwargs)

    def publish_fanout(
        self,
        message: Any,
        exchange: str,
        routing_key: str,
        _publish_batch: Any = None,
        **kwargs: Any,
    ) -> None:
        """Broadcast to the consumers of transient queues, and send to the other queues."""
        topology, payload = self._topology, dumps(message)
        if _publish_batch is None:
            queues = topology.publish_fanout(exchange, routing_key, payload)
        else:
            queues = topology.route_fanout(exchange, routing_key)
            for channel in topology.channels_of(exchange, routing_key):
                _publish_batch.add("publish", channel, payload)
        self.send(queues, message, declared_only=True, _publish_batch=_publish_batch, **kwargs)

    def send(
        self,
        queues: Iterable[str],
        message: Any,
        declared_only: bool = False,
        _publish_batch: Any = None,
        **kwargs: Any,
    ) -> None:
        """Append a message to the streams of the queues, or to the batch if one is given."""
        names = list(queues)
        if not names:
            return
        priority = self._priority_of(message)
        stream = self._keys.stream
        lives = _milliseconds(message["properties"].get("expiration"))
        batch = _publish_batch
        if batch is not None and not lives and not declared_only and self._are_plain(names):
            payload = dumps(message)
            for queue in names:
                batch.add("execute_command", "XADD", stream(queue, priority), "*", "m", payload)
            return
        keys = [self._keys.queues, *(stream(queue, priority) for queue in names)]
        args: list[scripts.Argument] = [
            GROUP,
            self._keys.namespace,
            dumps(message),
            lives,
            "1" if declared_only else "",
            BACK,
            *names,
        ]
        if batch is not None:
            self._load()
            batch.add("execute_command", *scripts.publish.by_hash(keys, args))
            return
        for gone in self._commands.call(scripts.publish, keys, args):
            self._topology.delete(gone.decode(), expired=True)

    def begin_batch(self) -> None:
        """Forget the queues without settings: another process may have declared some since."""
        self._plain.clear()
        self._is_loaded = False

    def _load(self) -> None:
        if not self._is_loaded:
            self._commands.client.script_load(scripts.publish.body)
            self._is_loaded = True

    def _are_plain(self, queues: list[str]) -> bool:
        """Check that no queue has settings, so that XADD is enough."""
        return self._plain.issuperset(queues) or all(self._is_plain(queue) for queue in queues)

    def _is_plain(self, queue: str) -> bool:
        with self._commands.client.pipeline() as pipe:
            pipe.hsetnx(self._keys.queues, queue, "")
            pipe.hget(self._keys.queues, queue)
            _, settings = pipe.execute()
        if QueueSettings.decode(settings) != QueueSettings():
            return False
        self._plain.add(queue)
        return True


def _milliseconds(expiration: Any) -> str:
    """Convert the property `expiration`, which Kombu writes in milliseconds, as AMQP wants it."""
    if expiration is None:
        return ""
    try:
        return str(max(int(expiration), 0))
    except (TypeError, ValueError):
        return ""
