"""Footers of Parquet files: the same whatever order a writer listed the encodings in."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from conquiet.errors import StoreError
from conquiet.spark.tables.footer import _Walk, with_sorted_encodings

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {
        "id": number,
        "text": f"käse {number % 3}",
        "at": datetime(2026, 3, 1, tzinfo=UTC),
        "share": number / 7,
        "is_even": number % 2 == 0,
        "ids": [f"{number}-{place}" for place in range(number % 4)],
        "inner": {"name": None, "data": b"\xff" * number},
    }
    for number in range(40)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Nested columns, more of them than a short list of Thrift holds, and several row groups."""
    rows = [{**row, **{f"more{place}": place for place in range(20)}} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=15)
    return tmp_path / "a.parquet"


def listed(file: Path) -> list[tuple[str, ...]]:
    about = pq.read_metadata(file)
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    return [group.column(n).encodings for group in groups for n in range(group.num_columns)]


def in_reverse(file: Path) -> None:
    """As another JVM might have written it."""
    content = bytearray(file.read_bytes())
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for place, end in list(_Walk(content[start:-8]).encodings()):
        content[start + place : start + end] = content[start + place : start + end][::-1]
    file.write_bytes(content)


def test_the_order_of_encodings_is_the_only_thing_that_changes(file: Path) -> None:
    rows, before = pq.read_table(file), listed(file)
    with_sorted_encodings(file)
    content = file.read_bytes()
    in_reverse(file)
    assert file.read_bytes() != content
    assert listed(file) == [one[::-1] for one in listed_sorted(before)]
    with_sorted_encodings(file)
    assert file.read_bytes() == content
    assert pq.read_table(file) == rows


def listed_sorted(encodings: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    numbers = {"PLAIN": 0, "RLE": 3, "RLE_DICTIONARY": 8}  # of parquet.thrift
    return [tuple(sorted(one, key=numbers.__getitem__)) for one in encodings]


@pytest.mark.parametrize("length", [0, 7, 100])
def test_what_is_no_whole_file_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(StoreError, match=r"a\.parquet is no whole Parquet file"):
        with_sorted_encodings(file)
