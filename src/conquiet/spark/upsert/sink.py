"""The format `conquiet-upsert`, for frames and streams, and functions around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.upsert.target import QueryBatch, UpsertOptions, check_rows, mark, target_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


STALE_SECONDS = 24 * 3600.0
"""Staged rows of a frame without a query are swept when they are older than this."""

_FORMAT = "conquiet-upsert"
_QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """The result of a task: where its rows are staged, and for which query."""

    place: str | None
    query: str | None = None


class UpsertSink(DataSource):
    """Gives Spark the writers."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return _FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> UpsertWriter:
        options = self._check(schema, overwrite)
        return UpsertWriter(options, schema.names)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> UpsertStreamWriter:
        options = self._check(schema, overwrite)
        if options.query is not None:
            # With a new checkpoint batches begin at 0: under an old name they count as written.
            raise ConfigError(
                "the options query and batch are for frames; a stream is identified by its"
                " checkpoint"
            )
        return UpsertStreamWriter(options, schema.names)

    def _check(self, schema: StructType, overwrite: bool) -> UpsertOptions:
        if overwrite:
            raise ConfigError(
                "conquiet-upsert replaces rows by key, never a table; use mode('append')"
            )
        options = UpsertOptions.of(self.options, schema.names)
        target_of(options).check(schema)
        return options


class UpsertWriter(DataSourceArrowWriter):
    """Writes a frame: tasks stage it, the driver writes it in one transaction."""

    def __init__(self, options: UpsertOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.columns = columns
        self._batch: QueryBatch | None = None
        if options.query is not None:
            if options.batch is None:
                raise ConfigError(
                    f"query={options.query!r}: which batch of it? Give the option batch too"
                )
            self._batch = QueryBatch(options.query, options.batch)

    @property
    def _mark(self) -> str:
        table = self.options.table
        return self._batch.mark(table) if self._batch else mark(table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        return stage_rows(iterator, self.options, self._mark)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        target = target_of(self.options)
        target.apply(_places(messages), self.columns, self._batch)
        target.sweep(self._mark, older_than=None if self._batch else STALE_SECONDS)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        target_of(self.options).drop(_places(messages))


class UpsertStreamWriter(DataSourceStreamArrowWriter):
    """Writes each micro-batch of a stream once, by the query's id and the batch's number."""

    def __init__(self, options: UpsertOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        query = _property(_QUERY_ID)
        if query is None:
            raise ConfigError(
                "this version of Spark does not give its tasks the id of their query; use"
                " foreachBatch(upsert_batches_into(…))"
            )
        return stage_rows(
            iterator, self.options, QueryBatch(query, 0).mark(self.options.table), query
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        queries = {one.query for one in messages if isinstance(one, Staged)} - {None}
        if not queries:
            return  # a batch without a task has no rows
        [query] = queries
        batch = QueryBatch(str(query), batchId)
        target = target_of(self.options)
        target.apply(_places(messages), self.columns, batch)
        # One driver runs a query: rows that still have its mark are of dead tasks and drivers.
        target.sweep(batch.mark(self.options.table))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        target_of(self.options).drop(_places(messages))


def stage_rows(
    batches: Iterator[pa.RecordBatch], options: UpsertOptions, marked: str, query: str | None = None
) -> Staged:
    """Stage the rows of a task."""
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


def upsert_into(
    frame: DataFrame,
    table: str,
    keys: Sequence[str],
    *,
    order_by: Sequence[str] = (),
    query: str | None = None,
    batch: int | None = None,
    **address: str,
) -> None:
    """Write a `frame` into a `table` by key, in one transaction; `address` is `url=…` or the like.

    With `query` and `batch` it is written once: the same or a lower batch is ignored later.

    `keys` are the columns of the key. Of rows with the same key the one that is highest in
    `order_by` wins; without it, such a key is an error.
    """
    _ensure_registered(frame.sparkSession)
    options: dict[str, Any] = {"table": table, "keys": ",".join(keys), **address}
    if order_by:
        options["orderBy"] = ",".join(order_by)
    if query is not None:
        options["query"] = query
    if batch is not None:
        options["batch"] = str(batch)
    frame.write.format(_FORMAT).mode("append").options(**options).save()


def _ensure_registered(spark: SparkSession) -> None:
    """Register the formats unless the session has them: Spark warns when it is repeated."""
    try:
        known = spark._jsparkSession.sessionState().dataSourceManager()
        if known.dataSourceExists(_FORMAT):
            return
    except AttributeError:  # Spark Connect, or another version of Spark
        pass
    from conquiet.spark.formats import register

    register(spark)


def upsert_batches_into(
    table: str, keys: Sequence[str], *, order_by: Sequence[str] = (), **address: str
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that writes each micro-batch once.

    `table`, `keys`, `order_by` and `address` are those of `upsert_into`.
    """

    def write(frame: DataFrame, batch: int) -> None:
        query = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        if query is None:
            raise ConfigError(
                "upsert_batches_into() is for foreachBatch; for a frame, use upsert_into()"
            )
        upsert_into(frame, table, keys, order_by=order_by, query=query, batch=batch, **address)

    return write
