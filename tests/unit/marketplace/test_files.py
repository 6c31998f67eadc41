"""Files of the log: the columns of every source, the same rows whatever the size of a file."""

from __future__ import annotations

import base64
import json

import pytest
from tests.unit.marketplace.parsed import world

from conquiet.errors import ConfigError
from conquiet.spark.columns import ARROW_SCHEMA
from marketplace.generator import DOMAIN_TOPIC, write_jsonlines, write_parquet

parquet = pytest.importorskip("pyarrow.parquet")


def read(directory):
    return parquet.read_table(directory).to_pylist()


def test_parquet_has_the_columns_of_the_log(tmp_path):
    entries = world("all")
    assert write_parquet(entries, tmp_path / "log") == len(entries)
    assert parquet.read_table(tmp_path / "log").schema.equals(ARROW_SCHEMA)
    for row, entry in zip(read(tmp_path / "log"), entries, strict=True):
        assert (row["event_id"], row["data"]) == (entry.event_id, entry.data)
        assert row["entry_id"].partition("-")[0] == str(entry.ms)
        assert row["entry_time"].timestamp() * 1000 == pytest.approx(entry.ms)
        assert row["time"].isoformat()[:19] == entry.time[:19]
        assert row["key"] == row["subject"] == entry.aggregate_id
        attributes = dict(row["attributes"])
        assert attributes.pop("specversion") == "1.0"
        assert attributes.pop("aggregatetype", "") == entry.aggregate_type
        assert not attributes


def test_the_size_of_files_changes_nothing(tmp_path):
    write_parquet(world(), tmp_path / "one")
    write_parquet(iter(world()), tmp_path / "many", rows_per_file=100)
    assert len(list((tmp_path / "many").iterdir())) > 5
    assert read(tmp_path / "many") == read(tmp_path / "one")


def test_a_directory_with_another_log_in_it_is_refused(tmp_path):
    write_parquet(world()[:5], tmp_path)
    with pytest.raises(ConfigError, match="write into a new directory"):
        write_parquet(world()[:2], tmp_path)
    assert len(read(tmp_path)) == 5


def test_ids_are_unique_and_rise_within_each_stream(tmp_path):
    write_parquet(world("all"), tmp_path, partitions=3)
    last = {}
    for row in read(tmp_path):
        this = tuple(map(int, row["entry_id"].split("-")))
        assert last.get(row["stream"], (0, 0)) < this
        last[row["stream"]] = this
    assert len([name for name in last if name.startswith(DOMAIN_TOPIC)]) == 3


def test_lines_of_json_hold_the_same(tmp_path):
    entries = world("all")
    assert write_jsonlines(entries, tmp_path / "log.jsonl") == len(entries)
    write_parquet(entries, tmp_path / "log")
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    for line, row in zip(lines, read(tmp_path / "log"), strict=True):
        found = json.loads(line)
        assert base64.b64decode(found["data"]) == row["data"]
        assert found["attributes"] == dict(row["attributes"])
        assert (found["stream"], found["entry_id"]) == (row["stream"], row["entry_id"])
