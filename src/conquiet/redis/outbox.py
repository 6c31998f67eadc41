"""Outbox in a Redis stream, in the transaction around it.

    handler's outputs ──▶ entries ──▶ XADD in the transaction's EXEC ──▶ relay
                             └ delayed: held in a sorted set ──when due──▶ XADD

An entry is a CloudEvent, in binary mode by default, with its topic in the field `:topic`. A relay
reads it by `OutboxSource`.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.asyncio.cluster import ClusterPipeline as AsyncClusterPipeline
from redis.client import Pipeline
from redis.cluster import ClusterPipeline

from conquiet import outbox
from conquiet.delay import delay_all, due_of, is_delayed
from conquiet.errors import ConfigError, ConquietError, HandlerError
from conquiet.message import Message, describe
from conquiet.redis.adapter import Commands
from conquiet.redis.entry import TOPIC_FIELD, Mode, Unmarshal, encoder
from conquiet.redis.loop_client import is_async
from conquiet.redis.promotion import Delayed, Promoter
from conquiet.redis.source import StreamSource
from conquiet.redis.transaction import current_unit
from conquiet.redis.wire import Wire

STREAM = "conquiet:outbox"

Value: TypeAlias = bytes | str | int | float
Marshal: TypeAlias = Callable[[Message[Any]], Mapping[str, Value]]


class Outbox(outbox.Outbox):
    """Middleware: adds the events that handlers return to `stream`, in the same EXEC.

    `mode="structured"` writes an event as JSON in one field. `marshal` writes fields of your own,
    which a relay reads by `OutboxSource(unmarshal=…)`; field names that begin with a colon belong
    to conquiet. In a cluster, `stream` needs the hash tag of the other keys.

    Without a router, use `add` in a pipeline of your own.

    `topic` is where a relay publishes the events; `source` is the source of events that name none.
    """

    def __init__(
        self,
        topic: str,
        stream: str = STREAM,
        *,
        mode: Mode = "binary",
        marshal: Marshal | None = None,
        source: str = "",
    ) -> None:
        super().__init__(topic)
        if not stream:
            raise ConfigError("an outbox needs the name of its stream, such as 'outbox:{orders}'")
        self.stream = stream
        self.source = source
        self.delayed = Delayed(stream)
        self._key = stream.encode()
        self._encode = encoder(mode) if marshal is None else _flat(marshal)

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        """Queue the XADDs of events in the ambient transaction, or scripts that hold them."""
        unit = current_unit("the outbox")
        for output in outputs:
            command = self.command(output)
            unit.queue(command[0].decode(), command)

    def add(
        self,
        pipeline: Any,
        events: Iterable[Any],
        *,
        source: str = "",
        at: datetime | None = None,
        after: timedelta | float | None = None,
    ) -> list[str]:
        """Queue events in the caller's MULTI … EXEC; return their ids, in order.

        `pipeline` is `client.pipeline()`, also of redis-py's asyncio, or `commands(client)` inside
        a transaction; of a RedisCluster it is `client.pipeline(transaction=True)`, and the stream
        has the hash tag of the other keys. `events` are messages, or instances of event classes,
        whose `source` is then needed here or in the constructor.

        `at`, a datetime with a time zone, or `after`, seconds or a timedelta, is when they are
        published at the earliest, by the clock of Redis; `Message.notbefore` comes first.
        """
        messages = outbox.complete_all(events, source or self.source)
        delay_all(messages, due_of(at, after))
        commands = [self.command(message) for message in messages]
        _check_queues(pipeline)
        for name, *arguments in commands:
            pipeline.execute_command(name.decode(), *arguments)
        return [message.id for message in messages]

    def cancel(self, client: Any, id: str) -> bool | Awaitable[bool]:
        """Delete a delayed event at once; return whether it still waited.

        `id` is that of the event. False means too late: it is published, or about to be, or there
        never was one. With a client of redis-py's asyncio, await the result.
        """
        command = self.delayed.cancel(id)
        if is_async(client):
            return _is_positive(client.execute_command(*command))
        wire = Wire(client)  # sent once: a second try would find nothing to cancel
        try:
            return int(wire.call(self.delayed.times, *command)) > 0
        finally:
            wire.close()

    def command(self, output: Message[Any]) -> tuple[Any, ...]:
        """Return the command that stores an event: an XADD, or a script that holds it."""
        fields = self.fields(output)
        if output.notbefore is not None and is_delayed(output):
            return self.delayed.hold(output.id, output.notbefore, fields)
        return (b"XADD", self._key, b"*", *fields)

    def fields(self, output: Message[Any]) -> tuple[Any, ...]:
        """Return names and values of the entry of an event, in turn."""
        try:
            topic = (output.topic or self.topic_of(output)).encode()
            return (TOPIC_FIELD, topic, *self._encode(output))
        except (ConquietError, UnicodeEncodeError) as error:
            # The fault is the handler's, not that of the message that came in.
            raise HandlerError(
                f"{describe(output.attributes)}: cannot be put into the outbox: {error}"
            ) from error


async def _is_positive(reply: Awaitable[Any]) -> bool:
    return int(await reply) > 0


def _check_queues(pipeline: Any) -> None:
    """Refuse a pipeline that would send an entry outside the MULTI of the other writes."""
    if isinstance(pipeline, Commands):
        return
    if isinstance(pipeline, (ClusterPipeline, AsyncClusterPipeline)):
        # A cluster's pipeline keeps this state in its strategy, under private names.
        settings = vars(pipeline._execution_strategy)
        watches = settings.get("_watching")
        is_transaction = "_explicit_transaction" in settings
        calls_multi = settings.get("_explicit_transaction")
    elif isinstance(pipeline, (Pipeline, AsyncPipeline)):
        settings = vars(pipeline)  # `transaction` is also a method; asyncio names it differently
        watches, calls_multi = pipeline.watching, pipeline.explicit_transaction
        is_transaction = calls_multi or any(map(settings.get, ("transaction", "is_transaction")))
    else:
        raise ConfigError(
            f"an outbox cannot write by {type(pipeline).__name__}; give a pipeline, to execute"
            " after add(): client.pipeline()"
        )
    if watches and not calls_multi:
        raise ConfigError("a pipeline that watches sends at once; call its multi() before add()")
    if not is_transaction:
        raise ConfigError(
            "an event must be committed with the writes that it reports:"
            " client.pipeline(transaction=True)"
        )


def _flat(marshal: Marshal) -> Callable[[Message[Any]], Sequence[Any]]:
    def encode(message: Message[Any]) -> Sequence[Any]:
        fields: list[Any] = []
        for name, value in marshal(message).items():
            fields += (name, value)
        if not fields:
            raise HandlerError("marshal gave no fields")
        return fields

    return encode


class OutboxSource(StreamSource):
    """Reads an outbox for a relay; acked entries are deleted.

    The consumer is named after the host, so that a relay that crashed goes on with its entries.
    Name consumers yourself if several relays of one outbox share a host: two of one name deliver
    twice.

    `unmarshal` is the reverse of `Outbox(marshal=…)`: from the fields, as bytes by their names, to
    a message, whose `topic` is that of the outbox unless it sets one. An entry for which it raises
    is tried again, then goes to the dead letters.

    `client`, `stream`, `group`, `consumer`, `batch_size`, `block`, `claim_interval`, `lease`,
    `max_attempts` and `dead_letters` are those of `StreamSource`, with defaults for a relay.
    """

    def __init__(
        self,
        client: Any,
        stream: str,
        *,
        group: str = "outbox-publisher",
        consumer: str | None = None,
        batch_size: int = 100,
        block: float = 1.0,
        claim_interval: float = 30.0,
        lease: float = 60.0,
        max_attempts: int = 10,
        dead_letters: str | None = None,
        unmarshal: Unmarshal | None = None,
    ) -> None:
        super().__init__(
            client,
            stream,
            group,
            consumer or socket.gethostname(),
            lease=lease,
            claim_interval=claim_interval,
            block=block,
            batch_size=batch_size,
            max_attempts=max_attempts,
            dead_letters=dead_letters,
            delete=True,
            unmarshal=unmarshal,
        )
        self._promoter = Promoter(self._wire, stream)

    def _read(self, limit: int, end: float) -> list[Message[Any]]:
        self._promoter.promote(limit)
        messages = super()._read(limit, end)
        if not messages:
            self._promoter.pause(end)
        return messages

    def _longest_wait(self, end: float) -> float:
        return min(super()._longest_wait(end), self._promoter.longest_block())
