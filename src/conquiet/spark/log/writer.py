"""Write events to Redis Streams, each once, though Spark may run a task more than once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from conquiet.errors import ConfigError
from conquiet.redis.connection import Database
from conquiet.spark.log.connection import client_of
from conquiet.spark.log.encoder import Entries, RowEncoder
from conquiet.spark.log.lane import Attempt, Lane, connect_to
from conquiet.spark.log.options import WriteOptions

if TYPE_CHECKING:
    import pyarrow as pa

_QUERY_ID = "sql.streaming.queryId"
_RUN_ID = "spark.jobGroup.id"
_BATCH_ID = "streaming.sql.batchId"


def batch_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer of `df.write.format("conquiet")`."""
    if overwrite:
        raise ConfigError(
            "mode('overwrite') is refused: a log is appended to; delete the streams yourself, then"
            " write with mode('append')"
        )
    return _BatchWriter(WriteOptions.of(options), schema.names)


def stream_writer(
    options: Mapping[str, str], schema: Any, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Return the writer of `df.writeStream.format("conquiet")`."""
    if overwrite:
        raise ConfigError("outputMode('complete') is refused: a log is appended to; use 'append'")
    made = WriteOptions.of(options)
    if made.write_id is not None:
        raise ConfigError("option writeId is for batches; a stream is identified by its checkpoint")
    return _StreamWriter(made, schema.names)


@dataclass(slots=True)
class Added(WriterCommitMessage):
    """The result of a task: how many rows it offered."""

    rows: int


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        RowEncoder(columns, options)  # refuses on the driver a frame that no task could write
        self._options = options
        self._columns = columns
        self._job = uuid.uuid4().hex  # one writer is made per job, and copied into its tasks

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Added:
        return _write(
            iterator, self._options, self._columns, _batch_attempt(self._options, self._job)
        )


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        RowEncoder(columns, options)
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Added:
        return _write(iterator, self._options, self._columns, _stream_attempt())


def _write(
    batches: Iterator[pa.RecordBatch], options: WriteOptions, columns: list[str], attempt: Attempt
) -> Added:
    prefix = f"{attempt.query}-{attempt.batch}-{attempt.partition}-"
    rows = RowEncoder(columns, options, prefix)
    task = _Task(attempt, options, named=not rows.makes_ids)
    offered = 0
    try:
        for batch in batches:
            offered += batch.num_rows
            for entries in rows.encode(batch):
                for part in entries.slices(options.slice_rows, options.slice_bytes):
                    task.add(part)
        task.finish()
    finally:
        task.close()
    return Added(offered)


class _Task:
    """The lanes of one task. One slice is in flight while the next is encoded."""

    def __init__(self, attempt: Attempt, options: WriteOptions, named: bool) -> None:
        self._attempt = attempt
        self._options = options
        self._named = named
        self._database = Database(client_of(options.address))
        self._connections: dict[str, Any] = {}
        self._lanes: dict[str, Lane] = {}
        self._in_flight: tuple[Lane, Entries] | None = None

    def add(self, entries: Entries) -> None:
        self._settle()
        lane = self._lane(entries.stream)
        if lane.offer(entries):
            self._in_flight = (lane, entries)

    def finish(self) -> None:
        self._settle()
        for lane in self._lanes.values():
            lane.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _settle(self) -> None:
        if self._in_flight is None:
            return
        (lane, entries), self._in_flight = self._in_flight, None
        while not lane.confirm():
            if not lane.offer(entries):
                return

    def _lane(self, stream: str) -> Lane:
        lane = self._lanes.get(stream)
        if lane is None:
            # One slice is in flight, so one connection is enough; in a cluster, one per stream.
            name = stream if self._database.is_cluster else ""
            if name not in self._connections:
                self._connections[name] = connect_to(self._database, stream)
            connection = self._connections[name]
            lane = Lane(connection, stream, self._attempt, self._options, self._named)
            self._lanes[stream] = lane
        return lane


# --- attempts -------------------------------------------------------------------------------


def _stream_attempt() -> Attempt:
    task = _task()
    query, batch = (task.getLocalProperty(name) for name in (_QUERY_ID, _BATCH_ID))
    run = task.getLocalProperty(_RUN_ID)
    if query is None or batch is None or run is None:
        raise ConfigError(
            "this version of Spark does not say to its tasks which micro-batch they write, so a"
            " repeated one cannot be recognised; use foreachBatch and option writeId"
        )
    return Attempt(query, run, int(batch), task.partitionId(), task.taskAttemptId())


def _batch_attempt(options: WriteOptions, job: str) -> Attempt:
    task = _task()
    return Attempt(options.write_id or job, job, 0, task.partitionId(), task.taskAttemptId())


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark calls a writer inside a task"
    return task
