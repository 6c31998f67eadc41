"""The tables of the marketplace are those of the oracle, to the cent, with every fault there is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conquiet.lake import Outbox
from marketplace.generator import Generator, write_outbox, write_parquet
from marketplace.lake import pipeline
from marketplace.oracle import TABLES, Oracle
from marketplace.service import init

Rows = Mapping[str, list[dict[str, Any]]]


def differences(found: Rows, oracle: Oracle) -> list[str]:
    """Up to three lines for each table that is not what the oracle says."""
    wrong = []
    for name in TABLES:
        for row in found[name]:
            if "stream" in row:  # the oracle knows topics, and not their partitions
                row["stream"] = row["stream"].partition(":{")[0]
        wrong += oracle.differences(name, found[name])[:3]
    return wrong


def batches(log: Path) -> list[Any]:
    return [pq.read_table(file) for file in sorted(log.iterdir())]


def test_every_table_of_a_small_log_is_the_oracle_s(tmp_path: Path) -> None:
    oracle = Oracle(outbox=False)
    world = Generator(seed=1, orders=60, days=6, faults="all")
    write_parquet(world.entries(oracle), tmp_path / "log")
    assert differences(pipeline.local(*batches(tmp_path / "log")), oracle) == []


@pytest.mark.parametrize(
    ("seed", "first_day"),
    [
        (11, date(2026, 3, 1)),  # clocks go forward on the 8th
        pytest.param(12, date(2026, 10, 25), marks=pytest.mark.slow),  # and back on November 1
        pytest.param(13, date(2026, 12, 20), marks=pytest.mark.slow),
    ],
)
def test_every_table_is_the_oracle_s_after_late_events_in_many_batches(
    tmp_path: Path, seed: int, first_day: date
) -> None:
    oracle = Oracle(outbox=True)
    world = Generator(seed=seed, orders=150, first_day=first_day, days=14, faults="all")
    entries = list(world.entries(oracle))
    write_parquet(entries, tmp_path / "log", rows_per_file=len(entries) // 4 + 1, partitions=2)
    url = f"sqlite:///{tmp_path}/market.sqlite"
    init(url)
    write_outbox(url, entries, published=True)
    # A refresh after every batch: late events correct days that were written before.
    found = pipeline.local(*batches(tmp_path / "log"), outbox=Outbox(url))
    assert differences(found, oracle) == []
