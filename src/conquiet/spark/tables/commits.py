"""Commits: how files become part of a table; one class for each format.

A commit adds files, removes files and moves the fence of a query, all or nothing. Nobody sees a
file before its commit, and a batch that was committed is not committed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.tables.files import OWN, DataFile, Partition

Format = Literal["delta", "parquet"]


@dataclass(frozen=True)
class Fence:
    """Which batch of which query; batches are numbered upwards."""

    query: str
    batch: int


class Commits(Protocol):
    """The log of a table."""

    def schema(self) -> StructType | None:
        """The table's columns; None if there is no table yet."""

    def partition_by(self) -> list[str]:
        """The columns by which its files are grouped."""

    def applied(self, query: str) -> int:
        """The last batch of a query that is in the table; -1 for none."""

    def files(self) -> list[str]:
        """Its files, with their folders below the table."""

    def files_of(self, partitions: Collection[Partition]) -> list[str]:
        """Its files in some partitions."""

    def create(self, schema: StructType, partition_by: Sequence[str]) -> None:
        """Make an empty table, or add columns to the one that is there."""

    def is_under_way(self) -> bool:
        """Whether a commit began and still needs its staged files."""

    def commit(self, add: Sequence[DataFile], remove: Sequence[str], fence: Fence | None) -> None:
        """Add and remove files, and move a fence, at once; or nothing, if it was moved before."""


def format_of(path: Path) -> Format | None:
    """What kind of table lies in a folder, if any."""
    if (path / "_delta_log").is_dir():
        return "delta"
    return "parquet" if (path / OWN / "state.json").is_file() else None


def commits_of(path: Path, wanted: str) -> Commits:
    """The log of a table, which is or will be of a format."""
    if wanted not in ("delta", "parquet"):
        raise ConfigError(f"format={wanted!r}: choose 'delta' or 'parquet'")
    there = format_of(path)
    if there is not None and there != wanted:
        raise ConfigError(f"{path} is a table of the format {there}, not {wanted}")
    if wanted == "delta":
        from conquiet.spark.tables.delta import DeltaCommits

        return DeltaCommits(path)
    from conquiet.spark.tables.parquet import ParquetCommits

    return ParquetCommits(path)
