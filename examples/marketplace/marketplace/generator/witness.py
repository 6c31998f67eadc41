"""Witness: who is told what the world does while it is generated; the oracle is one."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from marketplace.generator.entry import Entry

Actor = tuple[str, str, str] | None
"""Type, id and store of who caused an event."""


class Told(NamedTuple):
    """What the world knows of an event, and a reader of the log has to find out."""

    at: int
    version: int | None
    actor: Actor
    reason: str | None
    """Why a reader must refuse it, by the codes of the contract."""
    detail: Any


class Seen(NamedTuple):
    """One event as the log has it, after its last publication."""

    first: Entry
    """Its first publication."""
    told: Told
    deliveries: int


class Witness(Protocol):
    """Gets objects of the world, and has no need to parse."""

    def happened(self, type: str, subject: Any, at: int, detail: Any, event_id: str) -> None:
        """An event took place, and what is published of it can be read."""

    def seen(self, seen: Seen) -> None:
        """All publications of an event are in the log."""

    def finished(self, order: Any) -> None:
        """Nothing more will happen to this order."""
