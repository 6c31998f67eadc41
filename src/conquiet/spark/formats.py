"""Register the formats of conquiet in a Spark session."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from conquiet.spark.columns import CORES_VARIABLE
from conquiet.spark.settings import is_local

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_REGISTRATION_SECONDS, _STABLE_SECONDS = 10.0, 1.0
"""How long to wait for executors, and how long their number must not change."""

_SOURCES = {
    "conquiet": ("conquiet.spark.log.source", "LogSource"),
    "conquiet-outbox": ("conquiet.spark.outbox.source", "OutboxSource"),
    "conquiet-upsert": ("conquiet.spark.upsert.sink", "UpsertSink"),
}
"""Name of a format → the module and the class of its data source."""


def register(spark: SparkSession) -> tuple[str, ...]:
    """Register every format whose packages are installed; return their names. Can be repeated."""
    _pass_cores(spark)
    known = []
    for name, (module, source) in _SOURCES.items():
        if _exists(module):
            spark.dataSource.register(_class(module, source))
            known.append(name)
    return tuple(known)


def _pass_cores(spark: SparkSession) -> None:
    """Pass the cores of the executors to planner processes, which see only those of the driver.

    Spark hands the context's environment to every Python process of a format that is registered
    from now on. Through Spark Connect there is no context; the planner then counts its own cores.
    """
    try:
        context = spark.sparkContext
    except Exception:  # noqa: BLE001 - Spark Connect, whatever it raises for this
        return
    context.environment[CORES_VARIABLE] = str(executor_cores(context))


def executor_cores(context: SparkContext) -> int:
    """Return how many tasks the executors run at once, as far as that is known now."""
    conf = dict(context.getConf().getAll())
    if is_local(context.master or ""):
        return context.defaultParallelism
    per_executor = int(conf.get("spark.executor.cores", 0))
    executors = conf.get("spark.executor.instances") or conf.get(
        "spark.dynamicAllocation.maxExecutors", ""
    )
    if conf.get("spark.cores.max"):
        return int(conf["spark.cores.max"])
    if per_executor and executors.isdecimal():
        return per_executor * int(executors)
    return _count_registered_cores(context)


def _count_registered_cores(context: SparkContext) -> int:
    """Wait until executors have registered and their number is stable; return their cores."""
    end = time.monotonic() + _REGISTRATION_SECONDS
    stable_since, executors = time.monotonic(), 0
    while time.monotonic() < end:
        # The driver is among them.
        found = context._jsc.sc().getExecutorMemoryStatus().size() - 1
        if found != executors:
            stable_since, executors = time.monotonic(), found
        elif executors and time.monotonic() - stable_since >= _STABLE_SECONDS:
            break
        time.sleep(0.05)
    return context.defaultParallelism


def _class(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False
