"""upsert_into and upserting: upserts as plain functions, for frames and for foreachBatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    from conquiet.spark.register import register

    register(frame.sparkSession)
    options: dict[str, Any] = {"table": table, "keys": ",".join(keys), **address}
    if order_by:
        options["orderBy"] = ",".join(order_by)
    if query is not None:
        options["query"] = query
    if batch is not None:
        options["batch"] = str(batch)
    frame.write.format("conquiet-upsert").mode("append").options(**options).save()


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
