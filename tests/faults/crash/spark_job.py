"""A real Spark job that writes to Redis, once per fate: spark_job.py URL FOLDER FATE…

Its Python workers are those of spark_daemon.py, one process per task. Batch N goes to stream
`events-N`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from conquiet.spark import register

ROWS, TASKS, SLICE = 24, 2, 4


def main(url: str, folder: str, *fates: str) -> None:
    os.environ["FAULTS_FOLDER"] = folder
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{TASKS},4]")  # a task is tried four times
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", folder)
        .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
        .config("spark.python.daemon.module", "tests.faults.crash.spark_daemon")
        .config("spark.python.worker.reuse", "false")
        .getOrCreate()
    )
    register(spark)
    rows = spark.range(0, ROWS, 1, TASKS).selectExpr(
        "concat('e-', id) AS event_id", "'k' AS subject", "concat('{\"n\": ', id, '}') AS data"
    )
    for number, fate in enumerate(fates):
        Path(folder, "fate").write_text(fate.replace("/", " "))
        options = {"url": url, "topic": f"events-{number}", "source": "/shop", "type": "placed"}
        rows.write.format("conquiet").mode("append").options(**options, sliceRows=str(SLICE)).save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
