"""Payload: the data of events as text, or as the struct that a schema describes."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
from pyspark.sql import types

from conquiet.errors import ConfigError
from conquiet.spark.columns import MALFORMED

RAW = "_raw"
"""The data of an entry that does not fit a schema, as it is; null for the others."""

JSON_COMMENT = "json"
"""A string column with this comment takes any JSON value, as the text that it is."""

Columns = dict[str, pa.Array]


class _Json(str):
    """JSON that is not looked into."""


def _as_json(kind: type, value: Any) -> _Json:
    return _Json(msgspec.json.encode(value).decode())


def as_text(columns: Columns) -> Columns:
    """Data as a string; what is no UTF-8 is malformed, and is given as base64."""
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
    """Reads JSON data into the columns of a struct, an entry at a time; a misfit harms no other.

    Fields that the schema does not name are passed over, and those that are missing are null.
    """

    def __init__(self, schema: types.StructType, target: pa.DataType) -> None:
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
        for row, value in enumerate(made):  # find those that Arrow cannot hold
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
    """A type for msgspec with the fields of a schema, each of which may be missing or null."""
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
