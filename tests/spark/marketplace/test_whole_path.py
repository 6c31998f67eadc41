"""Command → worker → handler → outbox → relay → log → Spark: the tables are the oracle's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.marketplace.services import handle_all, relay_all
from tests.spark.marketplace.tables import differences, rows_of

from conquiet.spark.bronze import read_events
from conquiet.sql import engine
from marketplace.generator import Generator, commands, write_log
from marketplace.oracle import TABLES, Oracle
from marketplace.pipeline import Job, Lake
from marketplace.service import init

WORLDLY = ["partial_acceptance", "click_without_impression", "rollup_revisions"]
# The services make ids of their own, and rows of the outbox now: not when the world was.
TOLD_ANEW = ("raw_events", "events", "events_quarantine", "fact_ad_event", "outbox_delivery",
             "recon_completeness")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_asked_of_the_services_is_what_the_tables_say(
    spark, tmp_path: Path, database_url: str, redis_client, redis_url: str
) -> None:
    oracle = Oracle()
    entries = list(Generator(seed=17, orders=25, days=4, faults=WORLDLY).entries(oracle))
    market = engine(database_url)
    init(market)
    assert handle_all(market, redis_client, list(commands(entries)), timeout=300).failed == 0
    relay_all(market, redis_client)
    write_log(redis_client, (entry for entry in entries if entry.is_telemetry))

    def outbox():
        options = {"url": database_url, "table": "outbox_events", "delivery": "true"}
        return spark.read.format("conquiet-outbox").options(**options).load()

    lake = Lake(spark, tmp_path / "lake")
    job = Job(lake, once=True, outbox=outbox)
    log = {"url": redis_url, "streams": "pf-*", "startingOffsets": "earliest"}
    job.start(read_events(spark, "log", log)).awaitTermination()
    job.finish()
    market.dispose()

    assert differences(lake, oracle, [name for name in TABLES if name not in TOLD_ANEW]) == []
    assert rows_of(lake.read("events_quarantine")) == []
    assert told(rows_of(lake.read("fact_ad_event"))) == told(oracle.rows("fact_ad_event"))
    hours = rows_of(lake.read("recon_completeness"))
    assert all(row["complete"] for row in hours)
    domain = sum(not entry.is_telemetry for entry in entries)
    assert sum(row["outbox_count"] for row in hours) == domain
    assert sum(row["silver_count"] for row in hours) == domain
    assert sum(row["events"] for row in rows_of(lake.read("outbox_delivery"))) == domain


def told(ad_events: list[dict]) -> list[list[str]]:
    """Events of ads without their ids."""
    names = [name for name in TABLES["fact_ad_event"].columns if name != "event_id"]
    return sorted([str(row[name]) for name in names] for row in ad_events)
