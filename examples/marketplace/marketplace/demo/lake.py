"""Lake: the tables that Spark wrote, read from their files without Spark."""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from marketplace.oracle import TABLES

COMPARED = {
    "fact_order": (),
    "fact_order_line": (),
    "fact_attribution": (),
    "ad_touches": ("first_seen_at",),
    "store_daily": (),
    "product_daily": (),
    "category_daily": (),
    "zip_daily": (),
    "ad_daily": (),
    "buyer_first_purchase": (),
    "admin_weekly": (),
}
"""Tables that the oracle knows to the last cell, but for what depends on when the demo ran."""


class Lake:
    """A folder of tables."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rows(self, name: str, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """The rows of a table; days by which its files are grouped are columns too."""
        import pyarrow.dataset

        from conquiet.spark.tables.reading import table_files

        folder = self._folder / name
        files = table_files(folder)
        if not files:
            return []
        found = pyarrow.dataset.dataset(
            files, format="parquet", partitioning="hive", partition_base_dir=str(folder)
        )
        days = [column for column, kind in _columns(name).items() if kind == "date"]
        rows: list[dict[str, Any]] = found.to_table(columns=columns).to_pylist()
        for row in rows:
            for day in days:
                if isinstance(row.get(day), str):  # it stands in the name of a folder
                    row[day] = date.fromisoformat(row[day])
        return rows

    def silver(self) -> Silver:
        return Silver(self.rows("silver", ["kind", "event_id", "reason", "delivery_count"]))


def _columns(name: str) -> dict[str, str]:
    return TABLES[name].columns if name in TABLES else {}


class Silver:
    """What became of the events of the log."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.events = {row["event_id"] for row in rows if row["kind"] == "event"}
        self.touches = sum(row["kind"] == "touch" for row in rows)
        self.reasons = Counter(row["reason"] for row in rows if row["kind"] == "refused")
        self.dropped = sum(row["delivery_count"] - 1 for row in rows)
