"""UpsertSink: the format `conquiet-upsert`, for frames and for streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.upsert.options import UpsertOptions
from conquiet.spark.upsert.target import Fence, check_rows, mark, target_of

STALE_SECONDS = 24 * 3600.0
"""Staged rows of a frame that belongs to no query are swept when they are older than this."""

_QUERY = "sql.streaming.queryId"


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """Where a task has put its rows, and for which query."""

    place: str | None
    query: str | None = None


class UpsertSink(DataSource):
    """What Spark asks for a writer."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return "conquiet-upsert"

    def writer(self, schema: StructType, overwrite: bool) -> UpsertWriter:
        options = self._checked(schema, overwrite)
        return UpsertWriter(options, schema.names)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> UpsertStreamWriter:
        options = self._checked(schema, overwrite)
        if options.query is not None:
            # With a new checkpoint batches begin at 0: under an old name they count as written.
            raise ConfigError(
                "the options query and batch are for frames: a stream is known by its checkpoint"
            )
        return UpsertStreamWriter(options, schema.names)

    def _checked(self, schema: StructType, overwrite: bool) -> UpsertOptions:
        if overwrite:
            raise ConfigError(
                "conquiet-upsert replaces rows by key, never a table; use mode('append')"
            )
        options = UpsertOptions.of(self.options, schema.names)
        target_of(options).check(schema)
        return options


class UpsertWriter(DataSourceArrowWriter):
    """A frame: staged by its tasks, written by the driver in one transaction."""

    def __init__(self, options: UpsertOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.columns = columns
        self._fence: Fence | None = None
        if options.query is not None:
            if options.batch is None:
                raise ConfigError(
                    f"query={options.query!r}: which batch of it? Give the option batch too"
                )
            self._fence = Fence(options.query, options.batch)

    @property
    def _mark(self) -> str:
        table = self.options.table
        return self._fence.mark(table) if self._fence else mark(table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return staged(iterator, self.options, self._mark)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        target = target_of(self.options)
        target.apply(_places(messages), self.columns, self._fence)
        target.sweep(self._mark, older_than=None if self._fence else STALE_SECONDS)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        target_of(self.options).drop(_places(messages))


class UpsertStreamWriter(DataSourceStreamArrowWriter):
    """A stream: each micro-batch once, by the query's id and the number of the batch."""

    def __init__(self, options: UpsertOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        query = _property(_QUERY)
        if query is None:
            raise ConfigError(
                "this Spark does not tell its tasks the id of their query; use"
                " foreachBatch(upserting(…))"
            )
        return staged(iterator, self.options, Fence(query, 0).mark(self.options.table), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        queries = {one.query for one in messages if isinstance(one, Staged)} - {None}
        if not queries:
            return  # a batch without a task has no rows
        [query] = queries
        fence = Fence(str(query), batchId)
        target = target_of(self.options)
        target.apply(_places(messages), self.columns, fence)
        # One driver runs a query: what has its mark now was left by tasks and drivers that died.
        target.sweep(fence.mark(self.options.table))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        target_of(self.options).drop(_places(messages))


def staged(
    batches: Iterator[pa.RecordBatch], options: UpsertOptions, marked: str, query: str | None = None
) -> Staged:
    """Put the rows of a task aside."""
    full = (batch for batch in batches if batch.num_rows)
    checked = check_rows(full, options)
    first = next(checked, None)
    if first is None:
        return Staged(None, query)
    return Staged(target_of(options).stage(chain([first], checked), marked), query)


def _places(messages: Sequence[WriterCommitMessage | None]) -> list[str]:
    return [one.place for one in messages if isinstance(one, Staged) and one.place is not None]


def _property(name: str) -> str | None:
    from pyspark import TaskContext

    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)
