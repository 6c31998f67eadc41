"""Writing: executors write Parquet files, the driver commits them.

append_once         a batch of a query, once, whatever is retried or replayed
replace_partitions  the rows of whole partitions, atomically; the same rows are the same bytes
write_table         a stream, each micro-batch once; or a frame, once more
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError
from conquiet.spark.query import start_query
from conquiet.spark.tables.commits import Commits, Fence, Format, commits_of
from conquiet.spark.tables.files import (
    OWN,
    DataFile,
    Partition,
    named_by_batch,
    named_by_content,
    partition_of,
    short_hash,
    staged_files,
    table_path,
)
from conquiet.spark.tables.schema import check_partitions, merged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STALE_SECONDS = 24 * 3600.0
"""Staged files of a frame that belongs to no query are swept when they are older than this."""

_QUERY = "sql.streaming.queryId"
_TIMESTAMPS = "spark.sql.parquet.outputTimestampType"


def append_once(
    frame: DataFrame,
    path: str | os.PathLike[str],
    *,
    query: str,
    batch: int,
    format: Format = "delta",
    partition_by: Sequence[str] = (),
) -> bool:
    """Add the rows of a batch, unless the table has this batch of the query or a later one.

    Says whether they were added.
    """
    table = table_path(path)
    commits = commits_of(table, format)
    if commits.applied(query) >= batch:
        return False
    _prepare(commits, table, frame, partition_by)
    with _staged(frame, table, commits, partition_by, query) as files:
        commits.commit(named_by_batch(files, query, batch), [], Fence(query, batch))
    return True


def _append(
    frame: DataFrame, path: str | os.PathLike[str], format: Format, partition_by: Sequence[str]
) -> None:
    """Add the rows of a frame that belongs to no query."""
    table = table_path(path)
    commits = commits_of(table, format)
    _prepare(commits, table, frame, partition_by)
    with _staged(frame, table, commits, partition_by, None) as files:
        commits.commit(named_by_batch(files, secrets.token_hex(8), 0), [], None)


def replace_partitions(
    frame: DataFrame,
    path: str | os.PathLike[str],
    partition_by: Sequence[str],
    *,
    partitions: Sequence[Mapping[str, Any]] | None = None,
    sort_by: Sequence[str] = (),
    format: Format = "delta",
    query: str | None = None,
    batch: int | None = None,
) -> bool:
    """Put the rows of a frame in place of whatever is in their partitions, in one commit.

    `partitions` names those to replace, also if the frame has no rows for them any more; without,
    they are those of the frame's rows. With `sort_by` each partition becomes one file in that
    order: the same rows give the same bytes, and a partition that did not change is left alone.
    With `query` and `batch`, a batch is applied once. Says whether anything changed.
    """
    if not partition_by:
        raise ConfigError("replace_partitions needs partition_by=[…]: what is to be replaced?")
    fence = _fence(query, batch)
    table = table_path(path)
    commits = commits_of(table, format)
    if fence is not None and commits.applied(fence.query) >= fence.batch:
        return False
    _prepare(commits, table, frame, partition_by)
    if sort_by:
        frame = frame.repartition(*partition_by).sortWithinPartitions(*partition_by, *sort_by)
    with _staged(frame, table, commits, partition_by, query) as written:
        files = named_by_content(written)
        chosen = _chosen(files, partitions, partition_by)
        there, new = set(commits.files_of(chosen)), {one.name for one in files}
        add = [one for one in files if one.name not in there]
        remove = sorted(there - new)
        if not add and not remove and fence is None:
            return False
        commits.commit(add, remove, fence)
    return bool(add or remove)


def write_table(
    frame: DataFrame,
    path: str | os.PathLike[str],
    *,
    format: Format = "delta",
    partition_by: Sequence[str] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> StreamingQuery | None:
    """Write a stream, each micro-batch once, and give the running query; or append a frame.

    `trigger` is what `DataStreamWriter.trigger` takes: `{"availableNow": True}`. The query holds
    the lock of its checkpoint until it ends.
    """
    if not frame.isStreaming:
        if checkpoint is not None or trigger is not None:
            raise ConfigError("checkpoint and trigger are for streams; this frame is none")
        _append(frame, path, format, partition_by)
        return None
    if checkpoint is None:
        raise ConfigError("a stream needs checkpoint=…, a folder where it keeps its place")
    write = appending(path, format=format, partition_by=partition_by)
    writer = frame.writeStream.foreachBatch(write)
    writer = writer.queryName(name) if name else writer
    return start_query(writer.trigger(**trigger) if trigger else writer, checkpoint)


def appending(
    path: str | os.PathLike[str], *, format: Format = "delta", partition_by: Sequence[str] = ()
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that adds each micro-batch once."""
    commits_of(table_path(path), format)  # tells now what is wrong

    def write(frame: DataFrame, batch: int) -> None:
        query = query_of(frame)
        append_once(frame, path, query=query, batch=batch, format=format, partition_by=partition_by)

    return write


