"""Losses: what is missing ends a query, or is told and counted where that is allowed.

The count goes into the offsets, so it is in every progress of the query and outlives a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from conquiet.spark.log.loss import Loss, loss_of, refuse
from conquiet.spark.log.offsets import NOTHING, Lost, Position, entries_between
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.streams import StreamState

logger = logging.getLogger("conquiet.spark")

Positions = Mapping[str, Position]


class Losses:
    """Of one query, as its planner finds them."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._warned: set[Loss] = set()
        self._late: dict[str, Lost] = {}
        """Found in a batch whose end was written before: for the next one to tell, if it comes."""

    def notice(self, start: Positions, states: Mapping[str, StreamState]) -> dict[str, Lost]:
        """What follows `start` and is not there any more; an error if that is not allowed."""
        return {
            name: Lost(1, loss.entries or 0) for name, loss in self._allowed(start, states).items()
        }

    def notice_again(
        self, start: Positions, end: Positions, states: Mapping[str, StreamState]
    ) -> None:
        """The same for a batch that was planned before a restart, and is read once more."""
        for name, loss in self._allowed(start, states).items():
            if name not in end or name not in states:  # what is gone is told by the next batch
                continue
            before, after = start[name], end[name]
            if loss.entries is None:
                if after.lost.times == before.lost.times:
                    self._late[name] = Lost(1)
                continue
            in_batch = entries_between(before, after)
            missing = loss.entries if in_batch is None else min(loss.entries, in_batch)
            missing -= (
                after.lost.entries - before.lost.entries
            )  # which were told when it was planned
            if missing > 0:
                self._late[name] = Lost(1, missing)

    def counted(
        self, ends: Positions, start: Positions, missing: Mapping[str, Lost]
    ) -> dict[str, Position]:
        """The ends of a batch, each with all that was ever missed up to there."""
        told: dict[str, Position] = {}
        for name, end in ends.items():
            lost = start[name].lost if name in start else NOTHING
            lost = lost.plus(self._late.pop(name, NOTHING)).plus(missing.get(name, NOTHING))
            told[name] = end._replace(lost=lost)
        return told

    def _allowed(self, start: Positions, states: Mapping[str, StreamState]) -> dict[str, Loss]:
        """Losses that the query goes on without; each is told once."""
        refused, allowed = [], {}
        for name, position in start.items():
            if position.is_gone and name not in states:
                continue
            loss = loss_of(name, position, states.get(name))
            if loss is None:
                continue
            # A server that does not count cannot tell what conquiet trimmed for good reason;
            # and of what a registered reader has not read, it trims nothing.
            is_trusted = not loss.is_certain and self._options.reader_name
            if self._options.fail_on_data_loss and not is_trusted:
                refused.append(loss)
                continue
            if loss not in self._warned:
                self._warned.add(loss)
                logger.warning("%s", loss)
            if not is_trusted:
                allowed[name] = loss
        refuse(refused)
        return allowed
