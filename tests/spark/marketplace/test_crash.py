"""A refresh that fails between the writes of its tables is finished by the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.marketplace.tables import differences, run_files

from marketplace.generator import Generator, write_parquet
from marketplace.oracle import Oracle
from marketplace.pipeline import Job, Lake


class Stopped(Exception):
    pass


class Stopping(Lake):
    """A lake that writes so many tables, and then no more."""

    left = 0

    def replace(self, frame, name, values) -> None:
        if self.left == 0:
            raise Stopped(name)
        self.left -= 1
        super().replace(frame, name, values)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_refresh_that_stopped_anywhere_is_done_again(spark, tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    entries = list(Generator(seed=31, orders=50, days=5, faults="all").entries(oracle))
    half = len(entries) // 2
    log = tmp_path / "log"
    write_parquet(entries[:half], log)
    lake = Stopping(spark, tmp_path / "lake")
    lake.left = 1_000
    run_files(Job(lake, once=True), log)

    write_parquet(entries[half:], tmp_path / "rest")
    (tmp_path / "rest" / "part-00000.parquet").rename(log / "part-00001.parquet")
    for writes in (0, 1, 3, 5, 7, 11, 13):  # facts, attribution, marts, summaries, reconciliation
        lake.left = writes
        with pytest.raises(Stopped):
            run_files(Job(lake, once=True), log)
    lake.left = 1_000
    Job(lake, once=True).finish()
    assert differences(lake, oracle) == []
    assert Job(lake, once=True).finish() == 0  # and there is nothing left to do
