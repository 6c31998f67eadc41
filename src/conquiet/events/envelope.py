"""The envelope of a domain event, with the names that are locked in JSON.

    {"version": 1, "eventId": "0190…", "occurredAt": "2026-01-31T12:00:00Z",
     "actor": {"type": "user", "id": "…"}, "data": {…}}

Envelopes are in camel case, `data` is in snake case. `actor` is left out where nobody acted.
Within a version, only optional fields are added; a reader passes over what it does not know.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A moment that knows its offset; written in UTC, with `Z`."""


class ActorRef(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Who caused an event; an id, never a name or an address."""

    type: Literal["user", "store", "system"]
    id: str
    store_id: UUID | None = None
    """`storeId`: the store on whose behalf."""


class Envelope(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What `payload_json` holds, and what consumers receive as data.

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
    data: msgspec.Raw
    """What happened, as JSON that is not looked into here."""

    @classmethod
    def read(cls, payload: bytes | str) -> Envelope:
        """An envelope from JSON; raises `msgspec.DecodeError` with the place of a misfit."""
        return _decoder.decode(payload)


class ErrorRef(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Why something failed: a code for programs, a sentence for people."""

    code: str
    message: str
    retryable: bool = False


class ErrorEnvelope(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What a consumer reports about an event that it cannot handle."""

    version: Annotated[int, msgspec.Meta(ge=1)]
    event_id: UUID
    """`eventId`: of the event that failed."""
    occurred_at: Moment
    """`occurredAt`: when it failed."""
    consumer: str
    attempts: int = 1
    error: ErrorRef


_decoder = msgspec.json.Decoder(Envelope)
