"""Register the formats of conquiet in a Spark session."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SOURCES = {
    "conquiet": ("conquiet.spark.log.source", "LogSource"),
    "conquiet-outbox": ("conquiet.spark.outbox.source", "OutboxSource"),
    "conquiet-upsert": ("conquiet.spark.upsert.sink", "UpsertSink"),
}
"""Name of a format → the module and the class of its data source."""


def register(spark: SparkSession) -> tuple[str, ...]:
    """Register every format whose packages are installed; return their names. Can be repeated."""
    known = []
    for name, (module, source) in _SOURCES.items():
        if _exists(module):
            spark.dataSource.register(_class(module, source))
            known.append(name)
    return tuple(known)


def _class(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False
