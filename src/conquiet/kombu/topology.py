"""Declare, bind, count, purge and delete queues and exchanges, and route messages to queues."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport.virtual.base import UNDELIVERABLE_FMT, UndeliverableWarning
from kombu.transport.virtual.exchange import TopicExchange

from conquiet.kombu import scripts
from conquiet.kombu.connection import Commands
from conquiet.kombu.layout import BACK, GROUP, Keys, QueueSettings

logger = logging.getLogger(__name__)

_LIMITS = (("x-expires", 1), ("x-message-ttl", 0), ("x-max-length", 0))

_NAMES_AT_ONCE = 200

_CONTROL = ".pidbox"  # how Kombu ends the name of an exchange for control commands

Binding = tuple[str, str | None, str]
"""Routing key, pattern, queue."""


class Topology:
    """Own what one channel knows of queues and exchanges; Redis holds the rest.

    `declared` has the settings of the queues that this channel declared, so that it can declare
    them again after the server lost them. `expires_ms` has the x-expires of those queues and of
    the queues that it consumes. `auto_delete` names the queues to delete with their last consumer,
    `transient` those of them that are not durable either.
    `state` is Kombu's record of exchanges and bindings, shared by the channels of a transport.

    `broadcasts` maps queues to their exchange and routing key, likewise shared: a transient queue
    of a fanout exchange, or a queue of control commands, is no stream, but a subscription of its
    consumer by PUB/SUB. Control commands and events of Celery need no more, and every worker gets
    those of all others.
    """

    def __init__(
        self,
        commands: Commands,
        keys: Keys,
        state: Any,
        typeof: Callable[[str], Any],
        broadcasts: dict[str, tuple[str, str]],
        database: int,
        deadletter_queue: str | None = None,
        fanout_patterns: bool = True,
    ) -> None:
        self.typeof = typeof
        self.deadletter_queue = deadletter_queue
        self.declared: dict[str, QueueSettings] = {}
        self.expires_ms: dict[str, int] = {}
        self.auto_delete: set[str] = set()
        self.transient: set[str] = set()
        self.broadcasts = broadcasts
        self._database = database
        self._commands = commands
        self._keys = keys
        self._state = state
        self._topic = TopicExchange(None)
        self._fanout_patterns = fanout_patterns

    # --- queues -----------------------------------------------------------------------------

    def declare(
        self, queue: str, arguments: Any = None, auto_delete: bool = False, durable: bool = True
    ) -> None:
        """Declare a queue; raise `ChannelError` 406 if it was declared with other limits."""
        limits = (_limit(queue, arguments or {}, name, least) for name, least in _LIMITS)
        settings = QueueSettings(*limits)
        current = self._declare(queue, settings)
        if current:
            raise _inequivalent(queue, settings, QueueSettings.decode(current))
        self.declared[queue] = settings
        self.remember_expires(queue, settings.expires_ms)
        if auto_delete:
            self.auto_delete.add(queue)
        if auto_delete and not durable:
            self.transient.add(queue)

    def remember_expires(self, queue: str, milliseconds: int | None) -> None:
        if milliseconds:
            self.expires_ms[queue] = milliseconds
        else:
            self.expires_ms.pop(queue, None)

    def _declare(self, queue: str, settings: QueueSettings | None) -> Any:
        expires = "" if settings is None else settings.expires_ms or ""
        return self._commands.call(
            scripts.declare,
            [self._keys.queues, *self._keys.streams(queue)],
            [GROUP, queue, settings.encode() if settings else "", expires],
        )

    def restore(self, queue: str) -> None:
        """Declare and bind a consumed queue again if it was deleted, or the database flushed."""
        if self._commands.client.hexists(self._keys.queues, queue):
            return
        self._declare(queue, self.declared.get(queue))
        for exchange, routing_key, arguments in self._bindings_of(queue):
            self._store(exchange, self._bind(exchange, routing_key, queue, arguments))

    def has(self, queue: str) -> bool:
        return bool(self._commands.client.exists(*self._keys.streams(queue)))

    def size(self, queue: str) -> int:
        """Count the ready messages."""
        ready, _ = self._commands.call(scripts.size, self._keys.streams(queue), [GROUP, BACK])
        return int(ready)

    def purge(self, queue: str) -> int:
        """Remove the ready messages, and return how many they were."""
        total, streams = 0, self._keys.streams(queue)
        while True:
            args: list[scripts.Argument] = [GROUP, BACK, scripts.AT_ONCE]
            removed = int(self._commands.call(scripts.purge, streams, args))
            total += removed
            if removed < scripts.AT_ONCE:
                return total

    def delete(
        self,
        queue: str,
        *,
        asker: str = "",
        if_unused: bool = False,
        if_empty: bool = False,
        expired: bool = False,
    ) -> bool:
        """Delete a queue and its bindings in Redis; return False if a condition kept it.

        The consumer `asker` does not count as a user of the queue.
        """
        keys = [self._keys.queues, self._keys.exchanges, self._keys.leases]
        conditions = ["1" if asked else "" for asked in (if_unused, if_empty, expired)]
        return bool(
            self._commands.call(
                scripts.delete,
                keys + self._keys.streams(queue),
                [queue, self._keys.namespace, GROUP, asker, *conditions],
            )
        )

    def forget(self, queue: str) -> None:
        """Drop what this process knows of a queue that was deleted."""
        self.auto_delete.discard(queue)
        self.transient.discard(queue)
        self.broadcasts.pop(queue, None)
        self.declared.pop(queue, None)
        self.expires_ms.pop(queue, None)
        self._state.queue_bindings_delete(queue)

    # --- exchanges and bindings -------------------------------------------------------------

    def delete_exchange(self, exchange: str, if_unused: bool = False) -> None:
        """Remove the exchange and its bindings; the queues stay, as in AMQP."""
        table = self.table(exchange)
        if if_unused and table:
            return
        for routing_key, _, queue in table:
            self._state.binding_delete(queue, exchange, routing_key)
        self._commands.client.delete(self._keys.bindings(exchange))
        self._commands.client.srem(self._keys.exchanges, exchange)
        self._state.exchanges.pop(exchange, None)

    def bind(self, queue: str, exchange: str, routing_key: str, arguments: Any = None) -> None:
        self._state.exchanges.setdefault(exchange, _unknown_exchange())
        # Also if this connection bound it before: the queue may have expired since.
        others = [one for one in self._bindings_of(queue) if one[:2] != (exchange, routing_key)]
        self._state.binding_declare(queue, exchange, routing_key, arguments)
        is_fanout = self.typeof(exchange).type == "fanout"
        # A control command is for the workers that run, also if `control_queue_durable` is set.
        needs_no_replay = queue in self.transient or exchange.endswith(_CONTROL)
        if is_fanout and needs_no_replay and not others:
            self.broadcasts[queue] = exchange, routing_key
            self.delete(queue, if_unused=True, if_empty=True)
            return
        if self.broadcasts.pop(queue, None):  # with a second binding it needs a stream
            self._declare(queue, self.declared.get(queue))
            for name, key, given in others:
                self._store(name, self._bind(name, key, queue, given))
        self._store(exchange, self._bind(exchange, routing_key, queue, arguments))

    def _bindings_of(self, queue: str) -> list[tuple[str, str, Any]]:
        return list(self._state.queue_bindings(queue))

    def unbind(self, queue: str, exchange: str, routing_key: str, arguments: Any = None) -> None:
        self._state.binding_delete(queue, exchange, routing_key)
        self.broadcasts.pop(queue, None)
        binding = self._bind(exchange, routing_key, queue, arguments)
        self._commands.client.srem(self._keys.bindings(exchange), encode_binding(*binding))

    def _bind(self, exchange: str, routing_key: str, queue: str, arguments: Any) -> Binding:
        kind = self.typeof(exchange)
        binding: Binding = kind.prepare_bind(queue, exchange, routing_key, arguments)
        return binding

    def _store(self, exchange: str, binding: Binding) -> None:
        with self._commands.client.pipeline() as pipe:
            pipe.sadd(self._keys.exchanges, exchange)
            pipe.sadd(self._keys.bindings(exchange), encode_binding(*binding))
            pipe.execute()

    def table(self, exchange: str) -> list[Binding]:
        """Return the bindings of an exchange, those of other processes included."""
        return decode_bindings(self._commands.client.smembers(self._keys.bindings(exchange)))

    # --- routes -----------------------------------------------------------------------------

    def route(self, exchange: str, routing_key: str, default: str | None = None) -> list[Any]:
        """Find the queues of a routing key; the dead letter queue, if there is one, for none."""
        if not exchange:
            return [routing_key or default or self.deadletter_queue]
        kind = self.typeof(exchange)
        found = list(kind.lookup(self.table(exchange), exchange, routing_key, default))
        default = default if default is not None else self.deadletter_queue
        if found or default is None:
            return found
        text = UNDELIVERABLE_FMT.format(exchange=exchange, routing_key=routing_key)
        warnings.warn(UndeliverableWarning(text), stacklevel=2)
        return [default]

    def publish_fanout(self, exchange: str, routing_key: str, payload: str) -> list[str]:
        """Broadcast a message, and find the queues that have a stream for it."""
        with self._commands.client.pipeline(transaction=False) as pipe:
            pipe.smembers(self._keys.bindings(exchange))
            for channel in self.channels_of(exchange, routing_key):
                pipe.publish(channel, payload)
            members, *_ = pipe.execute()
        return self._fanout(decode_bindings(members), routing_key)

    def route_fanout(self, exchange: str, routing_key: str) -> list[str]:
        """Find the bound queues that have a stream."""
        return self._fanout(self.table(exchange), routing_key)

    def _fanout(self, table: list[Binding], routing_key: str) -> list[str]:
        """Find all bound queues; one bound with a routing key gets matching messages only."""
        return list({queue for bound, _, queue in table if self._matches(bound, routing_key)})

    def _matches(self, bound: str, routing_key: str) -> bool:
        if not bound or not routing_key or not self._fanout_patterns:
            return True
        return bool(self._topic._match(self._topic.key_to_pattern(bound), routing_key))

    def channels_of(self, exchange: str, routing_key: str) -> list[str]:
        """Name the PUB/SUB channels of a message: of its exchange, and of its first word there."""
        word = (routing_key or "").partition(".")[0]
        broadcasts, database = self._keys.broadcasts, self._database
        return [broadcasts(database, exchange), broadcasts(database, exchange, word)]

    def subscriptions_of(self, queue: str) -> list[str]:
        """Name the PUB/SUB channels that bring the broadcasts of a queue, and few others.

        Not one pattern: an ACL would have to allow it literally.
        """
        exchange, routing_key = self.broadcasts.get(queue, ("", ""))
        every, of_the_word = self.channels_of(exchange, routing_key)
        if not self._fanout_patterns or routing_key[:1] in ("", "#", "*"):
            return [every]
        return [of_the_word, self._keys.broadcasts(self._database, exchange, "")]

    def receivers(self, queues: Iterable[str], exchange: str, routing_key: str) -> list[str]:
        """Find those queues that get a broadcast."""
        found = ((queue, self.broadcasts.get(queue)) for queue in queues)
        return [
            queue
            for queue, bound in found
            if bound and bound[0] == exchange and self._matches(bound[1], routing_key)
        ]


def forget_expired(client: Any, keys: Keys, kept_ms: int, every_ms: int = 0) -> list[str]:
    """Remove the bindings of queues whose x-expires has passed, and later their names.

    Return the names. In slices, so that other clients get their turn however many there are; once
    in `every_ms`, however many consumers call it.
    """
    expired, forgotten = 0, []
    cursor: Any = "0"
    while True:
        args = [keys.namespace, kept_ms, every_ms, cursor, _NAMES_AT_ONCE]
        cursor, found, *gone = scripts.sweep.call(client, [keys.queues, keys.gone], args)
        expired += found
        forgotten += [name if isinstance(name, str) else name.decode() for name in gone]
        if int(cursor) == 0:
            break
    for exchange in client.smembers(keys.exchanges) if expired else ():
        name = exchange if isinstance(exchange, str) else exchange.decode()
        table = [keys.queues, keys.exchanges, keys.bindings(name)]
        cursor = scripts.unbind.call(client, table, [keys.namespace, name, 0, _NAMES_AT_ONCE])
        while int(cursor):
            args = [keys.namespace, name, cursor, _NAMES_AT_ONCE]
            cursor = scripts.unbind.call(client, table, args)
    return forgotten


def encode_binding(routing_key: str | None, pattern: str | None, queue: str) -> str:
    return json.dumps([routing_key or "", pattern or "", queue])


def decode_bindings(members: Iterable[bytes]) -> list[Binding]:
    return [found for member in members if (found := decode_binding(member)) is not None]


def decode_binding(member: bytes) -> Binding | None:
    """Decode a member of a binding table; None if it is malformed, so that publishing goes on."""
    try:
        routing_key, pattern, queue = json.loads(member)
    except (ValueError, TypeError, RecursionError):
        routing_key = pattern = queue = None
    if isinstance(routing_key, str) and isinstance(pattern, str) and isinstance(queue, str):
        return routing_key, pattern, queue
    logger.warning("skipped a malformed binding: %.100r", member)
    return None


def _unknown_exchange() -> dict[str, Any]:
    return {
        "type": "direct",
        "durable": False,
        "auto_delete": False,
        "arguments": {},
        "table": [],
    }


def _inequivalent(queue: str, wanted: QueueSettings, current: QueueSettings) -> ChannelError:
    """Describe the first limit in which two declarations of a queue differ, as RabbitMQ does."""
    name, received, found = next(
        (name, received, found)
        for (name, _), received, found in zip(_LIMITS, wanted, current, strict=True)
        if received != found
    )
    return ChannelError(
        f"PRECONDITION_FAILED - inequivalent arg {name!r} for queue {queue!r}: received "
        f"{_or_none(received)}, but current is {_or_none(found)}; declare it with the same "
        f"arguments everywhere, or delete it first: conquiet kombu clean --delete-queue {queue}",
        (50, 10),
        "Channel.queue_declare",
        "406",
    )


def _or_none(limit: int | None) -> str:
    return "none" if limit is None else str(limit)


def _limit(queue: str, arguments: Any, name: str, least: int) -> int | None:
    """Check an argument of a queue; None if it was not given."""
    value = arguments.get(name)
    if value is None:
        return None
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
    return found
