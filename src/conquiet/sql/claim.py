"""OutboxSource: what a relay reads from the generic outbox."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from sqlalchemy import URL, Engine

from conquiet.acking import Acking
from conquiet.errors import InvalidMessage
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.layout import Layout
from conquiet.sql.table_source import TableSource, checked_attempts
from conquiet.sql.tables import OUTBOX_TABLE, outbox_table

_attributes = msgspec.json.Decoder(dict[str, Any])


class Row(NamedTuple):
    """A claimed row of the outbox."""

    id: int
    topic: str
    event_type: str
    event_id: str
    key: str | None
    content_type: str
    data: bytes
    attributes: str
    attempts: int


def outbox_layout(table: str = OUTBOX_TABLE) -> Layout:
    return Layout(
        outbox_table(table),
        Row,
        order=("id",),
        start=("0",),
        key="key",
        first_key="",
        attempts="attempts",
        as_text=frozenset({"attributes"}),
    )


class OutboxSource(TableSource):
    """Claims rows of an outbox as messages; ack marks one published, nack leaves it.

    Several sources, in threads, processes or on machines, share the rows among them. `ordered`
    publishes the rows of a key in the order of their ids, by one relay at a time; a row that
    fails or is parked holds up its own key and no other. A failed row rests for a second, then
    twice as long each time, up to five minutes, while the others go on; it is parked at
    `max_attempts`.

    An idle `read` looks again every `poll` seconds, and at once when it is woken (`wakeup`).
    What is not settled within `hold` seconds is given up, so that a message which somebody
    forgot cannot keep a transaction open for ever.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        table: str = OUTBOX_TABLE,
        *,
        max_attempts: int = 10,
        ordered: bool = False,
        poll: float = 0.5,
        wakeup: bool = True,
        hold: float = 300.0,
    ) -> None:
        super().__init__(
            dialect.as_engine(engine),
            outbox_layout(table),
            max_attempts=checked_attempts(max_attempts),
            ordered=ordered,
            poll=poll,
            wakeup=wakeup,
            hold=hold,
        )

    def named(self, row: Row) -> dict[str, str]:
        return {"event_id": row.event_id, "event_type": row.event_type, "row": str(row.id)}

    def _message(self, row: Row, acking: Acking) -> Message[bytes]:
        """As it was stored; what its attributes lack is taken from the columns."""
        try:
            attributes: Attributes = _attributes.decode(row.attributes)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidMessage(f"attributes is not a JSON object: {error}") from error
        attributes.setdefault("id", row.event_id)
        attributes.setdefault("type", row.event_type)
        if row.content_type != "application/json":
            attributes.setdefault("datacontenttype", row.content_type)
        message = Message(
            row.data, attributes, acking=acking, topic=row.topic, deliveries=row.attempts + 1
        )
        if row.key and message.key != row.key:
            attributes["partitionkey"] = row.key
        return message