def query_of(frame: DataFrame) -> str:
    """The id of the query whose micro-batch a frame is: the same after a restart."""
    query = frame.sparkSession.sparkContext.getLocalProperty(_QUERY)
    if query is None:
        raise ConfigError("this is for foreachBatch; for a frame, use append_once()")
    return str(query)


# --- before a commit ----------------------------------------------------------------------------


def _fence(query: str | None, batch: int | None) -> Fence | None:
    if query is None and batch is None:
        return None
    if query is None or batch is None:
        raise ConfigError("give query and batch together, or neither")
    return Fence(query, batch)


def _prepare(commits: Commits, table: Path, frame: DataFrame, partition_by: Sequence[str]) -> None:
    """Make the table, or see that the frame fits it."""
    check_partitions(frame.schema, partition_by)
    there = commits.schema()
    if there is None:
        commits.create(frame.schema, partition_by)
        return
    if commits.partition_by() != list(partition_by):
        raise ConfigError(
            f"{table} is partitioned by {commits.partition_by()}, not by {list(partition_by)}"
        )
    whole = merged(there, frame.schema, table)
    if len(whole) > len(there):
        commits.create(whole, partition_by)


def _chosen(
    files: Sequence[DataFile],
    partitions: Sequence[Mapping[str, Any]] | None,
    partition_by: Sequence[str],
) -> set[Partition]:
    written = {one.partition for one in files}
    if partitions is None:
        return written
    chosen = {partition_of(one, partition_by) for one in partitions}
    beyond = sorted(map(str, written - chosen))
    if beyond:
        raise ConfigError(
            f"the frame has rows of partitions that are not to be replaced: {beyond[0]:.200}"
        )
    return chosen


@contextlib.contextmanager
def _staged(
    frame: DataFrame,
    table: Path,
    commits: Commits,
    partition_by: Sequence[str],
    query: str | None,
) -> Iterator[list[DataFile]]:
    """The frame as files that are in no table yet; gone afterwards if nobody took them."""
    staging = table / OWN / "staging"
    mark = short_hash(query.encode()) if query else "frame"
    _sweep(staging, mark if query else None)
    folder = staging / f"{mark}-{secrets.token_hex(4)}"
    try:
        with _exact_timestamps(frame.sparkSession):
            frame.write.partitionBy(*partition_by).parquet(str(folder))
        yield staged_files(folder)
    finally:
        if not commits.is_under_way():
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(staging: Path, mark: str | None) -> None:
    """Take away what killed drivers have left: at once of this query, of others after a day."""
    for folder in staging.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            ours = mark is not None and folder.name.startswith(f"{mark}-")
            if ours or folder.stat().st_mtime < time.time() - STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _exact_timestamps(spark: SparkSession) -> Iterator[None]:
    """Microseconds, which every reader takes; Spark's default is a type of its own."""
    before = spark.conf.get(_TIMESTAMPS)
    spark.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(_TIMESTAMPS, str(before))
