"""Upsert targets: tables with a key, in one class for each of the two databases.

    task      stage     put rows into a place of their own, which no other task reads
    driver    apply     in one transaction: if this batch is new, move staged rows into the table
    driver    sweep     delete staged rows that dead tasks and drivers have left

The fence is the row of (query, table) in `conquiet_upserts`: its batch changes in the transaction
that writes the rows, so a batch is in the table and counted, or neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError, ConquietError, PermanentError
from conquiet.spark.database import Database
from conquiet.spark.options import (
    DATABASE,
    SET_BY_SPARK,
    URL_ENV,
    URL_FILE,
    Address,
    Option,
    Options,
)
from conquiet.sql.schema import split_name

FENCES = "conquiet_upserts"
"""The table that holds the last batch of each query, for each table that it writes to."""


class UpsertFailed(ConquietError):
    """The database refused a batch; nothing of it was written."""


class UnfitRows(PermanentError):
    """Rows cannot be written by key: the key has no value, or is there twice."""


# --- options --------------------------------------------------------------------------------

UPSERT_OPTIONS = {
    "url": Option("", f"where the database is: {DATABASE[1]}"),
    "urlFile": URL_FILE,
    "urlEnv": URL_ENV,
    "table": Option("", "the table to write to; it must exist"),
    "keys": Option("", "by commas: the columns of its key; a unique index must have them"),
    "orderBy": Option(
        "",
        "by commas: of rows with the same key, the one that is highest in these columns wins,"
        " within a batch and against the table; without it, a key twice in a batch is an error",
    ),
    "query": Option("", "frame only: whose batch it is, to write it once"),
    "batch": Option(
        "", "frame only, with `query`: the number of the batch; lower ones are ignored from then on"
    ),
}


@dataclass(frozen=True)
class UpsertOptions:
    """The checked options of a write; can be pickled."""

    address: Address
    table: str
    keys: tuple[str, ...]
    order_by: tuple[str, ...] = ()
    query: str | None = None
    batch: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, str], columns: Sequence[str]) -> UpsertOptions:
        options = Options(
            given, UPSERT_OPTIONS, "the format 'conquiet-upsert'", ignored=SET_BY_SPARK
        )
        for name in ("table", "keys"):
            if not options.text(name):
                meaning = UPSERT_OPTIONS[name].meaning
                raise ConfigError(f"conquiet-upsert needs the option {name}: {meaning}")
        table = str(options.text("table"))
        split_name(table)
        keys, order = options.names("keys"), options.names("orderBy")
        for option, names in (("keys", keys), ("orderBy", order)):
            missing = [name for name in names if name not in columns]
            if missing:
                raise ConfigError(
                    f"{option}={', '.join(missing)}: the frame has no such column; it has"
                    f" {', '.join(columns)}"
                )
        query, batch = options.text("query") or None, options.whole("batch", least=0)
        if batch is not None and query is None:
            raise ConfigError(f"batch={batch}: give the option query too")
        return cls(options.address(*DATABASE), table, keys, order, query, batch)


# --- targets --------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryBatch:
    """A batch of a query; batches are numbered upwards."""

    query: str
    number: int

    def mark(self, table: str) -> str:
        """Return the mark in the names of the query's staged rows for a table."""
        return mark(f"{self.query}\0{table}")


