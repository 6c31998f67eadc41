"""Entries of megabytes: pages and batches are bounded in bytes, and too large an entry is a row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType
from tests.spark.log.conftest import Query

from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.log import fetch, ranges, streams
from conquiet.spark.log.connection import ask, client_of
from conquiet.spark.log.decoder import Decoder
from conquiet.spark.log.options import MAX_BYTES_PER_BATCH, ReadOptions
from conquiet.spark.log.source import LogReader

MEGABYTE = 1 << 20
JOB = Path(__file__).with_name("large_entries_job.py")


def add(log, stream, *sizes, first=0):
    """Events with data of these sizes; their numbers follow each other."""
    for number, size in enumerate(sizes, first):
        fields = {"id": str(number), "type": "sold", "source": "/shop", "specversion": "1.0"}
        log.client.xadd(stream, fields | {"data": b"x" * size})


def rows_of(log, **options):
    """All rows that a stream reader gives, batch by batch."""
    query = Query(log, **options)
    end = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
    tasks = query.reader.partitions(query.offset, end)
    return [batch for task in tasks for batch in query.reader.read(task)]


def column(batches, name):
    return [value for batch in batches for value in batch[name].to_pylist()]


@pytest.fixture
def received(monkeypatch):
    """How many bytes each reply had that was received whole."""
    sizes = []
    receive = fetch.Line.receive

    def recording(line, max_bytes):
        content = receive(line, max_bytes)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(fetch.Line, "receive", recording)
    return sizes


@pytest.mark.parametrize("entries", [40, 100], ids=["a small range", "a large range"])
def test_entries_of_megabytes_come_in_bounded_replies_and_batches(
    plain_log, received, entries
) -> None:
    add(plain_log, "orders", *[4 * MEGABYTE] * entries)
    batches = rows_of(plain_log)
    assert column(batches, "event_id") == [str(number) for number in range(entries)]
    assert {len(data) for data in column(batches, "data")} == {4 * MEGABYTE}
    assert max(received) <= MAX_BYTES_PER_BATCH
    assert max(batch.nbytes for batch in batches) <= MAX_BYTES_PER_BATCH


def test_large_entries_among_small_ones_keep_their_order(plain_log, received) -> None:
    sizes = [100] * 3000 + [2 * MEGABYTE] * 30 + [100] * 3000 + [MEGABYTE, 100] * 20
    add(plain_log, "orders", *sizes)
    batches = rows_of(plain_log, maxBytesPerBatch=8 * MEGABYTE)
    assert column(batches, "event_id") == [str(number) for number in range(len(sizes))]
    assert [len(data) for data in column(batches, "data")] == sizes
    assert max(received) <= 8 * MEGABYTE
    assert not any(column(batches, "_malformed"))


@pytest.mark.parametrize("place", ["first", "middle", "last", "only"])
@pytest.mark.parametrize("small", [5, 300], ids=["a small range", "a large range"])
def test_an_entry_larger_than_a_batch_is_a_row_without_its_data(plain_log, place, small) -> None:
    huge = 3 * MEGABYTE
    sizes = {
        "first": [huge, *[100] * small],
        "middle": [*[100] * small, huge, *[100] * small],
        "last": [*[100] * small, huge],
        "only": [huge],
    }[place]
    add(plain_log, "orders", *sizes)
    at = sizes.index(huge)
    ids = [entry_id.decode() for entry_id, _ in plain_log.client.xrange("orders")]
    batches = rows_of(plain_log, maxBytesPerBatch=MEGABYTE)
    assert column(batches, "entry_id") == ids
    reasons = column(batches, "_malformed")
    assert [number for number, reason in enumerate(reasons) if reason] == [at]
    assert reasons[at].startswith("it has 31458")
    assert "maxBytesPerBatch=1048576" in reasons[at]
    data = column(batches, "data")
    assert data[at] is None
    assert [len(item) for item in data if item is not None] == [
        size for size in sizes if size < huge
    ]


def test_too_large_an_entry_keeps_its_place_with_a_schema_and_with_types(plain_log) -> None:
    add(plain_log, "orders", 100, 3 * MEGABYTE, 100)
    options = {"maxBytesPerBatch": MEGABYTE, "types": "sold"}
    assert [bool(reason) for reason in column(rows_of(plain_log, **options), "_malformed")] == [
        False, True, False,
    ]  # fmt: skip
    given = plain_log._all(options | {"schema": "n INT"})
    data = StructField("data", StructType([StructField("n", IntegerType())]))
    plain = from_arrow_schema(ARROW_SCHEMA)
    fields = [data if field.name == "data" else field for field in plain]
    schema = StructType([*fields, StructField("_raw", BinaryType())])
    reader = LogReader(ReadOptions.of(given, streaming=False), schema)
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    assert [reason[:15] for reason in column(batches, "_malformed")] == [
        "its data does n", "it has 3145870 ", "its data does n",
    ]  # fmt: skip
    assert [raw and len(raw) for raw in column(batches, "_raw")] == [100, None, 100]


def test_entries_of_many_small_streams_are_bounded_together(plain_log, received) -> None:
    for number in range(50):
        add(plain_log, f"shop:{number}", MEGABYTE, first=number)
    batches = rows_of(plain_log, streams="shop:*", maxBytesPerBatch=4 * MEGABYTE)
    assert sorted(map(int, column(batches, "event_id"))) == list(range(50))
    assert max(received) <= 4 * MEGABYTE
    assert max(batch.nbytes for batch in batches) <= 6 * MEGABYTE


def test_rows_that_are_decoded_one_by_one_are_cut_by_their_bytes() -> None:
    decoder = Decoder(from_arrow_schema(ARROW_SCHEMA), (), max_bytes=10_000)
    entries = [(f"{n}-0".encode(), [b"data", b'{"n": "%s"}' % (b"x" * 4_000)]) for n in range(1, 9)]
    batches = list(decoder.decode([("orders", entries)]))
    assert [batch.num_rows for batch in batches] == [3, 3, 2]


def test_counting_reads_few_large_entries_at_a_time(plain_log, monkeypatch) -> None:
    """Where scripts are not allowed, entries are sent to be counted."""
    monkeypatch.setattr(ranges, "_WALK", b"no script")
    add(plain_log, "orders", *[MEGABYTE] * 30)
    counts = []

    def recording(wire, commands):
        counts.extend(command[-1] for _, command in commands if command[0] == b"XRANGE")
        return ask(wire, commands)

    monkeypatch.setattr(ranges, "ask", recording)
    query = Query(plain_log, maxOffsetsPerTrigger=20)
    assert len(query.batch()) == 20
    assert len(query.batch()) == 10
    assert max(counts) == ranges._FIRST_STEP
    assert counts.count(1) > 10


@pytest.mark.parametrize("scripts", [True, False], ids=["by a script", "by reading"])
@pytest.mark.parametrize("size", [10, 30_000])
def test_an_index_has_a_mark_at_the_end_of_each_page(plain_log, monkeypatch, scripts, size) -> None:
    monkeypatch.setattr(ranges, "PAGE", 20)
    monkeypatch.setattr(ranges, "_STEP_BYTES", 100_000)
    if not scripts:
        monkeypatch.setattr(ranges, "_WALK", b"no script")
    add(plain_log, "orders", *[size] * 110)
    ids = [entry_id.decode() for entry_id, _ in plain_log.client.xrange("orders")]
    given = ReadOptions.of(plain_log._all({}), streaming=True)
    wire = streams.Wire(client_of(given.address))
    [index] = ranges.index_ranges(wire, [(ranges.EntryRange("orders", "0-0", ids[-1]), 105)])
    assert index.marks == [(n, ids[n - 1]) for n in (20, 40, 60, 80, 100, 105)]


def test_states_of_streams_with_large_entries_are_asked_for_a_few_at_a_time(
    plain_log, monkeypatch
) -> None:
    """XINFO sends the first and the last entry of each."""
    monkeypatch.setattr(streams, "_FIRST_AT_ONCE", 2)
    monkeypatch.setattr(streams, "_REPLY_BYTES", 5 * MEGABYTE)
    for number in range(8):
        add(plain_log, f"shop:{number}", MEGABYTE)
    asked = []

    def recording(wire, commands):
        asked.append(len(commands))
        return ask(wire, commands)

    monkeypatch.setattr(streams, "ask", recording)
    query = Query(plain_log, streams="shop:*")
    query.reader.planner.newest = {}
    asked.clear()
    query.reader.latestOffset(query.offset, None)
    assert asked == [2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_with_little_memory_reads_a_gigabyte_of_large_entries(plain_log, tmp_path) -> None:
    add(plain_log, "orders", *[4 * MEGABYTE] * 250)
    done = subprocess.run(
        [sys.executable, JOB, plain_log.url, tmp_path],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["250", str(250 * 4 * MEGABYTE), "0", "250"]
