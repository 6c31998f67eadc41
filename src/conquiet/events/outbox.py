"""EventsOutbox: what handlers return becomes rows of `outbox_events`, in their transaction.

handler's events ──▶ checked ──▶ one INSERT in the transaction ──▶ EventSource, relay
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet import outbox
from conquiet.errors import HandlerError
from conquiet.events.emitting import emit
from conquiet.events.event import Event
from conquiet.events.source import TOPIC
from conquiet.events.table import EVENTS_TABLE
from conquiet.message import Message, describe
from conquiet.sql.transaction import current


class EventsOutbox(outbox.Outbox):
    """Middleware: emits the `Event`s that handlers return, all of a batch in one statement.

    It stands where `conquiet.sql.Outbox` would, inside a `Transaction`:

    >>> from conquiet import Router
    >>> from conquiet.sql import Inbox, Transaction
    >>> router = Router()
    >>> router.use(Transaction("sqlite:///shop.sqlite"), Inbox("shop"), EventsOutbox())

    Where events go is the relay's to say, and not a handler's: their topic is `EventSource`'s.
    """

    def __init__(self, table: str = EVENTS_TABLE) -> None:
        super().__init__(TOPIC)
        self.table = table

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        events = [_event(output) for output in outputs]
        unit = current("the outbox of events")
        emit(unit.connection, *events, table=self.table)
        unit.wrote = True
        # Of the whole transaction: relays are woken after it, and a savepoint commits nothing.
        unit.connection.unit.filled.add(self.table)


def _event(output: Message[Any]) -> Event:
    if not isinstance(output.data, Event):
        raise HandlerError(
            f"{describe(output.attributes)}: a handler before EventsOutbox returns events that"
            f" CATALOG.event(…) made, not {type(output.data).__name__}"
        )
    return output.data
