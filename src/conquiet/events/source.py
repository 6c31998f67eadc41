"""Read `outbox_events` as a source of a relay.

A row at `max_attempts` is *parked*: unpublished, and not claimed any more. The source needs no
catalog: types are text, and rows of unknown types are published like any other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import JSON, URL, Column, DateTime, Engine, Integer, MetaData, Table, Text

from conquiet.acking import Acking
from conquiet.codec import SPEC_VERSION
from conquiet.config import EVENTS_TABLE
from conquiet.errors import InvalidMessage
from conquiet.events.check import canonical
from conquiet.events.table import UuidText
from conquiet.message import Attributes, Message
from conquiet.sql import dialect
from conquiet.sql.claim import Layout
from conquiet.sql.outbox_source import TableSource, check_attempts
from conquiet.sql.schema import split_name


class EventRow(NamedTuple):
    """Holds a claimed row of `outbox_events`."""

    id: UUID | str
    event_type: str
    aggregate_type: str
    aggregate_id: UUID | str
    payload_json: str
    created_at: datetime
    attempt_count: int

    @property
    def key(self) -> str:
        """Return the ordering key: the aggregate."""
        return str(self.aggregate_id)

    @property
    def attempts(self) -> int:
        return self.attempt_count


def relay_table(name: str) -> Table:
    schema, table = split_name(name)
    return Table(
        table,
        MetaData(),
        Column("id", UuidText(), primary_key=True),
        Column("event_type", Text),
        Column("aggregate_type", Text),
        Column("aggregate_id", UuidText(), nullable=False),
        Column("payload_json", JSON),
        Column("created_at", DateTime(timezone=True)),
        Column("published_at", DateTime(timezone=True)),
        Column("attempt_count", Integer),
        Column("last_error", Text),
        schema=schema,
    )


def events_layout(table: str, max_attempts: int) -> Layout:
    return Layout(
        relay_table(table),
        EventRow,
        # Rows of one transaction have the same time; their UUIDv7 ids ascend.
        order=("created_at", "id"),
        start=("-infinity", str(UUID(int=0))),
        key="aggregate_id",
        first_key=str(UUID(int=0)),
        attempts="attempt_count",
        as_text=frozenset({"event_type", "aggregate_type", "payload_json"}),
        max_attempts=max_attempts,
        reads_uuids_as_text=True,
    )


TOPIC = "domain-events"


class EventSource(TableSource):
    """Claims rows of `outbox_events` as messages; ack marks a row published, nack leaves it.

    Several sources, in threads, processes or on machines, share the rows, in no common order
    unless they are `ordered`: then the rows of an aggregate are published in their order, by one
    relay at a time, and a row that fails or is parked blocks its aggregate only. A failed row is
    retried after a second, then after twice as long each time, up to five minutes.

    A message has the attributes `event_id`, `event_type`, `aggregate_type`, `aggregate_id` and
    `created_at`, besides CloudEvents' own. CloudEvents allows no `_` in a name, and sinks that
    write binary CloudEvents (Redis Streams, HTTP) refuse it: with `cloudevents=True` the same
    five are `id`, `type`, `aggregatetype`, `subject` and `time` alone.

    `engine` is one of SQLAlchemy's, or a URL; `table` is that of the events. `topic` and `source`
    go into each message. `max_attempts`, `poll`, `wakeup` and `hold` are those of
    `conquiet.sql.OutboxSource`.
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
            events_layout(table, check_attempts(max_attempts)),
            max_attempts=max_attempts,
            ordered=ordered,
            poll=poll,
            wakeup=wakeup,
            hold=hold,
        )
        self.topic = topic
        self.source = source
        self.cloudevents = cloudevents

    def log_fields(self, row: EventRow) -> dict[str, str]:
        return {
            "event_id": str(row.id),
            "event_type": row.event_type,
            "aggregate_type": row.aggregate_type,
            "aggregate_id": str(row.aggregate_id),
        }

    def _message(self, row: EventRow, acking: Acking) -> Message[bytes]:
        try:
            # JSONB changes spaces and the order of keys; the published bytes are canonical.
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

    def _attributes(self, row: EventRow) -> Attributes:
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
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    elif moment.utcoffset():
        moment = moment.astimezone(UTC)
    return moment.isoformat().removesuffix("+00:00") + "Z"
