"""upsert_into and upserting: upserts as plain functions, for frames and for foreachBatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMAT = "conquiet-upsert"
_QUERY = "sql.streaming.queryId"


def upsert_into(
    frame: DataFrame,
    table: str,
    keys: Sequence[str],
    *,
    order_by: Sequence[str] = (),
    query: str | None = None,
    batch: int | None = None,
    **address: str,
) -> None:
    """Write a frame into a table by key, in one transaction; `address` is `url=…` or the like.

    With `query` and `batch` it is written once: the same or a lower batch later does nothing.
    """
    _ensure_registered(frame.sparkSession)
    options: dict[str, Any] = {"table": table, "keys": ",".join(keys), **address}
    if order_by:
        options["orderBy"] = ",".join(order_by)
    if query is not None:
        options["query"] = query
    if batch is not None:
        options["batch"] = str(batch)
    frame.write.format(_FORMAT).mode("append").options(**options).save()


def _ensure_registered(spark: SparkSession) -> None:
    """Register the formats of conquiet, unless the session has them: Spark warns of each again."""
    try:
        known = spark._jsparkSession.sessionState().dataSourceManager()
        if known.dataSourceExists(_FORMAT):
            return
    except AttributeError:  # Spark Connect, or another Spark: it can be registered again
        pass
    from conquiet.spark.formats import register

    register(spark)


def upserting(
    table: str, keys: Sequence[str], *, order_by: Sequence[str] = (), **address: str
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that writes each micro-batch once."""

    def write(frame: DataFrame, batch: int) -> None:
        query = frame.sparkSession.sparkContext.getLocalProperty(_QUERY)
        if query is None:
            raise ConfigError("upserting() is for foreachBatch; for a frame, use upsert_into()")
        upsert_into(frame, table, keys, order_by=order_by, query=query, batch=batch, **address)

    return write
