"""Rows of a table: in memory, or in Parquet files where memory would not do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from conquiet.errors import ConfigError
from marketplace.oracle.tables import table

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ROWS_PER_FILE = 20_000


class Rows:
    """Collects the rows of one table; times are microseconds until somebody asks."""

    def __init__(self, name: str, spill: Path | None = None) -> None:
        self.name = name
        self.table = table(name)
        self.count = 0
        self._kept: list[tuple[Any, ...]] = []
        self._directory = None if spill is None else spill / name
        self._files = 0
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            if any(self._directory.iterdir()):  # its rows would be taken for ours
                raise ConfigError(f"{self._directory} is not empty; spill into a new directory")

    def add(self, row: tuple[Any, ...]) -> None:
        self._kept.append(row)
        self.count += 1
        if self._directory is not None and len(self._kept) >= _ROWS_PER_FILE:
            self.flush()

    def flush(self) -> None:
        """Write what is kept, if there is a place for it."""
        if self._directory is None or not self._kept:
            return
        import pyarrow.parquet

        path = self._directory / f"part-{self._files:05}.parquet"
        pyarrow.parquet.write_table(self._arrow(self._kept), path)
        self._files += 1
        self._kept.clear()

    def arrow(self) -> Any:
        """All rows as a pyarrow Table."""
        if self._directory is None:
            return self._arrow(self._kept)
        import pyarrow
        import pyarrow.parquet

        self.flush()
        parts = [pyarrow.parquet.read_table(path) for path in sorted(self._directory.iterdir())]
        return pyarrow.concat_tables(parts) if parts else self._arrow([])

    def dicts(self) -> list[dict[str, Any]]:
        """All rows by the names of their columns, sorted by the key."""
        if self._directory is not None:
            found: list[dict[str, Any]] = self.arrow().to_pylist()
        else:
            names = list(self.table.columns)
            times = [
                place for place, kind in enumerate(self.table.columns.values()) if kind == "ts"
            ]
            found = [dict(zip(names, _dated(row, times), strict=True)) for row in self._kept]
        key = self.table.key
        found.sort(key=lambda row: [str(row[name] or "") for name in key])
        return found

    def _arrow(self, rows: list[tuple[Any, ...]]) -> Any:
        import pyarrow as pa

        types = {
            "string": pa.string(),
            "int": pa.int32(),
            "bigint": pa.int64(),
            "boolean": pa.bool_(),
            "binary": pa.binary(),
            "date": pa.date32(),
            "ts": pa.timestamp("us", tz="UTC"),
            "strings": pa.list_(pa.string()),
        }
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.table.columns)
        return pa.table(
            {
                name: pa.array(values, types[kind])
                for (name, kind), values in zip(self.table.columns.items(), columns, strict=True)
            }
        )


def _dated(row: tuple[Any, ...], times: list[int]) -> list[Any]:
    values = list(row)
    for place in times:
        if values[place] is not None:
            values[place] = _EPOCH + timedelta(microseconds=values[place])
    return values