def mark(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


class Target(Protocol):
    """A table with a key in one of the databases."""

    def check(self, schema: StructType) -> None:
        """Raise an error that says what to change if the frame does not fit the table."""

    def stage(self, batches: Iterator[pa.RecordBatch], marked: str) -> str:
        """Stage rows; return the name of the place."""

    def apply(
        self, stages: Sequence[str], columns: Sequence[str], batch: QueryBatch | None
    ) -> bool:
        """Write staged rows, once; return whether they were new."""

    def drop(self, stages: Sequence[str]) -> None:
        """Delete staged rows."""

    def sweep(self, marked: str, *, older_than: float | None = None) -> None:
        """Delete staged rows with this mark, or only those older than some seconds."""


def target_of(options: UpsertOptions) -> Target:
    database = Database.of(options.address)
    if database.is_postgresql:
        from conquiet.spark.upsert.postgres import PostgresTarget

        return PostgresTarget(database, options)
    from conquiet.spark.upsert.sqlite import SqliteTarget

    return SqliteTarget(database, options)


def check_rows(
    batches: Iterator[pa.RecordBatch], options: UpsertOptions
) -> Iterator[pa.RecordBatch]:
    """Yield the batches; raise for a row with NULL in the key or in orderBy."""
    for batch in batches:
        for names, what in ((options.keys, "key"), (options.order_by, "orderBy")):
            for name in names:
                if batch.column(name).null_count:
                    raise UnfitRows(
                        f"{options.table}: {batch.column(name).null_count} rows have NULL in"
                        f" {name!r}, a column of {what}; filter them out or give them a value"
                    )
        yield batch


# --- the fence ------------------------------------------------------------------------------


def create_fences(fences: str, *, postgresql: bool) -> str:
    """Return the statement that creates the table of fences."""
    time = "timestamptz" if postgresql else "TEXT"
    return (
        f"CREATE TABLE IF NOT EXISTS {fences} (query text, target text, batch bigint NOT NULL,"
        f" applied_at {time} NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (query, target))"
    )


def advance_fence(
    execute: Callable[[str, Sequence[Any]], Any],
    fences: str,
    table: str,
    batch: QueryBatch,
    *,
    parameter: str,
) -> bool:
    """Advance the fence of a query; a second writer of the batch waits here, and returns False.

    `parameter` is how the driver of the database writes one.
    """
    values = ", ".join([parameter] * 3)
    found = execute(
        f"INSERT INTO {fences} AS f (query, target, batch) VALUES ({values})"
        " ON CONFLICT (query, target) DO UPDATE SET batch = excluded.batch,"
        " applied_at = CURRENT_TIMESTAMP WHERE f.batch < excluded.batch RETURNING 1",
        [batch.query, table, batch.number],
    )
    return bool(found.fetchall())


# --- SQL ------------------------------------------------------------------------------------


def quote_name(name: str) -> str:
    """Return any text as a name of SQL."""
    return '"' + name.replace('"', '""') + '"'


def list_names(names: Sequence[str], prefix: str = "") -> str:
    return ", ".join(prefix + quote_name(name) for name in names)


def insert_into(options: UpsertOptions, columns: Sequence[str]) -> str:
    return f"INSERT INTO {options.table} AS t ({list_names(columns)})"


def on_conflict(options: UpsertOptions, columns: Sequence[str]) -> str:
    """Return the clause of `insert_into` that replaces a row with the same key, unless that row is
    higher."""
    others = [name for name in columns if name not in options.keys]
    if not others:
        return f"ON CONFLICT ({list_names(options.keys)}) DO NOTHING"
    changes = ", ".join(f"{quote_name(name)} = excluded.{quote_name(name)}" for name in others)
    clause = f"ON CONFLICT ({list_names(options.keys)}) DO UPDATE SET {changes}"
    if not options.order_by:
        return clause
    there, new = list_names(options.order_by, "t."), list_names(options.order_by, "excluded.")
    # A row in the table with NULL there was not written by an upsert, and is replaced.
    return f"{clause} WHERE (({there}) <= ({new})) IS NOT FALSE"


def describe_duplicate(options: UpsertOptions, found: Sequence[object]) -> str:
    """Return the error for a key that a batch has more than once: its values, then the count."""
    key = ", ".join(f"{name}={value!r}" for name, value in zip(options.keys, found, strict=False))
    return (
        f"{options.table}: the key {key:.200} is in the batch {found[-1]} times; say which row wins"
        " by the option orderBy, or drop duplicates before"
    )


_SIMPLE = (
    (pa.types.is_boolean, "boolean", "INTEGER"),
    (lambda kind: pa.types.is_int8(kind) or pa.types.is_int16(kind), "smallint", "INTEGER"),
    (pa.types.is_int32, "integer", "INTEGER"),
    (pa.types.is_int64, "bigint", "INTEGER"),
    (pa.types.is_float32, "real", "REAL"),
    (pa.types.is_float64, "double precision", "REAL"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "text", "TEXT"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "bytea", "BLOB"),
    (pa.types.is_date32, "date", "TEXT"),
    (pa.types.is_decimal, "numeric", "TEXT"),
    (pa.types.is_timestamp, "timestamptz", "TEXT"),
)


def staging_columns(schema: StructType | pa.Schema, *, postgresql: bool) -> dict[str, str]:
    """Return name and SQL type of each staged column; those of the table may differ."""
    return {field.name: _type(field, postgresql) for field in _arrow(schema)}


def _arrow(schema: StructType | pa.Schema) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        return schema
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def _type(field: pa.Field, postgresql: bool) -> str:
    kind = field.type
    if pa.types.is_timestamp(kind) and kind.tz is None and postgresql:
        return "timestamp"
    for fits, on_postgresql, on_sqlite in _SIMPLE:
        if fits(kind):
            return on_postgresql if postgresql else on_sqlite
    raise ConfigError(
        f"column {field.name!r} has the type {kind}, which an upsert cannot write; make it text"
        f" before: withColumn({field.name!r}, to_json({field.name!r}))"
    )


def match_columns(
    options: UpsertOptions,
    place: str,
    schema: StructType,
    there: Sequence[str],
    *,
    postgresql: bool,
) -> dict[str, str]:
    """Return the staged columns of a frame; raise if the table or one of its columns is missing."""
    staged = staging_columns(schema, postgresql=postgresql)
    if not there:
        raise ConfigError(
            f"{place} has no table {options.table}; make it:"
            f" {create_table(options, schema, postgresql=postgresql)}"
        )
    missing = [name for name in staged if name not in there]
    if missing:
        raise ConfigError(
            f"{options.table} has no column {', '.join(missing)}; it has {', '.join(there)}. Drop"
            f" it from the frame, or ALTER TABLE {options.table} ADD COLUMN"
            f" {quote_name(missing[0])} {staged[missing[0]]}"
        )
    return staged


def create_table(options: UpsertOptions, schema: StructType, *, postgresql: bool) -> str:
    """Return the statement that creates a table for a frame."""
    columns = staging_columns(schema, postgresql=postgresql)
    lines = [f"{_name(name)} {kind}" for name, kind in columns.items()]
    keys = ", ".join(map(_name, options.keys))
    return f"CREATE TABLE {options.table} ({', '.join(lines)}, PRIMARY KEY ({keys}))"


def _name(name: str) -> str:
    plain = name.isidentifier() and name.islower() and name.isascii()
    return name if plain else quote_name(name)
