"""The format `conquiet`: Redis Streams, read and written, in batches and streams."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from conquiet.redis import ids
from conquiet.spark.log.connection import client_of
from conquiet.spark.log.decoder import Decoder
from conquiet.spark.log.fetch import RangeReader
from conquiet.spark.log.offsets import Position, read_offsets, write_offsets
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.planner import Planner
from conquiet.spark.log.ranges import BEGINNING, EntryRange
from conquiet.spark.log.streams import Streams, StreamState
from conquiet.spark.log.tasks import LogPartition, plan_tasks
from conquiet.spark.payload import columns_ddl, schema_of
from conquiet.spark.progress import DataLoss

logger = logging.getLogger("conquiet.spark")

Offsets = dict[str, str]


class LogSource(DataSource):
    """Gives Spark the schema, readers and writers; lives in Spark's planner processes."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return "conquiet"

    def schema(self) -> str:
        return columns_ddl(schema_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = ReadOptions.of(self.options, streaming=False)
        return (FilteringLogReader if pushes_filters() else LogReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        return LogStreamReader(ReadOptions.of(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        made: DataSourceWriter = _writer().batch_writer(self.options, schema, overwrite)
        return made

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        made: DataSourceStreamWriter = _writer().stream_writer(self.options, schema, overwrite)
        return made


def _writer() -> Any:
    """Import the writer, which readers do not need."""
    return import_module("conquiet.spark.log.writer")


# --- readers --------------------------------------------------------------------------------


class LogReader(DataSourceReader):
    """Reads the log in one batch: plans in Spark's planner process, reads in its workers."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._decoder = Decoder(schema, options.types, options.max_bytes_per_batch)
        self._filters = Filters()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        streams = Streams(client_of(options.address), options.streams, 0.0)
        names = [name for name in streams.names() if self._filters.allow(name)]
        states = streams.states(names)
        ranges = [self._range(name, states[name]) for name in names if name in states]
        found = [one for one in ranges if one is not None]
        least, most = options.min_partitions, options.max_per_partition
        # For an empty list Spark would make one task whose partition is None.
        return plan_tasks(streams.wire, found, least, most) or [LogPartition(())]

    def _range(self, stream: str, state: StreamState) -> EntryRange | None:
        start = self._options.start.position(stream, state)
        end = self._options.end.position(stream, state)
        start, end = self._filters.narrow(start, end)
        if not state.length or not end.is_after(start):
            return None
        is_whole = start.id == BEGINNING and end.id == state.last_id
        entries = state.length if is_whole else None
        return EntryRange(stream, start.id, end.id, entries, at_most=state.length)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        return read_ranges(self._options, self._decoder, partition)


class FilteringLogReader(LogReader):
    """Leaves out streams and times that a query filters out."""

    def pushFilters(self, filters: list[Filter]) -> Any:  # noqa: N802 - Spark's
        return [item for item in filters if not self._filters.take(item)]


_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


def pushes_filters() -> bool:
    """Return whether Spark asks this process about filters.

    Elsewhere a reader must not even have the method: Spark refuses it unless
    spark.sql.python.filterPushdown.enabled is set, which these processes cannot see.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN in sys.modules or (spec is not None and spec.name == _PUSHDOWN)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as micro-batches: plans in one process per query, reads in Spark's workers.

    There is no consumer group: a micro-batch is a range of ids, the same at every attempt.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._decoder = Decoder(schema, options.types, options.max_bytes_per_batch)
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_planner": None}  # workers only read

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
        self.planner.commit(read_offsets(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        return read_ranges(self._options, self._decoder, partition)


def read_ranges(
    options: ReadOptions, decoder: Decoder, partition: LogPartition
) -> Iterator[pa.RecordBatch]:
    """Read the ranges of a task, in whichever process it runs."""

    def report_missing(entry_range: EntryRange, got: int) -> None:
        stream, expected = entry_range.stream, entry_range.entries
        place = f"after {entry_range.after} and up to {entry_range.until}"
        if expected is None:
            text = f"stream {stream!r} was trimmed past {entry_range.first} while entries {place}"
            text += f" were read; {got} were found, and some may be gone"
        else:
            text = f"stream {stream!r}: of {expected} entries {place}, {got} are left; the"
            text += " others were trimmed or deleted meanwhile"
        if options.fail_on_data_loss:
            raise DataLoss(
                f"{text}. Set failOnDataLoss=false to go on with the entries that exist."
            )
        logger.warning("%s", text)

    reader = RangeReader(client_of(options.address), report_missing, options.max_bytes_per_batch)
    return decoder.decode(reader.read(partition.ranges))


# --- filters --------------------------------------------------------------------------------

_STREAM, _TIME = ("stream",), ("entry_time",)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Filters:
    """Turns filters on stream and entry_time into names and ids; Spark applies the others."""

    def __init__(self) -> None:
        self._names: list[frozenset[str]] = []
        self._prefixes: list[str] = []
        self._from_ms: int | None = None
        self._to_ms: int | None = None
        """Exclusive."""

    def take(self, item: Filter) -> bool:
        """Use a filter; return whether Spark need not apply it."""
        attribute = getattr(item, "attribute", None)
        if isinstance(item, IsNotNull):
            return attribute == _STREAM  # an id that is not made of a clock has no time
        if attribute == _STREAM:
            return self._take_stream(item)
        return attribute == _TIME and self._take_time(item)

    def _take_stream(self, item: Filter) -> bool:
        if isinstance(item, EqualTo):
            self._names.append(frozenset([item.value]))
        elif isinstance(item, In):
            self._names.append(frozenset(item.value))
        elif isinstance(item, StringStartsWith):
            self._prefixes.append(item.value)
        else:
            return False
        return True

    def _take_time(self, item: Filter) -> bool:
        """Narrow the range. Spark applies the filter too: an id without a time matches none."""
        value = getattr(item, "value", None)
        if not isinstance(value, datetime) or value.tzinfo is None:
            return False
        micros = (value - _EPOCH) // _MICROSECOND
        bounds: dict[type, tuple[int | None, int | None]] = {
            GreaterThan: (micros // 1000 + 1, None),
            GreaterThanOrEqual: (-(-micros // 1000), None),
            LessThan: (None, -(-micros // 1000)),
            LessThanOrEqual: (None, micros // 1000 + 1),
            EqualTo: (-(-micros // 1000), micros // 1000 + 1),
        }
        low, high = bounds.get(type(item), (None, None))
        self._from_ms = _pick(max, self._from_ms, low)
        self._to_ms = _pick(min, self._to_ms, high)
        return False

    def allow(self, stream: str) -> bool:
        return all(stream in names for names in self._names) and all(
            stream.startswith(prefix) for prefix in self._prefixes
        )

    def narrow(self, start: Position, end: Position) -> tuple[Position, Position]:
        """Return the part of a range that has the wanted times."""
        if self._from_ms is not None:
            low = Position(ids.before(ids.format(max(0, self._from_ms))))
            start = low if low.is_after(start) else start
        if self._to_ms is not None:
            high = Position(ids.before(ids.format(max(0, self._to_ms))))
            end = end if ids.parse(end.id) <= ids.parse(high.id) else high
        return start, end


def _pick(choose: Callable[..., int], one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)
