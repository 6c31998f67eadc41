"""Target: what an upsert asks of a database; one class for each of the two.

    task      stage     rows into a place of their own, which nobody reads
    driver    apply     one transaction: is this batch new? then staged rows into the table, by key
    driver    sweep     what tasks and drivers that died have left

The fence is the row of (query, table) in `conquiet_upserts`: its batch moves in the transaction
that writes the rows, so a batch is in the table and counted, or neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from conquiet.errors import ConquietError, PermanentError
from conquiet.spark.upsert.options import UpsertOptions

FENCES = "conquiet_upserts"
"""The table that holds the last batch of each query, for each table that it writes to."""


class UpsertFailed(ConquietError):
    """The database refused a batch; nothing of it was written."""


class UnfitRows(PermanentError):
    """Rows that cannot be written by key: no value in the key, or the same key twice."""


@dataclass(frozen=True)
class Fence:
    """Which batch of which query; batches are numbered upwards."""

    query: str
    batch: int

    def mark(self, table: str) -> str:
        """What the staged rows of a query for a table are marked with."""
        return mark(f"{self.query}\0{table}")


def mark(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


class Target(Protocol):
    """A table with a key in one of the databases."""

    def check(self, schema: StructType) -> None:
        """Raise what to change if the frame does not fit the table."""

    def stage(self, batches: Iterator[pa.RecordBatch], marked: str) -> str:
        """Put rows aside; gives the name of the place."""

    def apply(self, stages: Sequence[str], columns: Sequence[str], fence: Fence | None) -> bool:
        """Write staged rows, once; whether they were new."""

    def drop(self, stages: Sequence[str]) -> None:
        """Throw staged rows away."""

    def sweep(self, marked: str, *, older_than: float | None = None) -> None:
        """Throw away what has the mark, or only what is older than some seconds."""


def target_of(options: UpsertOptions) -> Target:
    database = options.address.resolve()
    if database.is_postgresql:
        from conquiet.spark.upsert.postgres import PostgresTarget

        return PostgresTarget(database, options)
    from conquiet.spark.upsert.sqlite import SqliteTarget

    return SqliteTarget(database, options)


def check_rows(
    batches: Iterator[pa.RecordBatch], options: UpsertOptions
) -> Iterator[pa.RecordBatch]:
    """The same batches; a row that has no key, or nothing to be ordered by, is an error."""
    for batch in batches:
        for names, what in ((options.keys, "key"), (options.order_by, "orderBy")):
            for name in names:
                if batch.column(name).null_count:
                    raise UnfitRows(
                        f"{options.table}: {batch.column(name).null_count} rows have NULL in"
                        f" {name!r}, a column of {what}; filter them out or give them a value"
                    )
        yield batch


def quoted(name: str) -> str:
    """A name of SQL, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str], prefix: str = "") -> str:
    return ", ".join(prefix + quoted(name) for name in names)


def on_conflict(options: UpsertOptions, columns: Sequence[str], table: str) -> str:
    """What happens to a row whose key is there: replaced, unless the one there is higher."""
    others = [name for name in columns if name not in options.keys]
    if not others:
        return f"ON CONFLICT ({listed(options.keys)}) DO NOTHING"
    changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in others)
    clause = f"ON CONFLICT ({listed(options.keys)}) DO UPDATE SET {changes}"
    if not options.order_by:
        return clause
    there, new = listed(options.order_by, f"{table}."), listed(options.order_by, "excluded.")
    # A row in the table with NULL there came from somebody else, and yields.
    return f"{clause} WHERE (({there}) <= ({new})) IS NOT FALSE"
