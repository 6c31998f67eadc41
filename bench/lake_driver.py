"""A driver of the marketplace's lake: `python -m bench.lake_driver LOG LAKE [all|nine] [CORES]`.

It takes the folder `first` of a log in one session, then `late`, then `newest`, each with a refresh
of all tables, and prints the seconds as JSON. With `nine` it makes the tables of the floors alone,
of `first` alone.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import msgspec

from conquiet.lake import Pipeline

SETTINGS = {
    "spark.driver.memory": "2g",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
}
FILES_PER_BATCH = "20"
_TOUCHES = "event_type IN ('ad_impression', 'ad_click')"
_TOKEN = "payload ->> '$.data.token_id'"


def main(log: str, lake: str, tables: str = "all", cores: str = "2") -> None:
    began = time.perf_counter()
    from conquiet.lake import read_files
    from conquiet.spark import session
    from marketplace.lake import pipeline

    places = {"spark.local.dir": f"{lake}.tmp", "spark.sql.warehouse.dir": f"{lake}.warehouse"}
    config = {**SETTINGS, **places}
    # As `conquiet pipeline run --from files --once` has it.
    spark = session(
        "bench", master=f"local[{cores}]", config=config, formats=False, quick_start=True
    )
    started = time.perf_counter() - began
    if tables == "nine":
        pipeline = nine_tables()
    pipeline.lake = lake
    seconds: dict[str, float] = {}
    jobs: dict[str, int] = {}
    steps: Counter[str] = Counter()
    for part in ("first",) if tables == "nine" else ("first", "late", "newest"):
        last = began = time.perf_counter()
        before = count_jobs(spark)

        def count(progress: Any, part: str = part) -> None:
            nonlocal last
            now = time.perf_counter()
            steps[f"{part}: {progress.step}"] += now - last  # type: ignore[assignment]
            last = now

        pipeline.run(
            read_files(spark, f"{log}/{part}", maxFilesPerTrigger=FILES_PER_BATCH),
            once=True,
            checkpoint=f"{lake}.checkpoints/{part}",
            on_progress=count,
        )
        seconds[part] = time.perf_counter() - began
        jobs[part] = count_jobs(spark) - before
        say = f"  {part}: {seconds[part]:,.1f} s, {jobs[part]} jobs"
        print(say, file=sys.stderr, flush=True)
    spark.stop()
    found = {"session": started, **seconds, "tables": steps, "jobs": jobs}
    print(msgspec.json.encode(found).decode())


def count_jobs(spark: Any) -> int:
    """Return how many jobs Spark was given since its start."""
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def nine_tables() -> Pipeline:
    """Return a pipeline of the floors' nine tables, by the definitions of the marketplace.

    Silver keeps payloads as text, as it does there. What every lake has is made as well:
    redeliveries, counts of rules, reconciliation by hour; and the problems of orders, which come
    with their fact.
    """
    from marketplace import lake
    from marketplace.catalog import CATALOG

    made = Pipeline(
        CATALOG, name="nine", zone=lake.ZONE, moments=lake.pipeline.moments, typed=False
    )
    telemetry = f"{lake.TELEMETRY_TOPIC}*"
    made.event("ad_impression", lake.AdImpression, streams=telemetry)
    made.event("ad_click", lake.AdClick, streams=telemetry)
    made.expect("wrong_amounts")(lake.amounts_add_up)
    made.table(key="order_id", partition_by="business_day")(lake.FactOrder)
    made.table(key="line_item_id", partition_by="business_day")(lake.FactOrderLine)
    made.table(key=("order_id", "problem"))(lake.ReconMoney)
    made.fact(key="order_id")(lake.Order)
    daily = ("store_daily", "zip_daily", "category_daily")
    made.queries += [one for one in lake.pipeline.queries if one.name in daily]
    made.query(
        "touches",
        key="token_id",
        group="token_id",
        touched=f"SELECT {_TOKEN} FROM changed_events WHERE {_TOUCHES}",
        sql=f"""
        SELECT {_TOKEN} AS token_id, min(occurred_at) AS occurred_at,
               arg_min(event_type, occurred_at) AS kind,
               arg_min(payload ->> '$.data.ad_id', occurred_at) AS ad_id
        FROM events WHERE {_TOUCHES} AND token_id IN (FROM touched) GROUP BY 1
        """,
    )
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
