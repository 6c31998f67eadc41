"""Schema: msgspec structs as Arrow schemas, and their instances as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from operator import attrgetter
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
    # As msgspec writes them, without the quotes of JSON: SQL can cast them.
    inspect.DecimalType: pa.string(),
    inspect.TimeType: pa.string(),
    inspect.TimeDeltaType: pa.string(),
}
_KEPT = (datetime, date, bytes)
"""Values that Arrow takes as Python objects; msgspec turns the others into JSON's types."""


_LISTS = (inspect.ListType, inspect.SetType, inspect.VarTupleType)
_STRUCTS = (inspect.StructType, inspect.DataclassType, inspect.TypedDictType)
_CHOICES = (inspect.LiteralType, inspect.EnumType)


def without_none(info: inspect.Type) -> inspect.Type:
    """Return the type of a value that is there: without bounds, and without None beside it."""
    if isinstance(info, inspect.Metadata):
        return without_none(info.type)
    if isinstance(info, inspect.UnionType):
        left = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        if len(left) == 1:
            return without_none(left[0])
    return info


def arrow_type(info: inspect.Type) -> pa.DataType:
    """Map a type of msgspec to a type of Arrow; a value of any type becomes JSON text."""
    info = without_none(info)
    if isinstance(info, _STRUCTS):
        return pa.struct([(one.encode_name, arrow_type(one.type)) for one in info.fields])
    if isinstance(info, _LISTS):
        return pa.list_(arrow_type(info.item_type))
    if isinstance(info, _CHOICES):
        values = (
            info.values
            if isinstance(info, inspect.LiteralType)
            else [one.value for one in info.cls]
        )
        return pa.string() if all(isinstance(one, str) for one in values) else pa.int64()
    return _PLAIN.get(type(info), pa.string())


def _is_json(info: inspect.Type) -> bool:
    """Return whether a type, without None, has no type of Arrow and is stored as JSON text."""
    return not isinstance(info, (*_STRUCTS, *_LISTS, *_CHOICES)) and type(info) not in _PLAIN


def fields_of(struct: type[msgspec.Struct]) -> list[inspect.Field]:
    """Return the fields of a struct with their resolved types."""
    info = inspect.type_info(struct)
    if not isinstance(info, inspect.StructType):
        raise ConfigError(f"{struct!r:.80} is not a msgspec.Struct")
    return list(info.fields)


@lru_cache(maxsize=1000)
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


def arrange(rows: pa.Table, schema: pa.Schema, made: Mapping[str, Any]) -> pa.Table:
    """Return rows in the columns of a schema: those that were made, and of the rows the others."""
    columns = [made[one] if one in made else rows[one] for one in schema.names]
    return pa.table(columns, schema=schema)


class Encoder:
    """Turns instances of one struct into columns of Arrow."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        self.schema = arrow_schema(struct)
        self._columns = [_Column(one) for one in fields_of(struct)]

    def table(self, rows: Sequence[msgspec.Struct]) -> pa.Table:
        """Build a table, one row per instance."""
        return pa.table([one.array(rows) for one in self._columns], schema=self.schema)


class _Column:
    """One field of a struct as a column."""

    def __init__(self, field: inspect.Field) -> None:
        self._name = field.name
        self._read = attrgetter(field.name)
        self._type = arrow_type(field.type)
        self._complete = _completion(field.type)
        # Plain values are taken as they are; msgspec turns the others into plain ones, all at once.
        kind = without_none(field.type)
        self._is_plain = isinstance(kind, _PLAIN_KINDS) and self._complete is None

    def array(self, rows: Sequence[msgspec.Struct]) -> pa.Array:
        values = list(map(self._read, rows))
        if not self._is_plain:
            values = msgspec.to_builtins(values, builtin_types=_KEPT)
            if self._complete is not None:
                values = [None if one is None else self._complete(one) for one in values]
        try:
            return pa.array(values, self._type)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise type(error)(f"{self._name}: {error}") from error


_PLAIN_KINDS = (
    inspect.IntType,
    inspect.FloatType,
    inspect.BoolType,
    inspect.StrType,
    inspect.BytesType,
    inspect.DateType,
    inspect.DateTimeType,
)


def _completion(info: inspect.Type) -> Callable[[Any], Any] | None:
    """Return a function that writes values of any type as JSON text and sets the defaults that a
    struct leaves out; None if a type has neither."""
    info = without_none(info)
    if _is_json(info):
        return lambda value: None if value is None else msgspec.json.encode(value).decode()
    if isinstance(info, _LISTS):
        one = _completion(info.item_type)
        return None if one is None else lambda values: values and [one(it) for it in values]
    return _struct_completion(info) if isinstance(info, inspect.StructType) else None


def _struct_completion(info: inspect.StructType) -> Callable[[Any], Any] | None:
    omits = info.cls.__struct_config__.omit_defaults
    defaults = {one.encode_name: _default(one) for one in info.fields if omits}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    inner = [(one.encode_name, _completion(one.type)) for one in info.fields]
    wanted = [(name, one) for name, one in inner if one is not None]
    if not defaults and not wanted:
        return None

    def complete(value: Any) -> Any:
        if value is not None:
            for name, default in defaults.items():
                value.setdefault(name, default)
            for name, one in wanted:
                if value.get(name) is not None:
                    value[name] = one(value[name])
        return value

    return complete


def _default(field: inspect.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default_factory(), builtin_types=_KEPT)
    if field.default is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default, builtin_types=_KEPT)
    return None
