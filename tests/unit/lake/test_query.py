"""Marts and queries: after any changes, every table is what a computation from scratch gives."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from conquiet.errors import ConfigError
from conquiet.lake.query import Query, TableRefresh, forget_changes, mart
from conquiet.lake.tables import CHANGE, Files, Store

SCHEMA = pa.schema(
    [("id", pa.int64()), ("day", pa.int64()), ("buyer", pa.string()), ("cents", pa.int64())]
)
QUERIES = [
    mart(
        "daily",
        of="sale",
        by=("day",),
        sums=("cents",),
        counts={"sales": None, "large": "cents > 50"},
    ),
    Query(
        "best",
        key="buyer",
        group="buyer",
        touched="SELECT buyer FROM changed_sale",
        sql="SELECT buyer, max(cents) AS cents, min(day) AS first_day FROM sale"
        " WHERE buyer IN (FROM touched) GROUP BY buyer",
    ),
    mart("best_daily", of="best", by=("first_day",), sums=("cents",), counts={"buyers": None}),
]
SCRATCH = {
    "daily": "SELECT day, sum(cents)::BIGINT, count(*), count(*) FILTER (cents > 50) FROM sale"
    " GROUP BY day",
    "best": "SELECT buyer, max(cents), min(day) FROM sale GROUP BY buyer",
    "best_daily": "SELECT first_day, sum(cents)::BIGINT, count(*) FROM (SELECT max(cents) AS cents,"
    " min(day) AS first_day FROM sale GROUP BY buyer) GROUP BY first_day",
}
COLUMNS = {
    "daily": "day, cents, sales, large",
    "best": "buyer, cents, first_day",
    "best_daily": "first_day, cents, buyers",
}


class Lake:
    """One table of rows by id, which a test changes, and what is made of it."""

    def __init__(self, root: Path) -> None:
        self.files = Files(str(root))
        self.store = Store(self.files, "test")
        self.rows: dict[int, tuple] = {}
        self.version = 0

    def change(self, new: dict[int, tuple | None]) -> None:
        self.version += 1
        signed = [(id_, *self.rows[id_], -1) for id_ in new if id_ in self.rows]
        signed += [(id_, *row, 1) for id_, row in new.items() if row is not None]
        self.rows = {id_: row for id_, row in {**self.rows, **new}.items() if row is not None}
        schema = SCHEMA.append(pa.field(CHANGE, pa.int8()))
        changes = table(signed, schema)
        self.store.merge(
            "sale", changes, self.version, key=("id",), partition_by=None, schema=SCHEMA
        )
        written = self.files.write("_pipeline/changes/base", changes)
        self.changes = {"sale": [self.files.uri("_pipeline/changes/base", written.name)]}

    def refresh(self, stop_after: int = 99) -> None:
        names = ["sale", *SCRATCH]
        with TableRefresh(self.store, self.changes, self.version, names) as refresh:
            for number, _ in enumerate(refresh.apply(QUERIES), 1):
                if number == stop_after:
                    return

    def wrong(self) -> list[str]:
        import duckdb

        found = []
        with duckdb.connect() as connection:
            connection.register(
                "sale", table([(id_, *row) for id_, row in self.rows.items()], SCHEMA)
            )
            for name, sql in SCRATCH.items():
                connection.register("found", self.store.read(name))
                right = sorted(connection.execute(sql).fetchall())
                if (
                    sorted(connection.execute(f"SELECT {COLUMNS[name]} FROM found").fetchall())
                    != right
                ):
                    found.append(name)
        return found


def table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.table(
        [pa.array(one, of.type) for one, of in zip(columns, schema, strict=True)], schema=schema
    )


def some_changes(random: random.Random) -> dict[int, tuple | None]:
    return {
        random.randrange(60): None
        if random.random() < 0.2
        else (random.randrange(5), f"b{random.randrange(8)}", random.randrange(100))
        for _ in range(random.randrange(1, 25))
    }


@pytest.mark.parametrize("seed", range(3))
def test_tables_follow_changes_of_rows_old_and_new(tmp_path: Path, seed: int) -> None:
    dice, lake = random.Random(seed), Lake(tmp_path)
    for _ in range(6):
        lake.change(some_changes(dice))
        lake.refresh()
        forget_changes(lake.files)
        assert lake.wrong() == []


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_an_interrupted_refresh_goes_on_with_the_changes_it_kept(
    tmp_path: Path, stop_after: int
) -> None:
    dice, lake = random.Random(5), Lake(tmp_path)
    for _ in range(4):
        lake.change(some_changes(dice))
        lake.refresh(stop_after)
        lake.store = Store(lake.files, "test")  # a process of its own
        lake.refresh()
        lake.refresh()  # changes nothing
        assert lake.wrong() == []
        forget_changes(lake.files)


def test_rows_that_stay_the_same_leave_the_files_alone(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.change({1: (1, "b1", 10), 2: (2, "b2", 20)})
    lake.refresh()
    before = {name: lake.store.files(name) for name in SCRATCH}
    lake.change({1: (1, "b1", 10)})
    lake.refresh()
    assert {name: lake.store.files(name) for name in SCRATCH} == before


def test_a_mart_names_what_it_adds_up() -> None:
    with pytest.raises(ConfigError, match="mart daily: name the columns to add up"):
        mart("daily", of="sale", by=["day"])
    with pytest.raises(ConfigError, match="SQL counts by itself"):
        mart("daily", of="SELECT day FROM sale", by=["day"], counts={"sales": None})
