"""DeltaCommits: a Delta table by the package `deltalake`, with no jar.

The fence of a query is Delta's own application transaction (`txn`): its version moves in the commit
that adds the files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyspark.sql.types import StructType

from conquiet.errors import ConfigError
from conquiet.spark.tables.commits import Fence
from conquiet.spark.tables.files import DataFile, Partition, partition_of
from conquiet.spark.tables.schema import nullable

try:
    from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
    from deltalake.transaction import AddAction, RemoveAction
except ImportError as error:
    raise ConfigError(f"{error.name} is not installed: pip install 'conquiet[spark]'") from error


class DeltaCommits:
    """The log of a Delta table."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _table(self) -> Any:
        return DeltaTable(str(self.path))

    def _exists(self) -> bool:
        return bool(DeltaTable.is_deltatable(str(self.path)))

    def schema(self) -> StructType | None:
        if not self._exists():
            return None
        return StructType.fromJson(json.loads(self._table().schema().to_json()))

    def partition_by(self) -> list[str]:
        return list(self._table().metadata().partition_columns)

    def applied(self, query: str) -> int:
        if not self._exists():
            return -1
        version = self._table().transaction_version(query)
        return -1 if version is None else int(version)

    def files(self) -> list[str]:
        return sorted(name for name, _ in self._partitioned())

    def files_of(self, partitions: Collection[Partition]) -> list[str]:
        return [name for name, partition in self._partitioned() if partition in partitions]

    def _partitioned(self) -> list[tuple[str, Partition]]:
        import pyarrow as pa

        columns = self.partition_by()
        actions = pa.table(self._table().get_add_actions(flatten=True))
        wanted = actions.select(["path", *(f"partition.{name}" for name in columns)]).to_pylist()
        return [
            (
                unquote(row["path"]),  # Delta writes names as URLs
                partition_of({name: row[f"partition.{name}"] for name in columns}, columns),
            )
            for row in wanted
        ]

    def create(self, schema: StructType, partition_by: Sequence[str]) -> None:
        schema = nullable(schema)
        there = self.schema()
        if there is None:
            made = Schema.from_json(schema.json())
            DeltaTable.create(str(self.path), made, mode="ignore", partition_by=list(partition_by))
            return
        new = [one for one in schema if one.name not in there.names]
        if new:
            self._table().alter.add_columns([Field.from_json(one.json()) for one in new])

    def is_under_way(self) -> bool:
        return False  # a Delta commit is one file

    def commit(self, add: Sequence[DataFile], remove: Sequence[str], fence: Fence | None) -> None:
        if fence is not None and self.applied(fence.query) >= fence.batch:
            return  # by another driver, since this one looked
        # Read before anything is moved: Delta refuses the commit if the fence moves from here on.
        table = self._table()
        for one in add:
            place = self.path / one.name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(one.written, place)  # in its place, and not in the table
        now = int(time.time() * 1000)
        actions = [
            AddAction(
                one.name, one.size, dict(one.partition), now, True, f'{{"numRecords": {one.rows}}}'
            )
            for one in add
        ]
        gone = [RemoveAction(name, True, now) for name in remove]
        transactions = [Transaction(fence.query, fence.batch)] if fence else None
        table.create_write_transaction(
            [*gone, *actions],
            "append",
            table.schema(),
            self.partition_by(),
            commit_properties=CommitProperties(app_transactions=transactions),
        )
