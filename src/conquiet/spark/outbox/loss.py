"""Loss: rows that were counted when a batch was planned, and are gone when it is read."""

from __future__ import annotations

import logging

from conquiet.errors import ConquietError
from conquiet.spark.outbox.options import OutboxOptions
from conquiet.sql.log import Position

logger = logging.getLogger("conquiet.spark")


class DataLost(ConquietError):
    """A micro-batch cannot be read again as it was: cleanup has taken some of its rows."""


def lost(options: OutboxOptions, after: Position | None, upto: Position | None, rows: int) -> None:
    """An error, or a warning where the query allows it."""
    told = (
        f"{rows} rows of {options.table} between {after} and {upto} were counted and are gone:"
        " cleanup was faster than this query"
    )
    if options.fail_on_loss:
        raise DataLost(
            f"{told}; keep published rows for longer (retention), or go on without them by"
            " option failOnDataLoss=false"
        )
    logger.warning("%s; failOnDataLoss=false: the query goes on without them", told)


def misplaced(options: OutboxOptions, start: Position, end: Position) -> None:
    """A position that this database has not reached: another one, or an older copy of it."""
    told = (
        f"the query stands at {start} of {options.table}, but its log ends at {end}: this is"
        " another database, or it was restored from a backup"
    )
    if options.fail_on_loss:
        raise DataLost(
            f"{told}; start with a new checkpoint, or wait until it has grown past that by option"
            " failOnDataLoss=false"
        )
    logger.warning("%s; failOnDataLoss=false: nothing is read until it has grown past that", told)
