"""EventSource: what a relay reads from `outbox_events`.

A row at `max_attempts` is *parked*: unpublished, and claimed no more. It knows no catalog: types
are text to it, and a row of a type that it has never heard of goes out like any other.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import URL, Engine

from conquiet.acking import Acking
from conquiet.codec import SPEC_VERSION
from conquiet.errors import InvalidMessage
from conquiet.events.check import canonical
from conquiet.events.layout import Row, events_layout
from conquiet.events.table import EVENTS_TABLE
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.outbox_source import TableSource, checked_attempts

TOPIC = "domain-events"


class EventSource(TableSource):
    """Claims rows of `outbox_events` as messages; ack marks one published, nack leaves it.

    Several sources, in threads, processes or on machines, share the rows among them, and keep no
    order among each other, unless they are `ordered`: then the rows of an aggregate go out in
    their order, by one relay at a time, and one that fails or is parked holds up its aggregate
    and no other. A failed row rests for a second, then twice as long each time, up to five
    minutes, while the others go on.

    A message has the attributes `event_id`, `event_type`, `aggregate_type`, `aggregate_id` and
    `created_at`, besides CloudEvents' own. CloudEvents allows no `_` in a name, and sinks that
    write binary CloudEvents (Redis Streams, HTTP) refuse it: with `cloudevents=True` the same
    five are `id`, `type`, `aggregatetype`, `subject` and `time` alone.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        table: str = EVENTS_TABLE,
        *,
        topic: str = TOPIC,
        source: str = "/outbox_events",
        max_attempts: int = 10,
        ordered: bool = False,
        poll: float = 0.5,
        wakeup: bool = True,
        hold: float = 300.0,
        cloudevents: bool = False,
    ) -> None:
        super().__init__(
            dialect.as_engine(engine),
            events_layout(table, checked_attempts(max_attempts)),
            max_attempts=max_attempts,
            ordered=ordered,
            poll=poll,
            wakeup=wakeup,
            hold=hold,
        )
        self.topic = topic
        self.source = source
        self.cloudevents = cloudevents

    def named(self, row: Row) -> dict[str, str]:
        return {
            "event_id": str(row.id),
            "event_type": row.event_type,
            "aggregate_type": row.aggregate_type,
            "aggregate_id": str(row.aggregate_id),
        }

    def _message(self, row: Row, acking: Acking) -> Message[bytes]:
        try:
            # JSONB has its own spaces and order of keys; what goes out is the same everywhere.
            data = canonical(msgspec.json.decode(row.payload_json))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMessage(f"payload_json is not JSON: {error}") from error
        return Message(
            data,
            self._attributes(row),
            acking=acking,
            topic=self.topic,
            deliveries=row.attempts + 1,
        )

    def _attributes(self, row: Row) -> Attributes:
        event_id, aggregate_id, created_at = (
            str(row.id),
            str(row.aggregate_id),
            _text(row.created_at),
        )
        attributes: Attributes = {
            "specversion": SPEC_VERSION,
            "id": event_id,
            "type": row.event_type,
            "source": self.source,
            "subject": aggregate_id,
            "time": created_at,
            "datacontenttype": "application/json",
        }
        if self.cloudevents:
            attributes["aggregatetype"] = row.aggregate_type
            return attributes
        attributes.update(
            event_id=event_id,
            event_type=row.event_type,
            aggregate_type=row.aggregate_type,
            aggregate_id=aggregate_id,
            created_at=created_at,
        )
        return attributes


def _text(moment: datetime) -> str:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat().replace("+00:00", "Z")
