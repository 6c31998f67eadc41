"""The pipeline's tables are those of the oracle, to the cent, with every fault that there is."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from tests.spark.marketplace.tables import differences, is_as_published, run_files

from marketplace.generator import Generator, write_outbox, write_parquet
from marketplace.oracle import Oracle
from marketplace.pipeline import Job, Lake, read_files, replay
from marketplace.pipeline.tables import STORED
from marketplace.service import init


@pytest.mark.slow
def test_every_table_of_a_small_log_is_the_oracle_s(spark, tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    world = Generator(seed=1, orders=60, days=6, faults="all")
    write_parquet(world.entries(oracle), tmp_path / "log")
    lake = Lake(spark, tmp_path / "lake")
    job = Job(lake, once=True)
    run_files(job, tmp_path / "log")
    assert is_as_published(lake, tmp_path / "log")
    assert differences(lake, oracle) == []
    before = {name: sorted(lake.files(name)) for name in ("silver", *STORED)}
    assert replay(job, date(2026, 3, 2), date(2026, 3, 4)) == 2
    assert {name: sorted(lake.files(name)) for name in before} == before  # the same bytes


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("seed", "first_day", "format"),
    [
        (11, date(2026, 3, 1), "parquet"),  # clocks go forward on the 8th
        (12, date(2026, 10, 25), "delta"),  # and back on November 1
        (13, date(2026, 12, 20), "parquet"),
    ],
)
def test_every_table_is_the_oracle_s_after_many_batches(
    spark, tmp_path: Path, seed: int, first_day: date, format: str
) -> None:
    oracle = Oracle(outbox=True)
    world = Generator(seed=seed, orders=150, first_day=first_day, days=14, faults="all")
    entries = list(world.entries(oracle))
    write_parquet(entries, tmp_path / "log", rows_per_file=len(entries) // 3 + 1, partitions=2)
    url = f"sqlite:///{tmp_path}/market.sqlite"
    init(url)
    write_outbox(url, entries, published=True)

    def outbox():
        options = {"url": url, "table": "outbox_events", "delivery": "true"}
        return spark.read.format("conquiet-outbox").options(**options).load()

    lake = Lake(spark, tmp_path / "lake", format)
    # A refresh after every batch: late events have to correct days that were written before.
    job = Job(lake, trigger_seconds=0, refresh_seconds=0, outbox=outbox)
    query = job.start(read_files(spark, str(tmp_path / "log"), maxFilesPerTrigger="1"))
    query.processAllAvailable()
    query.stop()
    job.finish()
    assert differences(lake, oracle) == []

    before = {name: sorted(lake.files(name)) for name in STORED}
    assert replay(job, first_day + timedelta(days=6), first_day + timedelta(days=9)) == 3
    assert {name: sorted(lake.files(name)) for name in STORED} == before  # the same bytes
