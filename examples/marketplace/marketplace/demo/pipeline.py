"""The pipeline process: starts Spark while the workers still run, then makes the tables."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

from marketplace.demo.process import read_settings, report, when_orphaned
from marketplace.generator import DOMAIN_TOPIC, TELEMETRY_TOPIC

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main() -> int:
    """Read the scratch folder, start Spark, and wait for the addresses of the complete log."""
    scratch = read_settings()["scratch"]
    try:
        _run(scratch)
    finally:  # also when the demo was killed
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _run(scratch: str) -> None:
    spark = _session(scratch)
    try:
        report(ready=True)
        addresses = read_settings()
        when_orphaned(lambda: _end_now(scratch))
        _make_tables(spark, addresses)
    finally:
        spark.stop()


def _session(scratch: str) -> SparkSession:
    from conquiet.spark import session

    config = {
        "spark.local.dir": scratch,
        "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    return session("conquiet demo", master="local[*]", config=config, quick_start=True)


def _make_tables(spark: SparkSession, settings: dict[str, Any]) -> None:
    from marketplace.lake import pipeline

    source = {"url": settings["broker"], "streams": f"{DOMAIN_TOPIC},{TELEMETRY_TOPIC}"}
    events = spark.readStream.format("conquiet").options(**source, startingOffsets="earliest")
    is_taken = False

    def follow(progress: Any) -> None:
        nonlocal is_taken
        if not is_taken and progress.step == "states and changes written":
            is_taken = True
            report(taken=True)

    pipeline.lake = settings["lake"]
    pipeline.run(events.load(), once=True, outbox=settings["database"], on_progress=follow)
    report(finished=True)


def _end_now(scratch: str) -> None:
    """Remove the files of Java, which no other process will do now, and kill this process group."""
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
