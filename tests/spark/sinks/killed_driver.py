"""A driver to be killed: carries an outbox into a keyed table, a Delta table and plain Parquet.

python killed_driver.py DATABASE_URL FOLDER
"""

from __future__ import annotations

import sys

from conquiet.spark import appending, session, upsert_batches_into

ROWS_PER_BATCH = 200


def main(url: str, folder: str) -> None:
    spark = session("killed", master="local[2]", config={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    sinks = [
        appending(f"{folder}/delta", format="delta"),
        upsert_batches_into("events", ["event_id"], url=url),
        appending(f"{folder}/parquet", format="parquet", partition_by=["type"]),
    ]

    def write(frame, batch):
        for sink in sinks:
            sink(frame, batch)

    query = (
        spark.readStream.format("conquiet-outbox")
        .options(url=url, maxOffsetsPerTrigger=ROWS_PER_BATCH)
        .load()
        .selectExpr("event_id", "type", "string(data) AS data")
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
