"""Events and rows change: a field, a version, a type; in a lake that has the old ones."""

from __future__ import annotations

from datetime import time, timedelta
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from deltalake import DeltaTable
from tests.unit.lake.payments import entry

from conquiet.errors import ConfigError
from conquiet.lake import Pipeline
from conquiet.lake.pipeline import as_table


class Paid(msgspec.Struct):
    payment_id: str
    cents: int


class PaidWithTip(Paid):
    tip: int | None = None


class PaidInCurrency(Paid):
    currency: str


class PaidByText(msgspec.Struct):
    payment_id: str
    cents: str


class PaidExactly(Paid):
    exact: Decimal
    took: timedelta
    at: time


class Row(msgspec.Struct):
    payment_id: str
    cents: int


class RowWithCurrency(Row):
    currency: str | None


class RowOfText(msgspec.Struct):
    payment_id: str
    cents: str


def pipeline(lake: Path, *versions: type[msgspec.Struct], row: type = Row) -> Pipeline:
    """Return a pipeline of some versions of `paid`, and a table of payments."""
    made = Pipeline(lake=lake, name="evolution")
    for number, struct in enumerate(versions, 1):
        made.event("paid", struct, version=number)
    made.table(key="payment_id", name="payment")(row)

    @made.fact(key="payment_id")
    class State(msgspec.Struct):
        key: str = ""
        cents: int = 0
        currency: str | None = None

        def apply(self, event):
            self.cents = int(event.data.cents)
            self.currency = getattr(event.data, "currency", self.currency)

        def rows(self):
            if row is RowWithCurrency:
                yield row(self.key, self.cents, self.currency)
            else:
                yield row(self.key, str(self.cents) if row is RowOfText else self.cents)

    made.mart("total", of=row, by=("payment_id",), counts={"payments": None})
    return made


def paid(number: int, version: int = 1, **more: object) -> dict:
    data = {"payment_id": f"p{number}", "cents": number, **more}
    return entry("paid", data, hour=number, number=number, version=version)


def columns(lake: Path, table: str, *names: str) -> list[tuple]:
    """Read columns of a Delta table by another reader than our own."""
    found = DeltaTable(lake / table).to_pyarrow_dataset().to_table(columns=list(names))
    return sorted(zip(*(found[name].to_pylist() for name in names), strict=True), key=str)


def test_an_optional_field_becomes_a_column_and_old_readers_take_its_events(tmp_path):
    old, new = pipeline(tmp_path, Paid), pipeline(tmp_path, PaidWithTip)
    old.run(as_table([paid(1), paid(2, tip=5)]))
    assert old.read("events_quarantine").num_rows == 0
    new.run(as_table([paid(3), paid(4, tip=7)]))
    assert columns(tmp_path, "paid", "payment_id", "tip") == [
        ("p1", None), ("p2", None), ("p3", None), ("p4", 7)
    ]  # fmt: skip
    new.replay()
    assert columns(tmp_path, "paid", "payment_id", "tip")[1] == ("p2", 5)
    assert new.read("total").num_rows == 4


@pytest.mark.parametrize("way", ["retry", "replay"])
def test_a_new_version_waits_in_quarantine_until_it_is_declared(tmp_path, way):
    old, new = pipeline(tmp_path, Paid), pipeline(tmp_path, Paid, PaidInCurrency)
    old.run(as_table([paid(1), paid(2, version=2, currency="USD")]))
    assert old.read("events_quarantine")["reason"].to_pylist() == ["unknown_version"]
    assert old.read("payment")["payment_id"].to_pylist() == ["p1"]
    new.quarantine.retry() if way == "retry" else new.replay()
    assert new.read("events_quarantine").num_rows == 0
    assert columns(tmp_path, "paid", "payment_id", "version", "currency") == [
        ("p1", 1, None), ("p2", 2, "USD")
    ]  # fmt: skip
    assert columns(tmp_path, "payment", "payment_id", "cents") == [("p1", 1), ("p2", 2)]
    assert all(new.read("recon_completeness")["complete"].to_pylist())


def test_a_new_column_of_rows_is_filled_by_a_replay(tmp_path):
    versions = (Paid, PaidInCurrency)
    log = [paid(1), paid(2, version=2, currency="USD")]
    pipeline(tmp_path, *versions).run(as_table(log))
    new = pipeline(tmp_path, *versions, row=RowWithCurrency)
    new.run(as_table([paid(3, version=2, currency="EUR")]))
    assert columns(tmp_path, "payment", "payment_id", "currency")[2] == ("p3", "EUR")
    new.replay()
    assert columns(tmp_path, "payment", "payment_id", "currency") == [
        ("p1", None), ("p2", "USD"), ("p3", "EUR")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "row", "said"),
    [
        ((Paid, PaidByText), Row, "table paid has cents as int64, and the pipeline as string"),
        ((Paid,), RowOfText, "table payment has cents as int64, and the pipeline as string"),
    ],
)
def test_another_type_of_a_column_is_refused_before_anything_is_written(
    tmp_path, versions, row, said
):
    pipeline(tmp_path, Paid).run(as_table([paid(1)]))
    before = columns(tmp_path, "raw_events", "event_id")
    with pytest.raises(ConfigError, match=said):
        pipeline(tmp_path, *versions, row=row).run(as_table([paid(2)]))
    assert columns(tmp_path, "raw_events", "event_id") == before
    pipeline(tmp_path, Paid).run(as_table([paid(3)]))
    assert columns(tmp_path, "payment", "payment_id", "cents") == [("p1", 1), ("p3", 3)]


