"""The marketplace on Spark: tables of a large log, and of the whole path, are the oracle's."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.lake import compare, in_process, make_log
from tests.integration.marketplace.services import handle_all, relay_all

from conquiet.sql import engine
from marketplace.generator import Generator, commands, write_log
from marketplace.lake import pipeline
from marketplace.oracle import TABLES, Oracle
from marketplace.service import init

WORLDLY = ["partial_acceptance", "click_without_impression", "rollup_revisions"]
RETOLD = ("raw_events", "events", "events_quarantine", "fact_ad_event", "outbox_delivery",
          "recon_completeness")  # fmt: skip
"""The services make ids of their own, and rows of the outbox now: not when the world was."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_lake():
    """The pipeline is a module's: what a test points it at must not stay."""
    before = pipeline.lake
    yield
    pipeline.lake = before


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("events", [30_000, 1_000_000])
def test_tables_of_a_large_log_with_late_events_are_the_oracle_s(events, spark, tmp_path: Path):
    oracle = Oracle(outbox=False, spill=tmp_path / "oracle")
    log = make_log(events, tmp_path, oracle)
    assert log.events > events * 0.95
    lake = tmp_path / "lake"
    in_process("bench.lake_driver", str(log.folder), str(lake))  # first, late, the newest
    compare(lake, oracle)
    pipeline.replay(spark=spark)
    compare(lake, oracle)


@pytest.mark.timeout(600)
def test_what_was_asked_of_the_services_is_what_the_tables_say(
    spark, tmp_path: Path, database_url: str, redis_client, redis_url: str
) -> None:
    """Command → worker → handler → outbox → relay → log → lake."""
    oracle = Oracle()
    entries = list(Generator(seed=17, orders=25, days=4, faults=WORLDLY).entries(oracle))
    market = engine(database_url)
    init(market)
    assert handle_all(market, redis_client, list(commands(entries)), timeout=300).failed == 0
    relay_all(market, redis_client)
    write_log(redis_client, (entry for entry in entries if entry.is_telemetry))
    market.dispose()

    pipeline.lake = str(tmp_path / "lake")
    log = {"url": redis_url, "streams": "pf-*", "startingOffsets": "earliest"}
    events = spark.readStream.format("conquiet").options(**log).load()
    pipeline.run(events, once=True, outbox=database_url)

    for name in TABLES:
        if name not in RETOLD:
            assert oracle.differences(name, pipeline.read(name).to_pylist())[:3] == []
    assert pipeline.read("events_quarantine").num_rows == 0
    assert without_ids(pipeline.read("fact_ad_event").to_pylist()) == without_ids(
        oracle.rows("fact_ad_event")
    )
    hours = pipeline.read("recon_completeness").to_pylist()
    assert all(row["complete"] for row in hours)
    domain = sum(not entry.is_telemetry for entry in entries)
    assert sum(row["outbox_count"] for row in hours) == domain
    assert sum(row["silver_count"] for row in hours) == domain
    assert sum(pipeline.read("outbox_delivery")["events"].to_pylist()) == domain


def without_ids(ad_events: list[dict]) -> list[list[str]]:
    names = [name for name in TABLES["fact_ad_event"].columns if name != "event_id"]
    return sorted([str(row[name]) for name in names] for row in ad_events)
