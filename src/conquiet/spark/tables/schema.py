"""Schema: the columns of a table, which may grow, and those of a frame that goes into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DateType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from conquiet.errors import ConfigError

_PARTITION_TYPES = (
    StringType, DateType, BooleanType, ByteType, ShortType, IntegerType, LongType
)  # fmt: skip


def nullable(schema: StructType) -> StructType:
    """The same columns, each of which may be missing: later frames may lack it."""
    return StructType([StructField(one.name, one.dataType, True) for one in schema])


def check_partitions(schema: StructType, partition_by: Sequence[str]) -> None:
    for name in partition_by:
        if name not in schema.names:
            raise ConfigError(
                f"partition_by={name!r}: the frame has no such column; it has"
                f" {', '.join(schema.names)}"
            )
        if not isinstance(schema[name].dataType, _PARTITION_TYPES):
            raise ConfigError(
                f"partition_by={name!r}: {schema[name].dataType.simpleString()} makes no folders;"
                " choose a date, a text, a boolean or a whole number"
            )


def merged(table: StructType, frame: StructType, path: Path) -> StructType:
    """The table's columns and what the frame adds; a column of another type is refused."""
    fields = list(table.fields)
    for one in frame:
        if one.name not in table.names:
            fields.append(StructField(one.name, one.dataType, True))
            continue
        there, new = table[one.name].dataType, one.dataType
        if there.simpleString() != new.simpleString():
            raise ConfigError(
                f"{path}: column {one.name!r} is {there.simpleString()}, and"
                f" {new.simpleString()} in the frame; cast it, or write to another table"
            )
    return StructType(fields)
