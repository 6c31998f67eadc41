"""LogStreamReader: the log as micro-batches, each from offset to offset."""

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

from conquiet.spark.log.batches import Batches
from conquiet.spark.log.offsets import read_offsets, write_offsets
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.planner import Planner
from conquiet.spark.log.reader import read_pieces
from conquiet.spark.log.tasks import LogPartition

Offsets = dict[str, str]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans in one process per query, reads in Spark's workers.

    No consumer group: what a micro-batch holds is a range of ids, the same at every attempt.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._batches = Batches(schema, options.types)
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_planner": None}  # it stays here: workers only read

    @property
    def planner(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner

    def initialOffset(self) -> Offsets:  # noqa: N802 - these names are Spark's
        return write_offsets(self.planner.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return write_offsets(self.planner.next(read_offsets(start), most))

    def reportLatestOffset(self) -> Offsets | None:  # noqa: N802
        return write_offsets(self.planner.newest) or None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self.planner.stop_at_present()

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        return self.planner.partitions(read_offsets(start), read_offsets(end))

    def commit(self, end: Offsets) -> None:
        self.planner.done(read_offsets(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        return read_pieces(self._options, self._batches, partition)
