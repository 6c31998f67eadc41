"""Tables as Delta and as plain Parquet: each batch once, partitions replaced as a whole."""

from __future__ import annotations

import hashlib
from datetime import date
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from conquiet.errors import ConfigError
from conquiet.spark import (
    append_once,
    read_table,
    replace_partitions,
    table_files,
    write_table,
)

FORMATS = ["delta", "parquet"]
pytestmark = pytest.mark.parametrize("format", FORMATS)


def rows(spark, *given: tuple[int, str, int]):
    return spark.createDataFrame(list(given), "id long, day string, n long").selectExpr(
        "id", "to_date(day) AS day", "n"
    )


def contents(spark, path) -> list[tuple[int, str, int]]:
    return sorted((row.id, str(row.day), row.n) for row in read_table(spark, path).collect())


def test_a_batch_is_added_once_and_every_reader_agrees(spark, tmp_path, format):
    path = tmp_path / "table"
    first = rows(spark, (1, "2026-01-01", 1), (2, "2026-01-02", 2))
    options = {"format": format, "partition_by": ["day"]}
    assert append_once(first, path, query="q", batch=0, **options)
    assert not append_once(first, path, query="q", batch=0, **options)
    assert append_once(first, path, query="other", batch=0, **options)
    assert append_once(rows(spark, (3, "2026-01-01", 3)), path, query="q", batch=4, **options)
    assert not append_once(first, path, query="q", batch=3, **options)

    expected = [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]
    assert [(id_, n) for id_, _, n in contents(spark, path)] == expected
    found = duckdb.read_parquet(table_files(path), hive_partitioning=True)
    assert found.aggregate("count(*), sum(n), min(day)").fetchall() == [(5, 9, date(2026, 1, 1))]
    if format == "delta":
        table = DeltaTable(str(path)).to_pyarrow_table()
        assert sorted(table.column("id").to_pylist()) == [1, 1, 2, 2, 3]
        assert DeltaTable(str(path)).transaction_version("q") == 4
    else:
        plain = spark.read.parquet(str(path))  # a folder as any other
        assert plain.count() == 5
        glob = duckdb.sql(f"SELECT sum(n) FROM '{path}/day=*/*.parquet'")
        assert glob.fetchall() == [(9,)]
    assert list((path / "_conquiet" / "staging").iterdir()) == []


def test_partitions_are_replaced_as_a_whole_and_reruns_change_nothing(spark, tmp_path, format):
    path = tmp_path / "table"

    def replace(frame, **more):
        return replace_partitions(frame, path, ["day"], sort_by=["id"], format=format, **more)

    def fingerprint() -> dict[str, str]:
        return {
            str(Path(name).relative_to(path)): hashlib.sha256(Path(name).read_bytes()).hexdigest()
            for name in table_files(path)
        }

    days = rows(spark, (2, "2026-01-01", 2), (1, "2026-01-01", 1), (3, "2026-01-02", 3))
    assert replace(days)
    before = fingerprint()
    assert len(before) == 2
    assert not replace(days.repartition(3))  # the same rows in another order
    assert fingerprint() == before

    assert replace(rows(spark, (9, "2026-01-01", 9)))
    assert contents(spark, path) == [(3, "2026-01-02", 3), (9, "2026-01-01", 9)]
    assert before.items() & fingerprint().items()  # the other day is the same file

    assert replace(rows(spark), partitions=[{"day": date(2026, 1, 2)}])
    assert contents(spark, path) == [(9, "2026-01-01", 9)]
    with pytest.raises(ConfigError, match="not to be replaced"):
        replace(days, partitions=[{"day": date(2026, 1, 2)}])
    assert contents(spark, path) == [(9, "2026-01-01", 9)]

    assert replace(days)
    assert fingerprint() == before  # byte for byte, names and all


def test_a_table_can_be_rewritten_from_its_own_rows_once_per_batch(spark, tmp_path, format):
    """How a silver table keeps one row per key: the partition with the new rows, deduplicated."""
    path = tmp_path / "table"
    options = {"format": format, "sort_by": ["id"]}
    replace_partitions(rows(spark, (1, "2026-01-01", 1)), path, ["day"], **options)
    for _ in range(2):  # the second time is a replay
        both = read_table(spark, path).unionByName(
            rows(spark, (1, "2026-01-01", 1), (2, "2026-01-01", 2))
        )
        replace_partitions(
            both.dropDuplicates(["id"]), path, ["day"], query="q", batch=0, **options
        )
    assert contents(spark, path) == [(1, "2026-01-01", 1), (2, "2026-01-01", 2)]
    changed = replace_partitions(
        rows(spark, (5, "2026-01-01", 5)), path, ["day"], query="q", batch=0, **options
    )
    assert not changed
    assert len(contents(spark, path)) == 2


