"""Witness: who is told what the world does while it is generated; the oracle is one."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Seen(NamedTuple):
    """One event as the log has it, after its last publication."""

    is_domain: bool
    event_id: str
    type: str
    version: int | None
    aggregate_type: str
    aggregate_id: str
    at: int
    data: bytes
    actor: tuple[str, str, str] | None
    reason: str | None
    """Why a reader must refuse it, by the codes of the contract."""
    is_foreign: bool
    failures: int
    detail: Any
    first_ms: int
    deliveries: int


class Witness(Protocol):
    """Gets objects of the world, never its JSON."""

    def happened(self, type: str, subject: Any, at: int, detail: Any, event_id: str) -> None:
        """An event took place, and what was published of it can be read."""

    def seen(self, seen: Seen) -> None:
        """All publications of an event are in the log."""

    def finished(self, order: Any) -> None:
        """Nothing more will happen to this order."""
