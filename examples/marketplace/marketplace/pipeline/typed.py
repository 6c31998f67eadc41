"""Typed: the events of one type and version, with their data in columns of the types it has."""

from __future__ import annotations

from msgspec import inspect
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from conquiet.events.catalog import Catalog, Declaration
from marketplace.catalog import CATALOG
from marketplace.pipeline.payloads import data_schema, moment


def typed_names(catalog: Catalog = CATALOG) -> dict[str, Declaration]:
    """What each type and version is called where tables have names.

    >>> list(typed_names())[0]
    'order_created_v1'
    """
    return {f"{one.event_type}_v{one.version}": one for one in catalog.declarations}


def typed(events: DataFrame, one: Declaration) -> DataFrame:
    """Rows of `events` of one type and version: the payload's data as a struct, `data`."""
    is_it = (f.col("event_type") == str(one.event_type)) & (f.col("version") == one.version)
    said = f.from_json("payload", data_schema([one.data]))["data"].alias("said")
    about = [name for name in events.columns if name != "payload"]
    info = inspect.type_info(one.data)
    assert isinstance(info, inspect.StructType)
    values = [
        _value(f.col("said")[field.encode_name], field.type).alias(field.encode_name)
        for field in info.fields
    ]
    return events.where(is_it).select(*about, said).select(*about, f.struct(*values).alias("data"))


def _value(said: Column, info: inspect.Type) -> Column:
    if isinstance(info, inspect.Metadata):
        return _value(said, info.type)
    if isinstance(info, inspect.UnionType):
        left = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        return _value(said, left[0]) if len(left) == 1 else said
    if isinstance(info, inspect.DateTimeType):
        return moment(said)
    return said.try_cast("date") if isinstance(info, inspect.DateType) else said
