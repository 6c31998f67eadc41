"""LogReader: the log in one batch, from one bound to another."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from conquiet.spark.log.batches import Batches
from conquiet.spark.log.connection import client_of
from conquiet.spark.log.filters import Filters
from conquiet.spark.log.loss import DataLoss
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.piece import BEGINNING, Piece
from conquiet.spark.log.ranges import Ranges
from conquiet.spark.log.streams import Streams, StreamState
from conquiet.spark.log.tasks import LogPartition, plan

logger = logging.getLogger("conquiet.spark")


def read_pieces(
    options: ReadOptions, batches: Batches, partition: LogPartition
) -> Iterator[pa.RecordBatch]:
    """What a task does: read its pieces, in whichever process it runs."""

    def short(piece: Piece, got: int) -> None:
        place = f"after {piece.after} and up to {piece.until}"
        said = f"stream {piece.stream!r}: of {piece.entries} entries {place}, {got} are left; the"
        said += " others were trimmed or deleted meanwhile"
        if piece.entries is None:
            said = f"stream {piece.stream!r} was trimmed behind {piece.first} while entries {place}"
            said += f" were read; {got} were found, and some may be gone"
        if options.fail_on_data_loss:
            raise DataLoss(f"{said}. Set failOnDataLoss=false to go on with what there is.")
        logger.warning("%s", said)

    ranges = Ranges(client_of(options.address), short)
    return batches.of(ranges.read(partition.pieces))


class LogReader(DataSourceReader):
    """Plans in Spark's planner process, reads in its workers."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._batches = Batches(schema, options.types)
        self._filters = Filters()

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        streams = Streams(client_of(options.address), options.streams, 0.0)
        names = [name for name in streams.names() if self._filters.allow(name)]
        states = streams.states(names)
        pieces = [self._piece(name, states[name]) for name in names if name in states]
        found = [piece for piece in pieces if piece is not None]
        tasks = plan(streams.wire, found, options.min_partitions, options.max_per_partition)
        # Spark makes one task that reads None of an empty list.
        return tasks or [LogPartition(())]

    def _piece(self, stream: str, state: StreamState) -> Piece | None:
        start = self._options.start.position(stream, state)
        end = self._options.end.position(stream, state)
        start, end = self._filters.narrow(start, end)
        if not state.length or not end.is_after(start):
            return None
        is_whole = start.id == BEGINNING and end.id == state.last_id
        entries = state.length if is_whole else None
        return Piece(stream, start.id, end.id, entries, at_most=state.length)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        return read_pieces(self._options, self._batches, partition)


class FilteringLogReader(LogReader):
    """Leaves out streams and times that no row is wanted of."""

    def pushFilters(self, filters: list[Filter]) -> Any:  # noqa: N802 - Spark's
        return [item for item in filters if not self._filters.take(item)]


_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"


def pushes_filters() -> bool:
    """Whether this is the process that Spark asks about filters.

    Elsewhere a reader must not even have the method: Spark refuses it unless
    spark.sql.python.filterPushdown.enabled is set, and does not say here whether it is.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHING in sys.modules or (spec is not None and spec.name == _PUSHING)
