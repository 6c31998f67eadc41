"""OutboxReader: a batch of an outbox, as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.log.payload import check_columns
from conquiet.spark.outbox.options import EARLIEST, LATEST, OutboxOptions
from conquiet.spark.outbox.select import Stretch
from conquiet.spark.outbox.survey import Survey
from conquiet.sql.log import Position


class OutboxReader(DataSourceReader):
    """Reads in parallel by ranges of ids; a range is one task and one query."""

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

    def _within(self, ranges: list[Stretch], survey: Survey) -> list[Stretch]:
        """Not beyond the horizon: rows of transactions that still run belong to the next read."""
        after = None if self.options.starting == EARLIEST else self.options.starting
        upto = (
            survey.end() if self.options.ending == LATEST else Position.parse(self.options.ending)
        )
        start = Position.parse(after) if after else None
        return [replace(one, after=start, upto=upto) for one in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from conquiet.spark.outbox.fetch import fetched

        return fetched(self.options, partition.value, self.schema)
