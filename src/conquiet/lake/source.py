"""Source: a folder of Parquet files in the columns of the log, as a stream of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession

_MARK = "conquiet_files"
_PATTERN = frozenset("*?[{")


def read_files(spark: SparkSession, path: str, **options: str) -> DataFrame:
    """Read a folder of Parquet files as a stream, as `pipeline.run` takes it.

    `path` is one that every machine of Spark can read. `options` are those of Spark's source of
    files, as `maxFilesPerTrigger`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from conquiet.spark.columns import ARROW_SCHEMA

    reader = spark.readStream.schema(from_arrow_schema(ARROW_SCHEMA))
    frame = reader.options(**options).parquet(path)
    setattr(frame, _MARK, True)
    return frame


def are_files(frame: DataFrame) -> bool:
    """Return whether a frame is what `read_files` gave: files in the columns of the log."""
    return bool(getattr(frame, _MARK, False))


class Split(NamedTuple):
    """The row groups of a local file whose middle is between two bytes."""

    path: str
    start: int
    length: int


def plan_splits(frame: DataFrame) -> list[Split]:
    """Return what the tasks of a micro-batch would read, as Spark has divided it; nothing if not
    all of it is in local files.

    The frame of a micro-batch is an RDD of rows: `inputFiles()` knows nothing of it.
    """
    rdd = frame._jdf.queryExecution().toRdd()
    while not rdd.dependencies().isEmpty():
        rdd = rdd.dependencies().head().rdd()
    if rdd.getClass().getSimpleName() != "FileScanRDD":
        return []
    partitions = rdd.filePartitions()
    found: list[Split] = []
    for number in range(partitions.length()):
        for one in partitions.apply(number).files():
            split = _split(one)
            if split is None:
                return []
            found.append(split)
    return found


def _split(part: Any) -> Split | None:
    place = urlsplit(part.urlEncodedPath())
    if place.scheme not in ("", "file") or part.partitionValues().numFields():
        return None
    return Split(unquote(place.path), part.start(), part.length())


def read_splits(
    splits: Iterable[Split], rows: int, columns: Sequence[str] | None = None
) -> Iterator[RecordBatch]:
    """Read parts of Parquet files, without Spark's own reader, in batches of some rows."""
    import pyarrow.parquet as pq

    for split in splits:
        with pq.ParquetFile(split.path) as file:
            groups = [
                number
                for number in range(file.num_row_groups)
                if 0 <= _middle(file.metadata.row_group(number)) - split.start < split.length
            ]
            yield from file.iter_batches(batch_size=rows, row_groups=groups, columns=columns)


def _middle(group: Any) -> int:
    """Return the byte by which Spark gives a row group to one of several tasks."""
    first = group.column(0)
    start = first.data_page_offset
    if first.has_dictionary_page:
        start = min(start, first.dictionary_page_offset)
    size = sum(group.column(number).total_compressed_size for number in range(group.num_columns))
    return int(start + size // 2)


def check_files(path: str) -> None:
    """Refuse local files without the columns of the log: Spark would read nulls instead."""
    if "://" in path or _PATTERN & set(path):
        return
    folder = Path(path)
    if not folder.exists():
        raise ConfigError(f"{path}: there is no such folder")
    for file in parquet_files(folder):
        _check(file)


def parquet_files(folder: Path) -> Iterator[Path]:
    """Find the files that Spark would read, in order."""
    if folder.is_file():
        yield folder
        return
    for one in sorted(folder.iterdir()):
        if not one.name.startswith(("_", ".")):
            yield from parquet_files(one)


def _check(file: Path) -> None:
    import pyarrow
    import pyarrow.parquet as pq

    from conquiet.spark.columns import ARROW_SCHEMA

    try:
        there = set(pq.read_schema(file).names)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(
            f"{file} is not a whole Parquet file; take it out of the folder"
        ) from error
    missing = [name for name in ARROW_SCHEMA.names if name not in there]
    if missing:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}: files have the columns of the log, as"
            " those of raw_events"
        )
