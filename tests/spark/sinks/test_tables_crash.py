"""A driver that dies in the middle of a commit leaves a table that is whole, before or after."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StructField, StructType

from conquiet.errors import StoreError
from conquiet.spark.tables import delta, parquet
from conquiet.spark.tables.commits import Fence
from conquiet.spark.tables.files import DataFile, named_by_batch, staged_files

SCHEMA = StructType([StructField("id", LongType())])


class Killed(BaseException):
    """What no `except Exception` holds up; like the end of the process, nothing runs after it."""


def stage(table: Path, batch: int, files: int = 3) -> list[DataFile]:
    folder = table / "_conquiet" / "staging" / f"q-{batch}-{os.urandom(2).hex()}"
    folder.mkdir(parents=True)
    for number in range(files):
        rows = pa.table({"id": pa.array([batch * 10 + number], pa.int64())})
        pq.write_table(rows, folder / f"part-{number}.parquet")
    return named_by_batch(staged_files(folder), "q", batch)


def dies_at(monkeypatch: pytest.MonkeyPatch, module, step: int) -> None:
    """The process ends when it calls the file system for the n-th time in this commit."""
    calls = 0

    def counted(name: str):
        real = getattr(os, name)

        def call(*arguments):
            nonlocal calls
            calls += 1
            if calls == step:
                raise Killed(name)
            return real(*arguments)

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(module.os, name, counted(name))


def ids(commits, table: Path) -> list[int]:
    return sorted(
        value for name in commits.files() for value in pq.read_table(table / name)["id"].to_pylist()
    )


@pytest.mark.parametrize("step", range(1, 10))
def test_a_plain_table_is_whole_wherever_the_driver_dies(tmp_path, monkeypatch, step):
    commits = parquet.ParquetCommits(tmp_path)
    commits.create(SCHEMA, [])
    commits.commit(stage(tmp_path, 0), [], Fence("q", 0))
    old = commits.files()
    new = stage(tmp_path, 1)
    with monkeypatch.context() as patched:
        dies_at(patched, parquet, step)
        with pytest.raises(Killed):  # commit.json, 3 files in, 3 out, state.json, commit.json
            commits.commit(new, old, Fence("q", 1))
    again = parquet.ParquetCommits(tmp_path)
    if step == 1:  # before the commit holds: as if nothing had been
        assert ids(again, tmp_path) == [0, 1, 2]
        assert again.applied("q") == 0
        again.commit(new, old, Fence("q", 1))
    assert ids(again, tmp_path) == [10, 11, 12]
    assert again.applied("q") == 1
    assert not again.is_under_way()


def test_a_delta_table_has_no_file_before_its_commit(tmp_path, monkeypatch):
    commits = delta.DeltaCommits(tmp_path)
    commits.create(SCHEMA, [])
    commits.commit(stage(tmp_path, 0), [], Fence("q", 0))
    for step in (1, 2, 3):
        files = stage(tmp_path, 1)
        with monkeypatch.context() as patched:
            dies_at(patched, delta, step)
            with pytest.raises(Killed):
                commits.commit(files, [], Fence("q", 1))
        assert ids(delta.DeltaCommits(tmp_path), tmp_path) == [0, 1, 2]
        assert DeltaTable(str(tmp_path)).to_pyarrow_table().num_rows == 3
    commits.commit(stage(tmp_path, 1), commits.files(), Fence("q", 1))
    assert ids(commits, tmp_path) == [10, 11, 12]
    assert commits.applied("q") == 1


def test_a_commit_whose_staged_files_somebody_removed_is_told(tmp_path, monkeypatch):
    commits = parquet.ParquetCommits(tmp_path)
    commits.create(SCHEMA, [])
    files = stage(tmp_path, 0)
    with monkeypatch.context() as patched:
        dies_at(patched, parquet, 2)
        with pytest.raises(Killed):
            commits.commit(files, [], Fence("q", 0))
    for one in files:
        one.written.unlink()
    with pytest.raises(StoreError, match="write the table anew"):
        commits.files()


@pytest.mark.parametrize("kind", [delta.DeltaCommits, parquet.ParquetCommits])
def test_a_second_driver_that_is_late_with_a_batch_adds_nothing(tmp_path, kind):
    """Both looked before either committed; the late one has cut the batch into other files."""
    commits = kind(tmp_path)
    commits.create(SCHEMA, [])
    late, first = stage(tmp_path, 0, files=4), stage(tmp_path, 0, files=2)
    commits.commit(first, [], Fence("q", 0))
    commits.commit(late, [], Fence("q", 0))
    assert ids(commits, tmp_path) == [0, 1]
