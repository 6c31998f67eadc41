"""Schema: msgspec structs as Arrow schemas, and their instances as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect

from conquiet.errors import ConfigError

TIME = pa.timestamp("us", tz="UTC")
_PLAIN: dict[type, pa.DataType] = {
    inspect.IntType: pa.int64(),
    inspect.FloatType: pa.float64(),
    inspect.BoolType: pa.bool_(),
    inspect.StrType: pa.string(),
    inspect.UUIDType: pa.string(),
    inspect.BytesType: pa.binary(),
    inspect.DateType: pa.date32(),
    inspect.DateTimeType: TIME,
}
_KEPT = (datetime, date, bytes)
"""Values that Arrow takes as Python objects; msgspec turns the others into JSON's types."""


def arrow_type(info: inspect.Type) -> pa.DataType:
    """Map a type of msgspec to a type of Arrow; a value of any type becomes JSON text."""
    if isinstance(info, inspect.Metadata):
        return arrow_type(info.type)
    if isinstance(info, (inspect.StructType, inspect.DataclassType, inspect.TypedDictType)):
        return pa.struct([(one.encode_name, arrow_type(one.type)) for one in info.fields])
    if isinstance(info, (inspect.ListType, inspect.SetType, inspect.VarTupleType)):
        return pa.list_(arrow_type(info.item_type))
    if isinstance(info, (inspect.LiteralType, inspect.EnumType)):
        values = (
            info.values
            if isinstance(info, inspect.LiteralType)
            else [one.value for one in info.cls]
        )
        return pa.string() if all(isinstance(one, str) for one in values) else pa.int64()
    if isinstance(info, inspect.UnionType):
        left = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        if len(left) == 1:
            return arrow_type(left[0])
    return _PLAIN.get(type(info), pa.string())


def _is_json(info: inspect.Type) -> bool:
    """Tell whether a field has no type of Arrow and is stored as JSON text."""
    if isinstance(info, inspect.Metadata):
        return _is_json(info.type)
    if isinstance(info, inspect.UnionType):
        left = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        return len(left) != 1 or _is_json(left[0])
    known = (
        inspect.StructType,
        inspect.DataclassType,
        inspect.TypedDictType,
        inspect.ListType,
        inspect.SetType,
        inspect.VarTupleType,
        inspect.LiteralType,
        inspect.EnumType,
    )
    return not isinstance(info, known) and type(info) not in _PLAIN


def fields_of(struct: type[msgspec.Struct]) -> list[inspect.Field]:
    """Return the fields of a struct with their resolved types."""
    info = inspect.type_info(struct)
    if not isinstance(info, inspect.StructType):
        raise ConfigError(f"{struct!r:.80} is not a msgspec.Struct")
    return list(info.fields)


def arrow_schema(struct: type[msgspec.Struct]) -> pa.Schema:
    """Return the Arrow schema of a struct; every column may be null.

    >>> class Reading(msgspec.Struct):
    ...     sensor: str
    ...     value: float | None
    >>> arrow_schema(Reading)
    sensor: string
    value: double
    """
    return pa.schema([(one.encode_name, arrow_type(one.type)) for one in fields_of(struct)])


class Encoder:
    """Turns instances of one struct into columns of Arrow."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.schema = arrow_schema(struct)
        self._names = self.schema.names
        self._json = [one.encode_name for one in fields_of(struct) if _is_json(one.type)]

    def table(self, rows: Sequence[msgspec.Struct]) -> pa.Table:
        """Build a table, one row per instance."""
        plain = self.builtins(rows)
        columns = [
            pa.array([row.get(name) for row in plain], type=self.schema.field(name).type)
            for name in self._names
        ]
        return pa.table(columns, schema=self.schema)

    def builtins(self, rows: Iterable[msgspec.Struct]) -> list[dict[str, Any]]:
        plain: list[dict[str, Any]] = [
            msgspec.to_builtins(row, builtin_types=_KEPT) for row in rows
        ]
        for name in self._json:
            for row in plain:
                if row.get(name) is not None:
                    row[name] = msgspec.json.encode(row[name]).decode()
        return plain


def column_of(field: str) -> Callable[[Any], Any]:
    """Return a function that reads a field of data as text, or None where it has no such field."""

    def read(data: Any) -> str | None:
        value = getattr(data, field, None)
        return None if value is None else str(value)

    return read