def test_decimals_and_times_of_day_are_text_that_sql_can_cast(tmp_path):
    made = pipeline(tmp_path, PaidExactly)
    made.run(as_table([paid(1, exact="1.50", took="PT90S", at="12:30:00")]))
    assert columns(tmp_path, "paid", "exact", "took", "at") == [("1.50", "PT90S", "12:30:00")]
    with made.database() as database:
        database.offer("paid")
        assert (
            database.count("paid WHERE exact::DECIMAL(18, 2) = 1.5 AND \"at\"::TIME > '12:00'") == 1
        )


def with_tables(lake: Path, *, by: str = "cents", low: bool = False) -> Pipeline:
    """Return a pipeline with a query, a mart over it, and a mart over rows, defined in two ways."""
    made = pipeline(lake, Paid)
    more = ", min(payment_id) AS first_id" if low else ""
    made.query(
        "group_row", key="cents", group="cents", touched="SELECT cents FROM changed_payment",
        sql=f"SELECT cents, count(*) AS payments{more} FROM payment"
        " WHERE cents IN (FROM touched) GROUP BY cents",
    )  # fmt: skip
    made.mart("of_query", of="group_row", by=("cents",), sums=("payments",))
    counts = {"payments": None, **({"large": "cents > 1"} if low else {})}
    made.mart("of_rows", of=Row, by=(by,), sums=() if low else ("cents",), counts=counts)
    return made


def all_rows(made: Pipeline) -> dict[str, list[tuple]]:
    names = ("payment", "group_row", "of_query", "of_rows", "total")
    return {
        name: sorted(map(tuple, map(dict.items, made.read(name).to_pylist()))) for name in names
    }


def test_a_mart_or_query_that_is_defined_otherwise_is_made_again(tmp_path):
    """Also without new events, and when each of its commits is the last before a kill."""
    log = [paid(1), paid(2), paid(3)]
    expected = with_tables(tmp_path / "new", by="payment_id", low=True)
    expected.run(as_table(log))
    committed: list[str] = []

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.step.endswith("committed") and progress.step not in committed:
            committed.append(progress.step)
            raise Killed

    with_tables(tmp_path / "old").run(as_table(log))
    changed = with_tables(tmp_path / "old", by="payment_id", low=True)
    while True:
        try:
            with changed.driver(on_progress=kill) as driver:
                driver.refresh()
            break
        except Killed:
            continue
    assert {"group_row committed", "of_query committed", "of_rows committed"} < set(committed)
    assert all_rows(changed) == all_rows(expected)
    assert columns(tmp_path / "old", "of_rows", "payment_id", "large")[0] == ("p1", 0)
    files = changed.open_store().files("of_rows")
    assert changed.refresh() == 0
    assert changed.open_store().files("of_rows") == files
    changed.run(as_table([paid(4)]))
    assert changed.read("of_rows").num_rows == 4


def test_tables_and_columns_may_have_names_of_sql_and_sums_may_be_floats(tmp_path):
    class Order(msgspec.Struct):
        user: str
        group: int
        value: float

    made = Pipeline(lake=tmp_path, name="evolution")
    made.event("paid", Paid)
    made.table(key=("user", "group"), partition_by="group")(Order)

    @made.fact(key="payment_id")
    class State(msgspec.Struct):
        key: str = ""
        cents: int = 0

        def apply(self, event):
            self.cents = max(self.cents, event.data.cents)

        def rows(self):
            yield Order(self.key, 1, self.cents / 10)

    made.mart("table", of=Order, by=("group",), sums=("value",), counts={"from": None})
    made.query(
        "end", key="user", group="user", touched="SELECT \"user\" FROM changed_order",
        sql='SELECT "user", max(value) AS "desc" FROM "order" WHERE "user" IN (FROM touched)'
        " GROUP BY 1",
    )  # fmt: skip
    for cents in (1, 2, 4):
        made.run(
            as_table(
                [
                    paid(cents),
                    entry("paid", {"payment_id": "p1", "cents": cents}, hour=0, number=90 + cents),
                ]
            )
        )
    assert made.read("table").to_pylist() == [{"group": 1, "value": 1.0, "from": 3}]
    assert made.read("end").num_rows == made.read("order").num_rows == 3
