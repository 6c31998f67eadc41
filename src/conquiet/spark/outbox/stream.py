"""OutboxStreamReader: an outbox as a stream, by positions that no late commit disturbs (S11).

An offset is a position and how many rows were passed on the way to it: `{"position": "812-40017",
"rows": 1200}`. A batch that is planned again, after a crash, is thereby known to be the same, or
known to have lost rows to cleanup. How many, and how often, then stands in the offsets that follow
(`"lost": [1, 20]`), if the query was allowed to go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.log.payload import check_columns
from conquiet.spark.outbox.loss import lost, misplaced
from conquiet.spark.outbox.options import EARLIEST, LATEST, OutboxOptions
from conquiet.spark.outbox.select import Stretch
from conquiet.spark.outbox.survey import Survey
from conquiet.sql.log import Position

Offset = dict[str, Any]


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans on the driver, in one process per query; reads in tasks."""

    def __init__(self, options: OutboxOptions, schema: StructType) -> None:
        if options.has_domain_events:
            raise ConfigError(
                f"{options.table} cannot be read as a stream: it has no column that tells rows"
                " which committed late. Read it in batches, or stream the log that its relay"
                " publishes to"
            )
        check_columns(schema, "an outbox")
        self.options = options
        self.schema = schema
        self._survey: Survey | None = None
        self._target: Position | None = None
        self._planned: tuple[Offset, Offset, list[Stretch]] | None = None
        self._late = 0
        """Rows that were lost in a batch whose end was written before: for the next one to tell."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_survey": None, "_planned": None}  # tasks ask for no survey

    @property
    def survey(self) -> Survey:
        if self._survey is None:
            self._survey = Survey(self.options)
        return self._survey

    # --- offsets, on the driver ---------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's
        start = self.options.starting
        if start == EARLIEST:
            return _offset(Position(), 0)
        return _offset(self.survey.end() if start == LATEST else Position.parse(start), 0)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        rows = self.options.max_rows
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        self._target = self.survey.end()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's
        after = _position(start)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._target is not None and after >= self._target:
            return self._counted(start, start)
        stretches = self.survey.cut(after, self._target, rows)
        if not stretches:
            self._check_place(after)
            return self._counted(start, start)
        count = sum(one.rows or 0 for one in stretches)
        assert stretches[-1].upto is not None
        end = self._counted(_offset(stretches[-1].upto, start["rows"] + count), start)
        self._planned = start, end, stretches
        return end

    def _counted(self, end: Offset, start: Offset) -> Offset:
        """An offset with all rows that the query has missed up to there."""
        times, rows = start.get("lost", (0, 0))
        if self._late:
            times, rows, self._late = times + 1, rows + self._late, 0
        return end | ({"lost": [times, rows]} if times else {})

    def reportLatestOffset(self) -> Offset:  # noqa: N802 - Spark's
        """Where the log ends, and for how many seconds an open transaction has held it there."""
        horizon = self.survey.horizon()
        told: Offset = {"position": str(self.survey.end()), "heldUpSeconds": int(horizon.seconds)}
        return told | ({"heldUpBy": horizon.holder} if horizon.holder else {})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if self._planned is not None and self._planned[:2] == (start, end):
            stretches = self._planned[2]
        else:
            stretches = self._replanned(start, end)
        return [InputPartition(one) for one in stretches]

    def _replanned(self, start: Offset, end: Offset) -> list[Stretch]:
        """The stretches of a batch that an earlier run of the query planned."""
        after, upto = _position(start), _position(end)
        if after == upto:
            return []
        self._check_place(upto)
        stretches = self.survey.cut(after, upto)
        gone = end["rows"] - start["rows"] - sum(one.rows or 0 for one in stretches)
        if gone > 0:
            lost(self.options, after, upto, gone)
            self._late = gone
        return stretches

    def _check_place(self, position: Position) -> None:
        reached = self.survey.reached()
        if position > reached:
            misplaced(self.options, position, reached)

    def stop(self) -> None:
        if self._survey is not None:
            self._survey.close()

    # --- rows, in tasks -----------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from conquiet.spark.outbox.fetch import fetched

        return fetched(self.options, partition.value, self.schema)


def _offset(position: Position, rows: int) -> Offset:
    return {"position": str(position), "rows": rows}


def _position(offset: Offset) -> Position:
    return Position.parse(str(offset["position"]))
