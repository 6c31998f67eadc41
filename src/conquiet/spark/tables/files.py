"""Files: the Parquet files of a table, where they lie and what their partitions are.

TABLE/day=2026-01-31/7f9c…-0000000012-00000.parquet
TABLE/_conquiet/staging/…     files that no reader sees yet; `_` hides them from Spark and Delta
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from conquiet.errors import ConfigError
from conquiet.spark.tables.footer import with_sorted_encodings

OWN = "_conquiet"
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_scheme = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)

Partition = tuple[tuple[str, str | None], ...]
"""Columns and values as Delta and the names of folders have them: text, or None."""


@dataclass(frozen=True)
class DataFile:
    """A Parquet file: where it was written, and where it belongs below the table."""

    written: Path
    name: str
    partition: Partition
    rows: int
    size: int


def table_path(path: str | os.PathLike[str]) -> Path:
    """The folder of a table; driver and executors must both have it under this name."""
    text = os.fspath(path)
    found = _scheme.match(text)
    if found is not None and found[1].lower() != "file":
        raise ConfigError(
            f"{text}: tables lie in folders that the driver and all executors share, not at"
            f" {found[1]}; name a path, on one machine or on a shared disk"
        )
    return Path(os.path.abspath(re.sub(r"^file:(//)?(?=/)", "", text)))


def partition_of(values: Mapping[str, Any], columns: Sequence[str]) -> Partition:
    """Values of partition columns as text."""
    missing = [name for name in columns if name not in values]
    if missing:
        raise ConfigError(f"partition {dict(values)!r:.100} has no value of {', '.join(missing)}")
    return tuple((name, _text(values[name])) for name in columns)


def _text(value: Any) -> str | None:
    if value is None or value == "":  # Spark writes both into the same folder
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def staged_files(folder: Path) -> list[DataFile]:
    """What Spark has written into a folder, in a fixed order, without empty files."""
    import pyarrow.parquet as pq

    found = []
    for path in sorted(parquet_files(folder)):
        rows = pq.read_metadata(path).num_rows
        if rows:
            name = str(path.relative_to(folder))
            found.append(DataFile(path, name, partition_at(name), rows, path.stat().st_size))
    return found


def partition_at(name: str) -> Partition:
    """The partition of a file, by the folders that it lies in."""
    return tuple(_value(part) for part in Path(name).parent.parts)


def _value(part: str) -> tuple[str, str | None]:
    name, _, value = part.partition("=")
    return unquote(name), None if value == _NO_VALUE else unquote(value)


def named_by_batch(files: Sequence[DataFile], query: str, batch: int) -> list[DataFile]:
    """The files of a batch: the same names whenever it is written."""
    mark = short_hash(query.encode())
    return [_named(one, f"{mark}-{batch:010d}-{number:05d}") for number, one in enumerate(files)]


def named_by_content(files: Sequence[DataFile]) -> list[DataFile]:
    """Files whose names are those of their bytes: the same rows again are the same files."""
    for one in files:
        with_sorted_encodings(one.written)
    return [_named(one, f"part-{short_hash(one.written.read_bytes())}") for one in files]


def _named(one: DataFile, name: str) -> DataFile:
    return replace(one, name=str(Path(one.name).with_name(f"{name}.parquet")))


def short_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def parquet_files(folder: Path) -> Iterator[Path]:
    """The files of a folder and those below it, without hidden ones."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        for name in names:
            if name.endswith(".parquet") and not name.startswith(("_", ".")):
                yield Path(root, name)
