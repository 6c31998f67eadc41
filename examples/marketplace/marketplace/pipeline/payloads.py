"""Payloads: one schema for the JSON of all events, and what each (type, version) demands of it.

An event is parsed once, whatever its type: the schema has the fields of all of them. Texts are
checked after that, since Spark would read a number as a text, and half a date as a date.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import msgspec
from msgspec import inspect
from pyspark.sql import Column
from pyspark.sql import functions as f

from conquiet.events.catalog import Catalog, Declaration
from marketplace.pipeline.days import plausible
from marketplace.pipeline.telemetry import KINDS, VERSION

_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\\z"
_RFC_3339 = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)\z"
_DATE = r"^(?!0000)\d{4}-\d\d-\d\d\z"  # Python has no year 0
_ACTOR = "STRUCT<type: STRING, id: STRING, storeId: STRING>"
_NUMBERS = {inspect.IntType: "BIGINT", inspect.FloatType: "DOUBLE", inspect.BoolType: "BOOLEAN"}
_ANYTHING = (inspect.AnyType, inspect.RawType)

Shape = str | dict[str, Any] | list[Any]
"""A type of Spark: a name, the fields of a struct, or the element of an array in a list."""


def declarations(catalog: Catalog) -> list[Declaration]:
    """Every type and version that can be read: those of the catalog, and telemetry."""
    touches = [Declaration(kind, VERSION, "", data) for kind, data in KINDS.items()]
    return [*catalog.declarations, *touches]


def moment(text: Column) -> Column:
    """The time of an RFC 3339 text, or null; null too if nothing can have happened then."""
    upper = f.upper(text)
    return f.when(upper.rlike(_RFC_3339), plausible(upper.try_cast("timestamp")))


def envelope_schema(catalog: Catalog) -> str:
    """The DDL of an envelope that holds any event."""
    shapes = [_shape(inspect.type_info(one.data)) for one in declarations(catalog)]
    data = _ddl(reduce(_joined, shapes))
    return f"version BIGINT, eventId STRING, occurredAt STRING, actor {_ACTOR}, data {data}"


def data_schema(structs: Iterable[type[msgspec.Struct]], **instead: str) -> str:
    """The DDL of an envelope with the data of some structs; `instead` has types for some fields."""
    shape = reduce(_joined, [_shape(inspect.type_info(one)) for one in structs])
    assert isinstance(shape, dict)
    return f"data {_ddl({**shape, **instead})}"


def _shape(info: inspect.Type) -> Shape:
    if isinstance(info, inspect.Metadata):
        return _shape(info.type)
    if isinstance(info, inspect.StructType):
        return {field.encode_name: _shape(field.type) for field in info.fields}
    if isinstance(info, inspect.ListType):
        return [_shape(info.item_type)]
    if isinstance(info, inspect.UnionType):
        left = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        return reduce(_joined, map(_shape, left))
    return _NUMBERS.get(type(info), "STRING")


def _joined(left: Shape, right: Shape) -> Shape:
    """What holds both; where two versions disagree it is a text, which is checked like any."""
    if isinstance(left, dict) and isinstance(right, dict):
        both = {name: _joined(left[name], right[name]) for name in left.keys() & right.keys()}
        return {**left, **right, **both}
    if isinstance(left, list) and isinstance(right, list):
        return [_joined(left[0], right[0])]
    return left if left == right else "STRING"


def _ddl(shape: Shape) -> str:
    if isinstance(shape, dict):
        return f"STRUCT<{', '.join(f'`{name}`: {_ddl(one)}' for name, one in shape.items())}>"
    return f"ARRAY<{_ddl(shape[0])}>" if isinstance(shape, list) else shape


# --- what a payload must be ---------------------------------------------------------------------


def is_valid(data: Column, struct: type[msgspec.Struct]) -> Column:
    """Whether parsed data has what the struct requires; never null."""
    return f.coalesce(_fits(data, inspect.type_info(struct)), f.lit(False))


def _fits(value: Column, info: inspect.Type) -> Column:
    if isinstance(info, inspect.Metadata):
        return _fits(value, info.type)
    if isinstance(info, inspect.StructType):
        fields = [_field(value[field.encode_name], field) for field in info.fields]
        return reduce(Column.__and__, fields, value.isNotNull())
    if isinstance(info, inspect.ListType):
        return value.isNotNull() & f.forall(value, lambda one: _element(one, info.item_type))
    if isinstance(info, inspect.UnionType):
        return _one_of(value, info)
    return f.lit(True) if isinstance(info, _ANYTHING) else _leaf(value, info)


def _field(value: Column, field: inspect.Field) -> Column:
    fits = _fits(value, field.type)
    return fits if field.required else value.isNull() | fits


def _element(value: Column, info: inspect.Type) -> Column:
    return f.coalesce(_fits(value, info), f.lit(False))


def _one_of(value: Column, info: inspect.UnionType) -> Column:
    left = [one for one in info.types if not isinstance(one, inspect.NoneType)]
    fits = reduce(Column.__or__, [_fits(value, one) for one in left])
    return value.isNull() | fits if len(left) < len(info.types) else fits


def _leaf(value: Column, info: inspect.Type) -> Column:
    if isinstance(info, inspect.IntType):
        return _in_bounds(value.try_cast("bigint"), info)
    if isinstance(info, inspect.UUIDType):
        return value.rlike(_UUID)
    if isinstance(info, inspect.DateTimeType):
        return moment(value).isNotNull()
    if isinstance(info, inspect.DateType):
        return value.rlike(_DATE) & value.try_cast("date").isNotNull()
    if isinstance(info, inspect.LiteralType):
        return value.isin(*info.values)
    if isinstance(info, inspect.EnumType):
        return value.isin(*(member.value for member in info.cls))
    if isinstance(info, inspect.StrType) and info.pattern is not None:
        return value.rlike(_to_the_end(info.pattern))
    return value.isNotNull()


def _to_the_end(pattern: str) -> str:
    """In Java `$` lets a line feed follow."""
    return f"{pattern[:-1]}\\z" if pattern.endswith("$") else pattern


def _in_bounds(value: Column, info: inspect.IntType) -> Column:
    fits = value.isNotNull()
    if info.ge is not None:
        fits &= value >= info.ge
    if info.gt is not None:
        fits &= value > info.gt
    if info.le is not None:
        fits &= value <= info.le
    if info.lt is not None:
        fits &= value < info.lt
    return fits
