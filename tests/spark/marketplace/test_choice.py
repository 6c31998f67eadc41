"""Some tables alone, with those that they are made of; others follow when they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.marketplace.tables import differences, run_files

from marketplace.generator import Generator, write_parquet
from marketplace.oracle import Oracle
from marketplace.pipeline import Job, Lake
from marketplace.pipeline.tables import STORED


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tables_that_were_left_out_are_made_anew_when_they_are_asked_for(
    spark, tmp_path: Path
) -> None:
    oracle = Oracle(outbox=False)
    world = Generator(seed=8, orders=40, days=4, cut=True, faults="all")
    entries = list(world.entries(oracle))
    log, half = tmp_path / "log", len(entries) // 2
    told: list[str] = []
    lake = Lake(spark, tmp_path / "lake", tell=told.append)
    write_parquet(entries[:half], log)
    run_files(Job(lake, once=True), log)

    write_parquet(entries[half:], tmp_path / "rest")
    (tmp_path / "rest" / "part-00000.parquet").rename(log / "part-00001.parquet")
    some = Job(lake, once=True, tables=["events", "zip_daily"])
    files = {name: lake.files(name) for name in STORED}
    told.clear()
    run_files(some, log)
    assert told == ["looking for what changed", "making fact_order", "making zip_daily"]
    changed = {name for name in STORED if lake.files(name) != files[name]}
    assert changed == {"fact_order", "zip_daily"}
    assert differences(lake, oracle, ["events", "fact_order", "zip_daily"]) == []
    assert some.finish() == 0

    Job(lake, once=True).finish()
    assert differences(lake, oracle) == []
    assert Job(lake, once=True).finish() == 0
