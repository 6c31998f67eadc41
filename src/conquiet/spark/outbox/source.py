"""The format `conquiet-outbox`: an outbox in the columns of the event log, as batch or stream.

An offset of a stream is a position and the number of rows up to it: `{"position": "812-40017",
"rows": 1200}`. Positions are gap-free: a row that commits late comes after all rows that were read.
A batch that is planned again, after a crash, is thereby known to be the same, or known to have lost
rows to cleanup. If `failOnDataLoss=false` lets the query go on, the offsets that follow have the
number of losses and of rows (`"lost": [1, 20]`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.outbox.options import EARLIEST, LATEST, OutboxOptions
from conquiet.spark.outbox.statement import RowRange
from conquiet.spark.outbox.survey import Survey, report_ahead, report_lost
from conquiet.spark.payload import check_columns, columns_ddl, schema_of
from conquiet.sql.log import Position


class OutboxSource(DataSource):
    """Gives Spark the schema and readers."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return "conquiet-outbox"

    def schema(self) -> StructType | str:
        data = schema_of(self.options)
        return from_arrow_schema(ARROW_SCHEMA) if data == "BINARY" else columns_ddl(data)

    def reader(self, schema: StructType) -> DataSourceReader:
        return OutboxReader(OutboxOptions.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        return OutboxStreamReader(OutboxOptions.of(self.options), schema)


class OutboxReader(DataSourceReader):
    """Reads an outbox in one batch, by ranges of ids; a range is one task and one SQL query."""

    def __init__(self, options: OutboxOptions, schema: StructType) -> None:
        check_columns(schema, "an outbox")
        self.options = options
        self.schema = schema
        positions = {options.starting, options.ending} - {EARLIEST, LATEST}
        if positions and options.has_domain_events:
            raise ConfigError(
                f"{options.table} has no positions; choose its rows by since=… and until=…"
            )
        if options.starting == LATEST or options.ending == EARLIEST:
            raise ConfigError(
                "a batch from latest or to earliest is empty: give a position, or leave it out"
            )

    def partitions(self) -> Sequence[InputPartition]:
        survey = Survey(self.options)
        try:
            ranges = survey.ranges()
            if not self.options.has_domain_events:
                ranges = self._within(ranges, survey)
        finally:
            survey.close()
        return [InputPartition(one) for one in ranges]

    def _within(self, ranges: list[RowRange], survey: Survey) -> list[RowRange]:
        """Bound ranges by the horizon: rows of open transactions belong to the next read."""
        after = None if self.options.starting == EARLIEST else self.options.starting
        upto = (
            survey.end() if self.options.ending == LATEST else Position.parse(self.options.ending)
        )
        start = Position.parse(after) if after else None
        return [replace(one, after=start, upto=upto) for one in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from conquiet.spark.outbox.rows import fetch_rows

        return fetch_rows(self.options, partition.value, self.schema)


Offset = dict[str, Any]


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads an outbox as a stream: plans in one process per query, reads in tasks."""

    def __init__(self, options: OutboxOptions, schema: StructType) -> None:
        if options.has_domain_events:
            raise ConfigError(
                f"{options.table} cannot be read as a stream: it has no column by which rows"
                " that committed late are found. Read it in batches, or stream the log to which"
                " its relay publishes"
            )
        check_columns(schema, "an outbox")
        self.options = options
        self.schema = schema
        self._survey: Survey | None = None
        self._target: Position | None = None
        self._planned: tuple[Offset, Offset, list[RowRange]] | None = None
        self._late = 0
        """Rows lost in a batch whose end was already written: counted with the next batch."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_survey": None, "_planned": None}  # tasks need no survey

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
            return self._with_losses(start, start)
        ranges = self.survey.cut(after, self._target, rows)
        if not ranges:
            self._check_place(after)
            return self._with_losses(start, start)
        count = sum(one.rows or 0 for one in ranges)
        assert ranges[-1].upto is not None
        end = self._with_losses(_offset(ranges[-1].upto, start["rows"] + count), start)
        self._planned = start, end, ranges
        return end

    def _with_losses(self, end: Offset, start: Offset) -> Offset:
        """Return an offset with all rows that the query has lost up to it."""
        times, rows = start.get("lost", (0, 0))
        if self._late:
            times, rows, self._late = times + 1, rows + self._late, 0
        return end | ({"lost": [times, rows]} if times else {})

    def reportLatestOffset(self) -> Offset:  # noqa: N802 - Spark's
        """Return the end of the log, and for how long an open transaction has held it there."""
        horizon = self.survey.horizon()
        latest: Offset = {"position": str(self.survey.end()), "heldUpSeconds": int(horizon.seconds)}
        return latest | ({"heldUpBy": horizon.holder} if horizon.holder else {})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if self._planned is not None and self._planned[:2] == (start, end):
            ranges = self._planned[2]
        else:
            ranges = self._plan_again(start, end)
        return [InputPartition(one) for one in ranges]

    def _plan_again(self, start: Offset, end: Offset) -> list[RowRange]:
        """Return the ranges of a batch that an earlier run of the query planned."""
        after, upto = _position(start), _position(end)
        if after == upto:
            return []
        self._check_place(upto)
        ranges = self.survey.cut(after, upto)
        gone = end["rows"] - start["rows"] - sum(one.rows or 0 for one in ranges)
        if gone > 0:
            report_lost(self.options, after, upto, gone)
            self._late = gone
        return ranges

    def _check_place(self, position: Position) -> None:
        reached = self.survey.find_bound()
        if position > reached:
            report_ahead(self.options, position, reached)

    def stop(self) -> None:
        if self._survey is not None:
            self._survey.close()

    # --- rows, in tasks -----------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from conquiet.spark.outbox.rows import fetch_rows

        return fetch_rows(self.options, partition.value, self.schema)


def _offset(position: Position, rows: int) -> Offset:
    return {"position": str(position), "rows": rows}


def _position(offset: Offset) -> Position:
    return Position.parse(str(offset["position"]))
