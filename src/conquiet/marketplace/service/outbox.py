"""EventsOutbox: what handlers return becomes rows of `outbox_events`, in their transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet import outbox
from conquiet.errors import HandlerError
from conquiet.events.catalog import InvalidEvent
from conquiet.events.emitting import emit
from conquiet.events.event import Event
from conquiet.events.source import TOPIC
from conquiet.events.table import EVENTS_TABLE
from conquiet.marketplace.service.lifecycle import Refused
from conquiet.message import Message, describe
from conquiet.sql.ambient import current


class EventsOutbox(outbox.Outbox):
    """Middleware: emits the `Event`s that handlers return, all of a batch in one statement."""

    def __init__(self, table: str = EVENTS_TABLE) -> None:
        super().__init__(TOPIC)
        self.table = table

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        events: list[Event] = []
        for output in outputs:
            if not isinstance(output.data, Event):
                raise HandlerError(
                    f"{describe(output.attributes)}: return events that CATALOG.event(…) made"
                )
            events.append(output.data)
        unit = current("the outbox of events")
        try:
            emit(unit.connection, *events, table=self.table)
        except InvalidEvent as error:  # a NUL in a title, say: it is as wrong the next time
            raise Refused(str(error)) from error
        unit.wrote = True
        unit.connection.unit.filled.add(self.table)
