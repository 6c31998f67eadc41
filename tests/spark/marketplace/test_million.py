"""A million events, all faults on: every table is the oracle's, to the cent."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.pipeline_check import counted, differences, write_tables
from bench.pipeline_log import log_of
from tests.spark.marketplace.tables import run_files

from marketplace.oracle import Oracle
from marketplace.pipeline import Job, Lake

EVENTS = 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_table_of_a_million_events_is_the_oracle_s(spark, tmp_path: Path) -> None:
    oracle = Oracle(outbox=False, spill=tmp_path / "oracle")
    log = log_of(EVENTS, tmp_path, oracle)
    assert log.events > EVENTS * 0.95
    lake = Lake(spark, tmp_path / "lake")
    run_files(Job(lake, once=True), log.files[0].parent, maxFilesPerTrigger="4")
    write_tables(lake, tmp_path / "tables")
    assert list(differences(tmp_path / "tables", oracle)) == []
    assert counted(oracle)["events"] > EVENTS // 2
