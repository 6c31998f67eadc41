"""A driver of its own, to be killed: copies a log to files, in small batches, until it is told."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from conquiet.spark import register


def main(url: str, directory: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.local.dir", f"{directory}/local")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    register(spark)
    log = spark.readStream.format("conquiet").options(
        url=url,
        streams="orders:*",
        startingOffsets="earliest",
        maxOffsetsPerTrigger="500",
        readerName="killed",
    )
    query = (
        log.load()
        .select("stream", "event_id")
        .writeStream.format("parquet")
        .option("path", f"{directory}/out")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
