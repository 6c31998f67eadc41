"""The same events are the same bytes: in another process, and in batches of another size."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.marketplace.driver import start
from tests.spark.marketplace.tables import digests

from marketplace.generator import Generator, write_parquet
from marketplace.pipeline.tables import STORED


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_drivers_with_batches_of_two_sizes_write_the_same_bytes(tmp_path: Path) -> None:
    entries = list(Generator(seed=21, orders=40, days=3, faults="all").entries())
    log = tmp_path / "log"
    write_parquet(entries, log, rows_per_file=len(entries) // 3 + 1)
    found = []
    for number, (files_per_batch, cores) in enumerate([(3, 1), (1, 2)]):
        lake = tmp_path / f"lake{number}"
        out, _ = start(log, lake, files_per_batch, cores).communicate()
        assert out == "started\ndone\n"
        found.append(digests(lake))
    assert found[0] == found[1]
    assert {name.partition("/")[0] for name in found[0]} == set(STORED)
