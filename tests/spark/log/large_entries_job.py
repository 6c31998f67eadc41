"""Read large entries with a driver of 1 GB, in a batch and as a stream; print what was found."""

from __future__ import annotations

import sys

from conquiet.spark import session


def main(url: str, directory: str) -> None:
    settings = {"spark.driver.memory": "1g", "spark.ui.enabled": "false"}
    spark = session("large", master="local[2]", config=settings)
    options = {"url": url, "streams": "orders"}
    frame = spark.read.format("conquiet").options(**options).load()
    found = frame.selectExpr("count(*)", "sum(length(data))", "count(_malformed)").first()
    streamed = spark.readStream.format("conquiet").options(**options, startingOffsets="earliest")
    query = (
        streamed.load()
        .writeStream.format("parquet")
        # Else Spark's writer keeps 100 rows, whatever their size, before it looks at its memory.
        .option("parquet.block.size.row.check.min", "1")
        .option("parquet.page.size.row.check.min", "1")
        .option("path", f"{directory}/out")
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print(*found, spark.read.parquet(f"{directory}/out").count())


if __name__ == "__main__":
    main(*sys.argv[1:])
