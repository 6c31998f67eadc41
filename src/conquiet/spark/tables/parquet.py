"""ParquetCommits: a folder of plain Parquet files, with a commit that is finished after a crash.

    1  staged files lie in _conquiet/staging, where no reader looks
    2  _conquiet/commit.json says which files come and go: from here on the commit holds
    3  files are renamed and removed, state.json is written, commit.json goes away

Whoever reads or writes the table next finishes a step 3 that was interrupted. Programs that list
the folder themselves need nothing of this, and may for a moment see half of step 3.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructType

from conquiet.errors import StoreError
from conquiet.spark.tables.commits import Fence
from conquiet.spark.tables.files import OWN, DataFile, Partition, parquet_files, partition_at
from conquiet.spark.tables.schema import nullable

State = dict[str, Any]


class ParquetCommits:
    """The log of a folder of Parquet files: its last state, and a commit under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = path / OWN

    def schema(self) -> StructType | None:
        state = self._state()
        return StructType.fromJson(state["schema"]) if state else None

    def partition_by(self) -> list[str]:
        return list(self._state()["partition_by"])

    def applied(self, query: str) -> int:
        state = self._state()
        return int(state["batches"].get(query, -1)) if state else -1

    def files(self) -> list[str]:
        self._state()
        return sorted(str(path.relative_to(self.path)) for path in parquet_files(self.path))

    def files_of(self, partitions: Collection[Partition]) -> list[str]:
        return [name for name in self.files() if partition_at(name) in partitions]

    def create(self, schema: StructType, partition_by: Sequence[str]) -> None:
        with self._locked():
            state = self._state(locked=True) or {"partition_by": list(partition_by), "batches": {}}
            state["schema"] = nullable(schema).jsonValue()
            _write(self._own / "state.json", state)

    def is_under_way(self) -> bool:
        return (self._own / "commit.json").exists()

    def commit(self, add: Sequence[DataFile], remove: Sequence[str], fence: Fence | None) -> None:
        with self._locked():
            state = self._state(locked=True)
            if fence is not None:
                if state["batches"].get(fence.query, -1) >= fence.batch:
                    return  # by another driver, since this one looked
                state["batches"][fence.query] = fence.batch
            names = [[os.path.relpath(one.written, self.path), one.name] for one in add]
            intent = {"state": state, "add": names, "remove": list(remove)}
            _write(self._own / "commit.json", intent)
            self._finish(intent)

    # --- one at a time, and to the end ------------------------------------------------------------

    def _state(self, *, locked: bool = False) -> State:
        """The last state; first finishes a commit that was interrupted."""
        if (self._own / "commit.json").exists():
            with contextlib.nullcontext() if locked else self._locked():
                intent = _read(self._own / "commit.json")
                if intent:  # or else somebody was faster
                    self._finish(intent)
        return _read(self._own / "state.json")

    def _finish(self, intent: State) -> None:
        for written, name in intent["add"]:
            place = self.path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.replace(self.path / written, place)
            except FileNotFoundError as error:
                if not place.exists():  # else it was renamed before the crash
                    raise StoreError(
                        f"{self.path}: a commit that was interrupted cannot be finished, since"
                        f" somebody removed {written}; write the table anew"
                    ) from error
        for name in intent["remove"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)
        _write(self._own / "state.json", intent["state"])
        os.unlink(self._own / "commit.json")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._own.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # dies with its process
            yield
        finally:
            os.close(lock)


def _read(path: Path) -> State:
    try:
        content: State = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return content


def _write(path: Path, content: Any) -> None:
    """All or nothing, also when the machine fails."""
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        file.write(json.dumps(content).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
