"""Payloads: the data of events as bytes, as text, or as the struct that a schema describes."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

from conquiet.errors import ConfigError
from conquiet.spark.columns import ARROW_SCHEMA, MALFORMED

RAW = "_raw"
"""The bytes of data that does not fit the schema; null for other rows."""

JSON_COMMENT = "json"
"""A string column with this comment takes any JSON value, as its text."""

Columns = dict[str, pa.Array]


def schema_of(options: Mapping[str, str]) -> str:
    """Return the type of the column `data`, as DDL."""
    given = {str(name).lower(): value for name, value in options.items()}
    kind = given.get("datatype", "binary").lower()
    fields = given.get("schema", "").strip()
    if fields:
        return f"STRUCT<{fields}>"
    if kind not in ("binary", "string"):
        raise ConfigError(f"dataType={kind!r}: choose 'binary' or 'string'")
    return kind.upper()


def columns_ddl(data: str) -> str:
    """Return the columns of a source of events whose `data` has this type, as DDL."""
    columns = [
        *(f"{field.name} {_ddl(field)}" for field in ARROW_SCHEMA if field.name != "data"),
        *([f"{RAW} BINARY"] if data.startswith("STRUCT") else []),
    ]
    columns.insert(ARROW_SCHEMA.get_field_index("data"), f"data {data}")
    return ", ".join(columns)


def _ddl(field: pa.Field) -> str:
    kind = from_arrow_type(field.type).simpleString()
    return kind if field.nullable else f"{kind} NOT NULL"


def check_columns(schema: types.StructType, whose: str) -> None:
    """Refuse columns that a source of events does not have."""
    known = [*ARROW_SCHEMA.names, *([RAW] if has_struct(schema) else [])]
    unknown = [name for name in schema.names if name not in known]
    if unknown:
        raise ConfigError(f"{whose} has no column {', '.join(unknown)}; it has {', '.join(known)}")


def has_struct(schema: types.StructType) -> bool:
    return "data" in schema.names and isinstance(schema["data"].dataType, types.StructType)


def has_text(schema: types.StructType) -> bool:
    return "data" in schema.names and isinstance(schema["data"].dataType, types.StringType)


def finisher(schema: types.StructType) -> Callable[[Columns], pa.RecordBatch]:
    """Return a function that assembles columns as Spark asked for them, and converts data."""
    target = to_arrow_schema(schema, timezone="UTC")
    read: Callable[[Columns], Columns] = dict
    if has_struct(schema):
        place = target.get_field_index("data")
        read = Payload(schema["data"].dataType, target.field(place).type).parse
    elif has_text(schema):
        read = as_text

    def finish(columns: Columns) -> pa.RecordBatch:
        found = read(columns)
        return pa.RecordBatch.from_arrays([found[name] for name in target.names], schema=target)

    return finish


class _Json(str):
    """JSON that is not parsed further."""


def _as_json(kind: type, value: Any) -> _Json:
    return _Json(msgspec.json.encode(value).decode())


def as_text(columns: Columns) -> Columns:
    """Convert data to text; data that is not UTF-8 is malformed, and given in base64."""
    try:
        return columns | {"data": columns["data"].cast(pa.string())}
    except pa.ArrowInvalid:
        pass
    texts, flaws = [], columns[MALFORMED].to_pylist()
    for row, data in enumerate(columns["data"].to_pylist()):
        try:
            texts.append(None if data is None else data.decode())
        except UnicodeDecodeError as error:
            texts.append(msgspec.json.encode({"data_base64": data}).decode())
            flaws[row] = f"its data is not UTF-8: {error}"
    made = {"data": pa.array(texts, pa.string()), MALFORMED: pa.array(flaws, pa.string())}
    return columns | made


class Payload:
    """Parses JSON data into the columns of a struct; data that does not fit affects no other row.

    Fields that the schema does not name are ignored, and missing ones are null.
    """

    def __init__(self, schema: types.DataType, target: pa.DataType) -> None:
        assert isinstance(schema, types.StructType)
        self._decode = msgspec.json.Decoder(_struct(schema), dec_hook=_as_json).decode
        self._target = target

    def parse(self, columns: Columns) -> Columns:
        flaws = columns[MALFORMED].to_pylist()
        raws: list[Any] = [None] * len(flaws)
        made: list[Any] = []
        for row, data in enumerate(columns["data"].to_pylist()):
            value = None
            if flaws[row] is not None:
                raws[row] = data
            elif data is not None:
                try:
                    value = self._decode(data)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    flaws[row] = f"its data does not fit the schema: {error}"
                    raws[row] = data
            made.append(value)
        return columns | {
            "data": self._array(made, flaws, raws, columns["data"]),
            MALFORMED: pa.array(flaws, pa.string()),
            RAW: pa.array(raws, pa.binary()),
        }

    def _array(
        self, made: list[Any], flaws: list[Any], raws: list[Any], data: pa.Array
    ) -> pa.Array:
        try:
            return pa.array(made, self._target)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError):
            pass
        for row, value in enumerate(made):  # find the values that Arrow cannot hold
            try:
                pa.array([value], self._target)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError) as error:
                made[row] = None
                flaws[row] = f"its data does not fit the schema: {error}"
                raws[row] = data[row].as_py()
        return pa.array(made, self._target)


def _whole(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]


_PLAIN: dict[type, Any] = {
    types.StringType: str,
    types.BooleanType: bool,
    types.ByteType: _whole(8),
    types.ShortType: _whole(16),
    types.IntegerType: _whole(32),
    types.LongType: _whole(64),
    types.FloatType: float,
    types.DoubleType: float,
    types.BinaryType: bytes,
    types.DateType: datetime.date,
    types.TimestampType: Annotated[datetime.datetime, msgspec.Meta(tz=True)],
    types.TimestampNTZType: Annotated[datetime.datetime, msgspec.Meta(tz=False)],
    types.DecimalType: Decimal,
}


def _struct(schema: types.StructType) -> Any:
    """Return a type for msgspec with the fields of a schema, each optional and nullable."""
    fields = {field.name: _field(field) | None for field in schema}
    return TypedDict("Data", fields, total=False)  # type: ignore[operator]


def _field(field: types.StructField) -> Any:
    if (field.metadata or {}).get("comment") == JSON_COMMENT:
        return _Json
    return _type(field.dataType, field.name)


def _type(kind: types.DataType, name: str) -> Any:
    if isinstance(kind, types.StructType):
        return _struct(kind)
    if isinstance(kind, types.ArrayType):
        return list[_type(kind.elementType, name) | None]  # type: ignore[misc]
    if isinstance(kind, types.MapType) and isinstance(kind.keyType, types.StringType):
        return dict[str, _type(kind.valueType, name) | None]  # type: ignore[misc]
    plain = _PLAIN.get(type(kind))
    if plain is None:
        raise ConfigError(f"schema: JSON cannot be read into {name} {kind.simpleString()}")
    return plain
