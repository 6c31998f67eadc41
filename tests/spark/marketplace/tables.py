"""Tables of a lake as the oracle has them: plain rows, times aware and in UTC."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conquiet.spark.columns import ARROW_SCHEMA
from marketplace.oracle import TABLES, Oracle
from marketplace.pipeline import Job, Lake, read_files
from marketplace.pipeline.tables import STORED


def rows_of(frame: Any) -> list[dict[str, Any]]:
    return frame.toArrow().to_pylist()


def differences(lake: Lake, oracle: Oracle, names: Iterable[str] = TABLES) -> list[str]:
    """Up to three lines for each table that is not what the oracle says."""
    found = []
    for name in names:
        rows = rows_of(lake.read(name))
        for row in rows:
            if "stream" in row:  # the oracle knows topics, and not their partitions
                row["stream"] = row["stream"].partition(":{")[0]
        found += oracle.differences(name, rows)[:3]
    return found


def run_files(job: Job, log: Path, **options: str) -> None:
    """Take in a folder of files, and bring every table up to it."""
    query = job.start(read_files(job.lake.spark, str(log), **options))
    query.awaitTermination()
    job.finish()


def contents(lake: Lake) -> dict[str, list[str]]:
    """What is in every table of the contract, row by row, in an order of its own."""
    return {
        name: sorted(map(repr, rows_of(lake.read(name).select(*columns(name))))) for name in TABLES
    }


def columns(name: str) -> list[str]:
    return list(TABLES[name].columns)


def digests(lake: Path) -> dict[str, str]:
    """Every file of every fact, mart and table of reconciliation, and what is in it."""
    return {
        str(path.relative_to(lake)): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in STORED
        for path in (lake / name).glob("*/*.parquet")
    }


def is_as_published(lake: Lake, log: Path) -> bool:
    """Whether bronze has the rows of the files, each once, with every column as it was."""
    import pyarrow.parquet

    names = ARROW_SCHEMA.names
    right = [
        row for path in log.glob("*.parquet") for row in _rows(pyarrow.parquet.read_table(path))
    ]
    found = _rows(lake.read("raw_events").select(*names).toArrow())
    return sorted(map(repr, found)) == sorted(map(repr, right))


def _rows(table: Any) -> list[dict[str, Any]]:
    return [{**row, "attributes": sorted(row["attributes"])} for row in table.to_pylist()]


def taken(lake: Lake) -> list[tuple[str, str, str]]:
    """The entries of the log that are in bronze; one that was taken twice is there twice."""
    rows = lake.read("raw_events").select("stream", "entry_id", "event_id").collect()
    return sorted((row.stream, row.entry_id, row.event_id or "") for row in rows)
