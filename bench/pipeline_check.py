"""Whether the tables of a lake are those of the oracle: every row of every table, to the cent.

Spark writes the columns of the contract (`python -m bench.pipeline_check FOLDER`), and here they
are compared without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from marketplace.oracle import TABLES, Oracle
from marketplace.pipeline import Lake


def write_tables(lake: Lake, directory: Path) -> None:
    """All tables with the columns of the contract, a folder of Parquet files each."""
    for name, table in TABLES.items():
        lake.read(name).select(*table.columns).write.parquet(str(directory / name))


def differences(directory: Path, oracle: Oracle) -> Iterator[str]:
    """Some lines for each table that is not the oracle's."""
    for name in TABLES:
        right = oracle.arrow(name)
        found = pq.read_table(directory / name).cast(right.schema)
        if _ordered(name, found) != _ordered(name, right):
            yield from _told(name, found, oracle)


def _ordered(name: str, table: Any) -> Any:
    keys = [(column, "ascending") for column in TABLES[name].key]
    return table.sort_by(keys).combine_chunks()


def _told(name: str, found: Any, oracle: Oracle) -> list[str]:
    lines = oracle.differences(name, found.to_pylist())[:3]
    return lines or [f"{name}: differs, and no row of it does"]


def counted(oracle: Oracle) -> dict[str, int]:
    """Rows of each table."""
    return {name: oracle.count(name) for name in TABLES}


def main() -> None:
    from bench.pipeline_driver import started

    root = Path(sys.argv[1])
    spark = started(root)
    write_tables(Lake(spark, root / "lake"), root / "tables")
    spark.stop()


if __name__ == "__main__":
    main()
