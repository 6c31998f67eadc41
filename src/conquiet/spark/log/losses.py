"""Losses: entries that a query was still to read and that are gone from their stream.

A loss ends the query, or is logged and counted where `failOnDataLoss=false` allows it. The count is
part of the offsets, so every progress of the query shows it and it survives a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from conquiet.redis import ids
from conquiet.spark.log.offsets import NOTHING, Lost, Position, Positions, entries_between
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.ranges import BEGINNING
from conquiet.spark.log.streams import StreamState
from conquiet.spark.progress import DataLoss

logger = logging.getLogger("conquiet.spark")

_ADVICE = (
    "Restore it, or set failOnDataLoss=false to go on with the entries that exist, or start with a"
    " new checkpoint. The option readerName keeps `conquiet` from trimming entries that a query has"
    " not read."
)


class Loss(NamedTuple):
    """Entries that are missing from a stream."""

    stream: str
    wanted: str
    """The last id that was read: the entries after it were wanted."""
    available: str
    why: str
    entries: int | None = None
    """How many, if that is known."""
    is_certain: bool = True

    def __str__(self) -> str:
        many = "entries" if self.entries is None else f"{self.entries} entries"
        gone = f"{many} {'are' if self.is_certain else 'may be'} gone"
        return (
            f"stream {self.stream!r} {self.why}: {gone}; wanted the entries after {self.wanted},"
            f" available from {self.available}"
        )


class Losses:
    """The losses of one query, as its planner finds them."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._warned: set[Loss] = set()
        self._late: dict[str, Lost] = {}
        """Losses in a batch whose end was already written: counted with the next batch."""

    def notice(
        self, start: Mapping[str, Position], states: Mapping[str, StreamState]
    ) -> dict[str, Lost]:
        """Find entries after `start` that are gone; raise `DataLoss` if that is not allowed."""
        return {
            name: Lost(1, loss.entries or 0) for name, loss in self._allowed(start, states).items()
        }

    def notice_again(
        self,
        start: Mapping[str, Position],
        end: Mapping[str, Position],
        states: Mapping[str, StreamState],
    ) -> None:
        """Find losses in a batch that was planned before a restart and is read again."""
        for name, loss in self._allowed(start, states).items():
            if name not in end or name not in states:  # the next batch counts a stream that is gone
                continue
            before, after = start[name], end[name]
            if loss.entries is None:
                if after.lost.times == before.lost.times:
                    self._late[name] = Lost(1)
                continue
            in_batch = entries_between(before, after)
            missing = loss.entries if in_batch is None else min(loss.entries, in_batch)
            missing -= after.lost.entries - before.lost.entries  # counted when it was planned
            if missing > 0:
                self._late[name] = Lost(1, missing)

    def counted(
        self,
        ends: Mapping[str, Position],
        start: Mapping[str, Position],
        missing: Mapping[str, Lost],
    ) -> Positions:
        """Return the ends of a batch, each with all losses up to it."""
        counted: Positions = {}
        for name, end in ends.items():
            lost = start[name].lost if name in start else NOTHING
            lost = lost.plus(self._late.pop(name, NOTHING)).plus(missing.get(name, NOTHING))
            counted[name] = end._replace(lost=lost)
        return counted

    def _allowed(
        self, start: Mapping[str, Position], states: Mapping[str, StreamState]
    ) -> dict[str, Loss]:
        """Return the losses that the query may pass; log each once; raise for the others."""
        refused, allowed = [], {}
        for name, position in start.items():
            if position.is_gone and name not in states:
                continue
            loss = _loss_of(name, position, states.get(name))
            if loss is None:
                continue
            # A server that does not count entries cannot distinguish a loss from a trim of entries
            # that were read; and conquiet trims no entry that a registered reader has not read.
            is_trusted = not loss.is_certain and self._options.reader_name
            if self._options.fail_on_data_loss and not is_trusted:
                refused.append(loss)
                continue
            if loss not in self._warned:
                self._warned.add(loss)
                logger.warning("%s", loss)
            if not is_trusted:
                allowed[name] = loss
        if refused:
            more = f" (and {len(refused) - 1} other streams)" if len(refused) > 1 else ""
            raise DataLoss(f"{refused[0]}{more}. {_ADVICE}")
        return allowed


def _loss_of(stream: str, position: Position, state: StreamState | None) -> Loss | None:
    """Return what a stream has lost of the entries after a position."""
    if position.id == BEGINNING and position.added is None:
        return None
    if state is None:
        if position.id == BEGINNING:
            return None
        return Loss(stream, position.id, "nothing", "does not exist any more")
    available = state.first_id if state.length else "nothing"
    if ids.parse(state.last_id) < ids.parse(position.id):
        return Loss(stream, position.id, available, "was deleted and created again")
    has_more = ids.parse(state.last_id) > ids.parse(position.id)
    if state.length and ids.parse(state.first_id) <= ids.parse(position.id):
        return None  # the entry at the position exists, so none after it was trimmed
    removed = state.removed
    if removed is not None and position.added is not None:
        if removed < position.added:  # all up to the position is gone, which is more than that
            return Loss(stream, position.id, available, "was deleted and created again")
        if removed > position.added:
            lost = removed - position.added
            return Loss(stream, position.id, available, "was trimmed", lost)
        return None
    if not has_more:
        return None
    if not state.length:
        return Loss(stream, position.id, "nothing", "was trimmed")
    return Loss(stream, position.id, available, "was trimmed", is_certain=False)
