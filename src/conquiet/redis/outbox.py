"""Outbox in a Redis stream, in the transaction around it.

    handler's outputs ──▶ entries ──▶ XADD in the transaction's EXEC ──▶ relay

An entry is a CloudEvent, in binary mode by default, with its topic in the field `:topic`. A relay
reads it by `OutboxSource`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.client import Pipeline

from conquiet import outbox
from conquiet.errors import ConfigError, ConquietError, HandlerError
from conquiet.message import Message, describe
from conquiet.redis.adapter import Commands
from conquiet.redis.entry import TOPIC_FIELD, Mode, Unmarshal, encoder
from conquiet.redis.source import StreamSource
from conquiet.redis.transaction import current_unit

STREAM = "conquiet:outbox"

Value: TypeAlias = bytes | str | int | float
Marshal: TypeAlias = Callable[[Message[Any]], Mapping[str, Value]]


class Outbox(outbox.Outbox):
    """Middleware: adds the events that handlers return to `stream`, in the same EXEC.

    `mode="structured"` writes an event as JSON in one field. `marshal` writes fields of your own,
    which a relay reads by `OutboxSource(unmarshal=…)`; field names that begin with a colon belong
    to conquiet. In a cluster, `stream` needs the hash tag of the other keys.

    Without a router, use `add` in a pipeline of your own.
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
        self._key = stream.encode()
        self._encode = encoder(mode) if marshal is None else _flat(marshal)

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        """Queue the XADDs of events in the ambient transaction."""
        unit = current_unit("the outbox")
        for output in outputs:
            unit.queue("XADD", self._entry(output))

    def add(self, pipeline: Any, events: Iterable[Any], *, source: str = "") -> list[str]:
        """Queue events in the caller's MULTI … EXEC; return their ids, in order.

        `pipeline` is `client.pipeline()`, also of redis-py's asyncio, or `commands(client)` inside
        a transaction. `events` are messages, or instances of event classes, whose `source` is then
        needed here or in the constructor.
        """
        messages = outbox.complete_all(events, source or self.source)
        entries = [self._entry(message) for message in messages]
        _check_queues(pipeline)
        for _, *entry in entries:
            pipeline.execute_command("XADD", *entry)
        return [message.id for message in messages]

    def _entry(self, output: Message[Any]) -> tuple[Any, ...]:
        return (b"XADD", self._key, b"*", *self.fields(output))

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


def _check_queues(pipeline: Any) -> None:
    """Refuse a pipeline that would send an entry outside the MULTI of the other writes."""
    if isinstance(pipeline, Commands):
        return
    if not isinstance(pipeline, (Pipeline, AsyncPipeline)):
        raise ConfigError(
            f"an outbox cannot write by {type(pipeline).__name__}; give a pipeline, to execute"
            " after add(): client.pipeline()"
        )
    if pipeline.watching and not pipeline.explicit_transaction:
        raise ConfigError("a pipeline that watches sends at once; call its multi() before add()")
    settings = vars(pipeline)  # `transaction` is also a method; asyncio names it differently
    if not any(map(settings.get, ("transaction", "is_transaction", "explicit_transaction"))):
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
