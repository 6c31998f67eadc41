"""A driver to be killed: carries an outbox into a keyed table.

python killed_driver.py DATABASE_URL FOLDER
"""

from __future__ import annotations

import sys

from conquiet.spark import session, upsert_batches_into

ROWS_PER_BATCH = 200


def main(url: str, folder: str) -> None:
    spark = session("killed", master="local[2]", config={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    write = upsert_batches_into("events", ["event_id"], url=url)
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
