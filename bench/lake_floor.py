"""Floors of bench/lake.py: the same nine tables by hand, in plain PySpark and in DuckDB.

python -m bench.lake_floor duckdb|pyspark FOLDER FILE…

Nine tables: raw events, silver, quarantine, touches, two facts, and three daily marts. Both write
them once, from all files, as plain Parquet: no batches, no commits, no state, no late corrections,
no check of a payload beyond JSON and amounts, no reconciliation. What a lake adds costs the rest.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

_MONEY = ("cash_collected", "payment_settled")
_DUCKDB = {
    "raw_events": "FROM read_parquet({files})",
    "deliveries": """
        SELECT event_id, any_value(type) AS type, any_value(time) AS time, count(*) AS deliveries,
               min(entry_time) AS first_seen_at, arg_min(decode(data), entry_time) AS payload
        FROM read_parquet({files}) GROUP BY event_id
    """,
    "quarantine": "FROM deliveries WHERE NOT json_valid(payload)",
    "silver": "FROM deliveries WHERE json_valid(payload)",
    "touches": """
        SELECT payload ->> '$.data.token_id' AS token_id, min(time) AS occurred_at,
               arg_min(type, time) AS kind, arg_min(payload ->> '$.data.ad_id', time) AS ad_id
        FROM silver WHERE type IN ('ad_impression', 'ad_click') GROUP BY 1
    """,
    "fact_order": """
        SELECT payload ->> '$.data.order_id' AS order_id,
               min(time) FILTER (type = 'order_created') AS created_at,
               any_value(payload ->> '$.data.vendor_store_id') AS vendor_store_id,
               any_value(payload ->> '$.data.ship_to.postal_code')
                   FILTER (type = 'order_created') AS postal_code,
               max((payload ->> '$.data.total_cents')::BIGINT)
                   FILTER (type = 'order_created') AS created_cents,
               min(payload ->> '$.data.collected_at') AS collected_at,
               max((payload ->> '$.data.amount_cents')::BIGINT)
                   FILTER (type IN ('cash_collected', 'payment_settled')) AS revenue_cents,
               arg_max(payload ->> '$.data.to_status', time)
                   FILTER (type = 'order_state_changed') AS state
        FROM silver WHERE payload ->> '$.data.order_id' IS NOT NULL GROUP BY 1
    """,
    "fact_order_line": """
        SELECT line ->> '$.line_item_id' AS line_item_id, time AS created_at,
               line ->> '$.category' AS category, (line ->> '$.qty')::BIGINT AS qty,
               (line ->> '$.line_total_cents')::BIGINT AS cents
        FROM (SELECT time, unnest((payload -> '$.data.lines')::JSON[]) AS line
              FROM silver WHERE type = 'order_created')
    """,
    "store_daily": """
        SELECT timezone('America/Chicago', created_at)::DATE AS business_day, vendor_store_id,
               count(*) AS orders, sum(created_cents) AS created_cents,
               sum(revenue_cents) AS revenue_cents
        FROM fact_order GROUP BY ALL
    """,
    "zip_daily": """
        SELECT timezone('America/Chicago', created_at)::DATE AS business_day, postal_code,
               count(*) AS orders, sum(created_cents) AS created_cents
        FROM fact_order GROUP BY ALL
    """,
    "category_daily": """
        SELECT timezone('America/Chicago', created_at)::DATE AS business_day, category,
               count(*) AS lines, sum(qty) AS units, sum(cents) AS cents
        FROM fact_order_line GROUP BY ALL
    """,
}


def by_duckdb(folder: str, files: list[str]) -> None:
    import duckdb

    connection = duckdb.connect(f"{folder}/duck.db")  # spills there
    connection.execute("SET threads = 2; SET memory_limit = '3GB'; SET TimeZone = 'UTC'")
    for name, sql in _DUCKDB.items():
        text = sql.format(files=files)
        if name == "raw_events":
            connection.execute(f"COPY ({text}) TO '{folder}/raw_events.parquet'")
            continue
        connection.execute(f"CREATE TABLE {name} AS {text}")
        if name != "deliveries":
            connection.execute(f"COPY {name} TO '{folder}/{name}.parquet'")


def by_pyspark(folder: str, files: list[str]) -> None:
    """Write the nine tables by Catalyst expressions, as the guides of Spark have it."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    settings: dict[str, Any] = {"spark.driver.memory": "3g"}
    settings |= {"spark.sql.session.timeZone": "UTC"}
    settings |= {"spark.sql.shuffle.partitions": "4", "spark.ui.enabled": "false"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    def write(frame: Any, name: str) -> Any:
        frame.write.mode("overwrite").parquet(f"{folder}/{name}")
        return spark.read.parquet(f"{folder}/{name}")

    def said(path: str) -> Any:
        return f.get_json_object("payload", f"$.data.{path}")

    raw = write(spark.read.parquet(*files), "raw_events")
    deliveries = raw.groupBy("event_id").agg(
        f.first("type").alias("type"),
        f.first("time").alias("time"),
        f.count("*").alias("deliveries"),
        f.min("entry_time").alias("first_seen_at"),
        f.min_by(f.col("data").cast("string"), "entry_time").alias("payload"),
    )
    whole = deliveries.withColumn("ok", f.get_json_object("payload", "$.eventId").isNotNull())
    kept = write(whole, "deliveries")
    write(kept.where("NOT ok"), "quarantine")
    silver = write(kept.where("ok"), "silver")
    touches = silver.where(f.col("type").isin("ad_impression", "ad_click"))
    write(
        touches.groupBy(said("token_id").alias("token_id")).agg(
            f.min("time").alias("occurred_at"),
            f.min_by("type", "time").alias("kind"),
            f.min_by(said("ad_id"), f.col("time")).alias("ad_id"),
        ),
        "touches",
    )
    is_created = f.col("type") == "order_created"
    paid = f.when(f.col("type").isin(*_MONEY), said("amount_cents").cast("bigint"))
    orders = write(
        silver.where(said("order_id").isNotNull())
        .groupBy(said("order_id").alias("order_id"))
        .agg(
            f.min(f.when(is_created, f.col("time"))).alias("created_at"),
            f.first(said("vendor_store_id"), True).alias("vendor_store_id"),
            f.first(said("ship_to.postal_code"), True).alias("postal_code"),
            f.max(f.when(is_created, said("total_cents").cast("bigint"))).alias("created_cents"),
            f.min(said("collected_at")).alias("collected_at"),
            f.max(paid).alias("revenue_cents"),
            f.max_by(said("to_status"), "time").alias("state"),
        ),
        "fact_order",
    )
    fields = "line_item_id: STRING, category: STRING, qty: BIGINT, line_total_cents: BIGINT"
    lines = write(
        silver.where(is_created)
        .select(
            "time", f.explode(f.from_json(said("lines"), f"ARRAY<STRUCT<{fields}>>")).alias("line")
        )
        .select("line.*", f.col("time").alias("created_at")),
        "fact_order_line",
    )
    day = f.to_date(f.from_utc_timestamp("created_at", "America/Chicago")).alias("business_day")
    sums = (f.count("*").alias("orders"), f.sum("created_cents").alias("created_cents"))
    write(
        orders.groupBy(day, "vendor_store_id").agg(*sums, f.sum("revenue_cents").alias("revenue")),
        "store_daily",
    )
    write(orders.groupBy(day, "postal_code").agg(*sums), "zip_daily")
    write(
        lines.groupBy(day, "category").agg(f.sum("qty"), f.sum("line_total_cents")),
        "category_daily",
    )
    spark.stop()


def main() -> None:
    how, folder, *files = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    {"duckdb": by_duckdb, "pyspark": by_pyspark}[how](folder, files)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