def test_awkward_partition_values_come_back(spark, tmp_path, format):
    path = tmp_path / "a table"
    names = ["a b", "x:y", "50%", "ü/☃", None, "k=v", "{[*]}"]
    frame = spark.createDataFrame(
        [(i, name, True) for i, name in enumerate(names)], "id long, name string, yes boolean"
    )
    options = {"format": format, "sort_by": ["id"]}
    replace_partitions(frame, path, ["name", "yes"], **options)
    found = {row.id: row.name for row in read_table(spark, path).collect()}
    assert found == dict(enumerate(names))
    if format == "delta":
        assert DeltaTable(str(path)).to_pyarrow_table().num_rows == len(names)
    newer = frame.where("name = 'x:y'").selectExpr("id + 90 AS id", "name", "yes")
    replace_partitions(newer, path, ["name", "yes"], **options)
    found = {row.id: row.name for row in read_table(spark, path).collect()}
    assert sorted(found) == [0, 2, 3, 4, 5, 6, 91]
    assert found[91] == "x:y"


def test_columns_may_be_added_but_not_change_their_type(spark, tmp_path, format):
    path = tmp_path / "table"
    options = {"query": "q", "format": format}
    append_once(spark.sql("SELECT 1L AS id"), path, batch=0, **options)
    wider = spark.sql("SELECT 2L AS id, timestamp'2026-01-01 00:00:00' AS at, map('a', 'b') AS m")
    append_once(wider, path, batch=1, **options)
    append_once(spark.sql("SELECT 3L AS id"), path, batch=2, **options)
    found = read_table(spark, path).orderBy("id").collect()
    assert [(row.id, str(row.at), row.m) for row in found] == [
        (1, "None", None),
        (2, "2026-01-01 00:00:00", {"a": "b"}),
        (3, "None", None),
    ]
    with pytest.raises(ConfigError, match="column 'id' is bigint, and string in the frame"):
        append_once(spark.sql("SELECT '4' AS id"), path, batch=3, **options)


def test_a_stream_is_written_once_though_its_last_batch_is_replayed(spark, tmp_path, format):
    rows(spark, *((n, "2026-01-01", n) for n in range(10))).write.parquet(str(tmp_path / "in"))
    path = tmp_path / "table"

    def run() -> None:
        stream = spark.readStream.schema("id long, day date, n long").parquet(str(tmp_path / "in"))
        query = write_table(
            stream,
            path,
            format=format,
            partition_by=["day"],
            checkpoint=tmp_path / "checkpoint",
            trigger={"availableNow": True},
        )
        assert query is not None
        assert query.awaitTermination(100)

    run()
    for lost in (tmp_path / "checkpoint" / "commits").iterdir():
        lost.unlink()  # as if the driver had died just before
    run()
    assert [row[0] for row in contents(spark, path)] == list(range(10))


def test_a_frame_is_appended_and_an_empty_one_makes_an_empty_table(spark, tmp_path, format):
    path = tmp_path / "table"
    write_table(rows(spark), path, format=format)
    assert contents(spark, path) == []
    for _ in range(2):
        write_table(rows(spark, (1, "2026-01-01", 1)), path, format=format)
    assert contents(spark, path) == [(1, "2026-01-01", 1)] * 2


def test_what_cannot_be_is_told(spark, tmp_path, format):
    frame = rows(spark, (1, "2026-01-01", 1))
    path = tmp_path / "table"
    with pytest.raises(ConfigError, match="choose 'delta' or 'parquet'"):
        write_table(frame, path, format="iceberg")
    with pytest.raises(ConfigError, match="a shared disk"):
        write_table(frame, "s3://bucket/table", format=format)
    with pytest.raises(ConfigError, match="no such column; it has id, day, n"):
        write_table(frame, path, format=format, partition_by=["month"])
    with pytest.raises(ConfigError, match="double makes no folders"):
        write_table(frame.selectExpr("id", "2e0 AS x"), path, format=format, partition_by=["x"])
    with pytest.raises(ConfigError, match="is no table"):
        read_table(spark, path)
    write_table(frame, path, format=format, partition_by=["day"])
    other = next(one for one in FORMATS if one != format)
    with pytest.raises(ConfigError, match=f"of the format {format}, not {other}"):
        write_table(frame, path, format=other, partition_by=["day"])
    with pytest.raises(ConfigError, match="is partitioned by"):
        write_table(frame, path, format=format)
    with pytest.raises(ConfigError, match="query and batch together"):
        replace_partitions(frame, path, ["day"], format=format, query="q")
    with pytest.raises(ConfigError, match="needs partition_by"):
        replace_partitions(frame, path, [], format=format)


def test_leftovers_of_a_killed_driver_are_swept_and_never_seen(spark, tmp_path, format):
    path = tmp_path / "table"
    options = {"query": "q", "format": format}
    append_once(spark.sql("SELECT 1L AS id"), path, batch=0, **options)
    before = set((path / "_conquiet" / "staging").iterdir())
    append_once(spark.sql("SELECT 2L AS id"), path, batch=1, **options)
    left = path / "_conquiet" / "staging" / f"{_mark('q')}-dead"
    left.mkdir()
    (left / "part-0.parquet").write_bytes(b"half")
    append_once(spark.sql("SELECT 3L AS id"), path, batch=2, **options)
    assert set((path / "_conquiet" / "staging").iterdir()) == before == set()
    assert sorted(row.id for row in read_table(spark, path).collect()) == [1, 2, 3]


def _mark(query: str) -> str:
    return hashlib.blake2b(query.encode(), digest_size=8).hexdigest()
