"""Outbox in a Redis stream, in the transaction around it.

    handler's outputs ──▶ entries ──▶ XADD in the transaction's EXEC ──▶ relay

An entry is a CloudEvent, in binary mode unless told otherwise, and says in the field `:topic`
where it goes. `outbox_source` is what a relay reads it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.client import Pipeline

from conquiet import outbox
from conquiet.errors import ConfigError, ConquietError, HandlerError
from conquiet.message import Message, describe
from conquiet.redis.ambient import current
from conquiet.redis.commands import Commands
from conquiet.redis.entry import TOPIC_FIELD, Mode, encoder

STREAM = "conquiet:outbox"

Value: TypeAlias = bytes | str | int | float
Marshal: TypeAlias = Callable[[Message[Any]], Mapping[str, Value]]


class Outbox(outbox.Outbox):
    """Middleware: what handlers return becomes entries of `stream`, in the same EXEC.

    `mode="structured"` writes an event as JSON in one field. `marshal` writes fields of your
    own, for which a relay then needs a reader of your own; a field whose name begins with a
    colon belongs to conquiet. In a cluster, `stream` needs the hash tag of the other keys.

    Without a router: `add`, in a pipeline of one's own.
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
        unit = current("the outbox")
        for output in outputs:
            unit.queue("XADD", self._entry(output))

    def add(self, pipeline: Any, events: Iterable[Any], *, source: str = "") -> list[str]:
        """Queue events in the caller's MULTI … EXEC; gives their ids back, in order.

        `pipeline` is `client.pipeline()`, also of redis-py's asyncio, or what `commands(client)`
        gives inside a transaction. `events` are messages, or instances of event classes, whose
        `source` is then needed here or in the constructor.
        """
        messages = outbox.completed(events, source or self.source)
        entries = [self._entry(message) for message in messages]
        _check_queues(pipeline)
        for _, *entry in entries:
            pipeline.execute_command("XADD", *entry)
        return [message.id for message in messages]

    def _entry(self, output: Message[Any]) -> tuple[Any, ...]:
        try:
            topic = (output.topic or self.topic).encode()
            return (b"XADD", self._key, b"*", TOPIC_FIELD, topic, *self._encode(output))
        except (ConquietError, UnicodeEncodeError) as error:
            # Not the message that came in is wrong, but what its handler made of it.
            raise HandlerError(
                f"{describe(output.attributes)}: cannot be put into the outbox: {error}"
            ) from error


def _check_queues(pipeline: Any) -> None:
    """An entry that is sent at once, or outside a MULTI, is there also if the rest fails."""
    if isinstance(pipeline, Commands):
        return
    if not isinstance(pipeline, (Pipeline, AsyncPipeline)):
        raise ConfigError(
            f"an outbox cannot write by {type(pipeline).__name__}; give a pipeline, to execute"
            " after add(): client.pipeline()"
        )
    if pipeline.watching and not pipeline.explicit_transaction:
        raise ConfigError("a pipeline that watches sends at once; call its multi() before add()")
    said = vars(pipeline)  # `transaction` is also a method, and has another name in asyncio
    if not any(map(said.get, ("transaction", "is_transaction", "explicit_transaction"))):
        raise ConfigError("an event belongs to what it tells of: client.pipeline(transaction=True)")


def _flat(marshal: Marshal) -> Callable[[Message[Any]], Sequence[Any]]:
    def encode(message: Message[Any]) -> Sequence[Any]:
        fields: list[Any] = []
        for name, value in marshal(message).items():
            fields += (name, value)
        if not fields:
            raise HandlerError("marshal gave no fields")
        return fields

    return encode
