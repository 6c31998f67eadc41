"""Loss: notices when a stream no longer holds what a query was still to read."""

from __future__ import annotations

from typing import NamedTuple

from conquiet.errors import ConquietError
from conquiet.spark.log.offsets import Position
from conquiet.spark.log.piece import BEGINNING, parts
from conquiet.spark.log.streams import StreamState

_ADVICE = (
    "Restore it, or set failOnDataLoss=false to go on with what there is, or start with a new"
    " checkpoint. The option readerName keeps `conquiet` from trimming what a query has not read."
)


class DataLoss(ConquietError):
    """Entries that a query was still to read are gone from their stream."""


class Loss(NamedTuple):
    """What is missing from a stream."""

    stream: str
    wanted: str
    """The last id that was read: what follows it was wanted."""
    available: str
    why: str
    entries: int | None = None
    """How many, if that is known."""
    is_certain: bool = True

    def __str__(self) -> str:
        many = "entries" if self.entries is None else f"{self.entries} entries"
        gone = f"{many} {'are' if self.is_certain else 'may be'} gone"
        return (
            f"stream {self.stream!r} {self.why}: {gone}; wanted what follows {self.wanted},"
            f" available from {self.available}"
        )


def refuse(losses: list[Loss]) -> None:
    """Raise if there is any."""
    if losses:
        more = f" (and {len(losses) - 1} other streams)" if len(losses) > 1 else ""
        raise DataLoss(f"{losses[0]}{more}. {_ADVICE}")


def loss_of(stream: str, position: Position, state: StreamState | None) -> Loss | None:
    """What a stream has lost of what follows a position."""
    if position.id == BEGINNING and position.added is None:
        return None
    if state is None:
        if position.id == BEGINNING:
            return None
        return Loss(stream, position.id, "nothing", "does not exist any more")
    if parts(state.last_id) < parts(position.id):
        return Loss(stream, position.id, _first(state), "was deleted and begins anew")
    has_more = parts(state.last_id) > parts(position.id)
    if state.length and parts(state.first_id) <= parts(position.id):
        return None  # the front is still there, so nothing was trimmed behind it
    removed = state.removed
    if removed is not None and position.added is not None:
        if removed < position.added:  # all up to the position is gone, which is more than that
            return Loss(stream, position.id, _first(state), "was deleted and begins anew")
        if removed > position.added:
            lost = removed - position.added
            return Loss(stream, position.id, _first(state), "was trimmed", lost)
        return None
    if not has_more:
        return None
    if not state.length:
        return Loss(stream, position.id, "nothing", "was trimmed")
    return Loss(stream, position.id, _first(state), "was trimmed", is_certain=False)


def _first(state: StreamState) -> str:
    return state.first_id if state.length else "nothing"
