"""A refresh costs what changed: it opens the days in which the events of its orders are."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from tests.spark.marketplace.tables import differences, run_files

from marketplace.generator import Generator, write_parquet
from marketplace.oracle import Oracle
from marketplace.pipeline import Job, Lake


class Watched(Lake):
    """A lake that remembers which days of silver were opened."""

    opened: set[date | None]

    def read(self, name, values=None):
        if name == "silver":
            self.opened |= self.days("silver") if values is None else set(values)
        return super().read(name, values)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_refresh_opens_the_days_of_its_orders_and_no_others(spark, tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    world = Generator(seed=5, orders=60, days=45, faults="all")
    entries = list(world.entries(oracle))
    log = tmp_path / "log"
    last = len(entries) * 49 // 50
    write_parquet(entries[:last], log)
    lake = Watched(spark, tmp_path / "lake")
    lake.opened = set()
    job = Job(lake, once=True)
    run_files(job, log)
    every_day = lake.days("silver")
    write_parquet(entries[last:], tmp_path / "rest")
    (tmp_path / "rest" / "part-00000.parquet").rename(log / "part-00001.parquet")
    lake.opened = set()
    run_files(job, log)
    opened = set(lake.opened)
    assert differences(lake, oracle) == []
    first = date.fromisoformat(min(entry.time for entry in entries[last:])[:10])
    # An order lives for three weeks at most, and events without a time are always looked at.
    assert min(opened - {None}) >= first - timedelta(days=22)
    assert len(every_day - opened) > len(every_day) // 3
