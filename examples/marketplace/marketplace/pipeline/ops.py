"""Operation: how long events were under way from the outbox to the log, and how often twice."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from marketplace.pipeline.days import hour, milliseconds
from marketplace.pipeline.percentiles import nearest_rank
from marketplace.pipeline.refusal import is_telemetry

PERCENTS = (50, 95, 99)


def outbox_delivery(silver: DataFrame, outbox: DataFrame | None) -> DataFrame:
    """Per hour of the domain's topic; attempts are known where an outbox was given."""
    at = f.coalesce(f.col("created_at"), f.col("first_seen_at"))
    lag = milliseconds(at, f.col("first_seen_at"))
    per_hour = (
        silver.where(~is_telemetry(f.col("stream")))
        .groupBy(hour(at).alias("hour"))
        .agg(
            f.count(f.lit(1)).alias("events"),
            f.sum("delivery_count").alias("entries"),
            f.sort_array(f.collect_list(lag)).alias("lags"),
        )
    )
    failures = f.lit(None).cast("bigint")
    if outbox is not None:
        attempts = f.col("attributes")["attempts"].try_cast("bigint")
        tried = outbox.groupBy(hour(f.col("time")).alias("hour")).agg(
            f.sum(attempts).alias("attempts")
        )
        per_hour = per_hour.join(tried, "hour", "left")
        failures = f.coalesce(f.col("attempts"), f.lit(0))
    return per_hour.select(
        *("hour", "events", "entries"),
        (f.col("entries") - f.col("events")).alias("duplicates"),
        failures.alias("failed_attempts"),
        *(nearest_rank(f.col("lags"), percent).alias(f"lag_p{percent}_ms") for percent in PERCENTS),
        f.element_at("lags", -1).alias("lag_max_ms"),
    )
