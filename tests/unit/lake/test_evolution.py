"""Events and rows change: a field, a version, a type; in a lake that has the old ones."""

from __future__ import annotations

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
