"""Columns: which types the staged columns have in each database."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.upsert.options import UpsertOptions

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
    """Name and SQL type of each column as it is staged; the table's own may differ."""
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


def create_table(options: UpsertOptions, schema: StructType, *, postgresql: bool) -> str:
    """The statement that makes a table for a frame."""
    columns = staging_columns(schema, postgresql=postgresql)
    lines = [f"{_name(name)} {kind}" for name, kind in columns.items()]
    keys = ", ".join(map(_name, options.keys))
    return f"CREATE TABLE {options.table} ({', '.join(lines)}, PRIMARY KEY ({keys}))"


def _name(name: str) -> str:
    plain = name.isidentifier() and name.islower() and name.isascii()
    return name if plain else '"' + name.replace('"', '""') + '"'
