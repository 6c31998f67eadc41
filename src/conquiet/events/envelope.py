"""Define the envelope of a domain event, whose JSON names are locked.

    {"version": 1, "eventId": "0190…", "occurredAt": "2026-01-31T12:00:00Z",
     "actor": {"type": "user", "id": "…"}, "data": {…}}

Envelopes are in camel case, `data` is in snake case. `actor` is absent if there is none. Within a
version, only optional fields are added; a reader ignores unknown fields.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with an offset; encoded in UTC, with `Z`."""


class ActorRef(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Identifies the actor of an event by an id, never by a name or an address."""

    type: Literal["user", "store", "system"]
    id: str
    """Its id among the actors of its type."""
    store_id: UUID | None = None
    """`storeId`: the store that the actor acted for."""


class Envelope(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Wraps the data of an event in `payload_json`, and in the messages of consumers.

    >>> envelope = Envelope.read(
    ...     b'{"version": 1, "eventId": "01900000-0000-7000-8000-000000000001",'
    ...     b' "occurredAt": "2026-01-31T12:00:00Z", "data": {"order_id": 7}}'
    ... )
    >>> envelope.version, str(envelope.occurred_at), bytes(envelope.data)
    (1, '2026-01-31 12:00:00+00:00', b'{"order_id": 7}')
    """

    version: Annotated[int, msgspec.Meta(ge=1)]
    event_id: UUID
    """`eventId`: the id of the outbox row."""
    occurred_at: Moment
    """`occurredAt`: when it happened, which may be before it was stored."""
    actor: ActorRef | None = None
    """Who caused it, if the producer said so."""
    data: msgspec.Raw
    """The event's data as undecoded JSON."""

    @classmethod
    def read(cls, payload: bytes | str) -> Envelope:
        """Decode an envelope; raise `msgspec.DecodeError` with the path of the first error."""
        return _decoder.decode(payload)


class ErrorRef(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Describes a failure: a code for programs, a message for people."""

    code: str
    """A fixed word that programs compare."""
    message: str
    """A text for people, which may change."""
    retryable: bool = False
    """Whether the same event may succeed later."""


class ErrorEnvelope(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Reports an event that a consumer cannot handle."""

    version: Annotated[int, msgspec.Meta(ge=1)]
    """That of the report's own format, from 1 on."""
    event_id: UUID
    """`eventId`: of the event that failed."""
    occurred_at: Moment
    """`occurredAt`: when it failed."""
    consumer: str
    """The consumer that failed, as its catalog names it."""
    attempts: int = 1
    """How many times it has tried."""
    error: ErrorRef


_decoder = msgspec.json.Decoder(Envelope)
