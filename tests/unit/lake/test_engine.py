"""The engine without Spark: what is taken, judged, folded, replayed and retried."""

from __future__ import annotations

import json
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from tests import zygote
from tests.unit.lake.payments import (
    CATALOG,
    START,
    Captured,
    PaymentState,
    entries,
    entry,
    pipeline,
)

from conquiet import App
from conquiet.errors import ConfigError
from conquiet.lake import ExpectationFailed, Pipeline, facts, journal, silver
from conquiet.lake.definition import FactFailed
from conquiet.lake.pipeline import Driver
from conquiet.lake.report import Chart, report
from conquiet.lake.tables import Files
from conquiet.lake.tasks import Here
from conquiet.testing import eventually


class Counted(msgspec.Struct):
    payment_id: str
    events: int


@pytest.fixture
def lake(tmp_path: Path) -> Pipeline:
    pipeline.lake = str(tmp_path / "lake")
    return pipeline


def contents(lake: Pipeline, leave_out: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Return every table as sorted rows, to compare lakes."""
    found = {}
    for name in lake.names:
        if name in ("redeliveries", *leave_out):
            continue
        rows = lake.read(name)
        columns = [one for one in rows.column_names if one not in ("ingest_date",)]
        if name not in ("events", "events_quarantine", "expectations"):
            columns = [one for one in columns if one not in ("delivery_count", "first_seen_at")]
        found[name] = sorted(map(str, rows.select(sorted(columns)).to_pylist()))
    return found


def test_rows_of_a_fact_and_its_mart(lake):
    tables = lake.local(entries())
    assert len(tables["payment"]) == 40
    by_id = {row["payment_id"]: row for row in tables["payment"]}
    assert by_id["p4"]["cents"] == 904  # corrected
    assert by_id["p5"]["cents"] == 1005
    assert by_id["p5"]["day"] == date(2026, 3, 1)  # 03:00 UTC is the evening before in Chicago
    assert sum(row["cents"] for row in tables["shop_daily"]) == sum(
        row["cents"] for row in tables["payment"]
    )
    assert sum(row["payments"] for row in tables["shop_daily"]) == 40
    refused = {row["reason"] for row in tables["events_quarantine"]}
    assert refused == {"captures_something"}


def test_typed_tables_have_the_fields_of_all_versions(lake):
    rows = lake.local(entries())["payment_authorized"]
    assert {(row["version"], row["currency"]) for row in rows} == {(1, None), (2, "USD")}
    assert rows[0].keys() >= {"event_id", "occurred_at", "moment", "payment_id", "shop", "cents"}


@pytest.mark.parametrize("count", [2, 5, pytest.param(30, marks=pytest.mark.slow)])
def test_any_division_into_batches_gives_the_same_tables(lake, tmp_path, count):
    log = entries()
    lake.run(as_table(log))
    whole = contents(lake)
    lake.lake = str(tmp_path / "parts")
    for start in range(0, len(log), -(-len(log) // count)):
        lake.run(as_table(log[start : start + -(-len(log) // count)]))
    assert contents(lake) == whole


def test_refresh_takes_several_batches_at_once(lake, tmp_path):
    log = entries()
    lake.run(as_table(log))
    whole = contents(lake)
    lake.lake = str(tmp_path / "parts")
    for start in range(0, len(log), 20):
        lake.take(log[start : start + 20])
    assert lake.refresh() == -(-len(log) // 20)
    assert lake.refresh() == 0
    assert contents(lake) == whole


def test_batches_in_any_order_give_the_same_facts(lake, tmp_path):
    log = entries()
    lake.run(as_table(log))
    whole = lake.read("payment").sort_by("payment_id").to_pylist()
    lake.lake = str(tmp_path / "reversed")
    for one in (log[60:], log[30:60], log[:30]):
        lake.run(as_table(one))
    assert lake.read("payment").sort_by("payment_id").to_pylist() == whole


def as_table(log) -> pa.Table:
    from conquiet.lake.pipeline import as_table

    return as_table(log)


def test_redeliveries_are_counted_and_change_nothing(lake):
    log = entries(10)
    lake.run(as_table(log))
    before = {row["event_id"]: row["delivery_count"] for row in lake.read("events").to_pylist()}
    rows = lake.read("payment").sort_by("payment_id").to_pylist()
    lake.run(as_table(log))
    lake.run(as_table(log[:5]))
    after = {row["event_id"]: row["delivery_count"] for row in lake.read("events").to_pylist()}
    first_five = [one["event_id"] for one in log[:5]]
    for event_id, count in before.items():
        assert after[event_id] == 2 * count + first_five.count(event_id)
    assert lake.read("payment").sort_by("payment_id").to_pylist() == rows
    assert len(lake.read("raw_events")) == 2 * len(log) + 5


REFUSED = [
    ("malformed_entry", {"_malformed": "no id"}),
    ("malformed_entry", {"event_id": None}),
    ("malformed_entry", {"type": ""}),
    ("broken_json", {"data": b'{"version": 1'}),
    ("broken_json", {"data": b"[]"}),
    ("broken_json", {"data": b'{"version": 1} {}'}),
    ("broken_json", {"data": None}),
    ("bad_envelope", {"version": 0}),
    ("bad_envelope", {"version": "1"}),
    ("bad_envelope", {"version": 2**70}),
    ("bad_envelope", {"eventId": "other"}),
    ("bad_envelope", {"occurredAt": "yesterday"}),
    ("bad_envelope", {"occurredAt": "2026-01-01T00:00:00"}),
    ("bad_envelope", {"occurredAt": "1969-12-31T23:59:59Z"}),
    ("bad_envelope", {"occurredAt": "9999-01-01T00:00:00Z"}),
    ("unknown_type", {"type": "payment_forgotten"}),
    ("unknown_version", {"version": 7}),
    ("null_data", {"payload": None}),
    ("invalid_data", {"payload": 5}),
    ("invalid_data", {"payload": {"payment_id": "p", "captured_at": "2026-01-01T00:00:00Z"}}),
    ("invalid_data", {"payload": {"payment_id": "p", "captured_at": "soon", "cents": 1}}),
    (
        "invalid_data",
        {"payload": {"payment_id": "p", "captured_at": "1812-01-01T00:00:00Z", "cents": 1}},
    ),
    (
        "invalid_data",
        {"payload": {"payment_id": "p", "captured_at": "2026-01-01T00:00:00Z", "cents": 2**64}},
    ),
    (
        "captures_something",
        {"payload": {"payment_id": "p", "captured_at": "2026-01-01T00:00:00Z", "cents": -1}},
    ),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED)
def test_what_is_refused_has_the_first_reason(lake, reason, change):
    data = {"payment_id": "p", "captured_at": "2026-01-01T00:00:00Z", "cents": 1}
    one = entry("payment_captured", data, hour=0, number=1)
    if "payload" in change or change.keys() & {"version", "eventId", "occurredAt"}:
        envelope = json.loads(one["data"])
        envelope |= {("data" if key == "payload" else key): it for key, it in change.items()}
        one["data"] = json.dumps(envelope).encode()
    else:
        one |= change
    tables = lake.local([one])
    assert tables["events"] == []
    [row] = tables["events_quarantine"]
    assert row["reason"] == reason
    assert row["data"] == one["data"]


def test_nul_becomes_a_replacement_character_in_columns_and_stays_in_the_payload(lake):
    data = {"payment_id": "p1", "shop": "a\0b\\u0000", "cents": 1}
    tables = lake.local([entry("payment_authorized", data, hour=0, number=1)])
    assert tables["payment_authorized"][0]["shop"] == "a�b\\u0000"
    assert tables["payment"][0]["shop"] == "a�b\\u0000"
    assert "\\u0000" in tables["events"][0]["payload"]


def test_rules_are_counted_by_day_also_over_rows(lake):
    lake.run(as_table(entries(16)))
    counted = {}
    for row in lake.read("expectations").to_pylist():
        name = row["rule"]
        checked, failed = counted.get(name, (0, 0))
        counted[name] = (checked + row["checked"], failed + row["failed"])
    assert counted == {"captures_something": (18, 2), "not_free": (16, 0)}


class Paid(msgspec.Struct):
    payment_id: str
    shop: str
    day: date
    cents: int


def test_a_row_that_breaks_a_rule_waits_in_quarantine_for_its_correction(tmp_path):
    made = Pipeline(CATALOG, lake=tmp_path / "lake", name="rows")

    made.table(key=("payment_id", "shop"), partition_by="day")(Paid)

    @made.expect("not_negative", on_fail="quarantine")
    def not_negative(row: Paid) -> bool:
        return row.cents >= 0

    @made.expect("not_large", on_fail="count")
    def not_large(row: Paid) -> bool:
        return row.cents < 100

    @made.fact(key="payment_id", events=["payment_corrected"])
    class PaidState(msgspec.Struct):
        key: str = ""
        last: tuple[datetime, int] = (datetime.min.replace(tzinfo=UTC), 0)

        def apply(self, event):
            self.last = max(self.last, (event.moment, event.data.cents))

        def rows(self):
            yield Paid(self.key, "north", date(2026, 3, 1), self.last[1])

    made.mart("total", of=Paid, by=("day",), sums=("cents",), counts={"payments": None})

    def corrected(payment: str, cents: int, number: int) -> dict:
        data = {"payment_id": payment, "cents": cents}
        return entry("payment_corrected", data, hour=number, number=number)

    def counted() -> dict[str, tuple[int, int]]:
        rows = made.read("expectations").to_pylist()
        assert all(row["day"] == date(2026, 3, 1) for row in rows)
        return {row["rule"]: (row["checked"], row["failed"]) for row in rows}

    made.run(as_table([corrected("p1", 5, 1), corrected("p2", -7, 2)]))
    assert made.read("paid")["payment_id"].to_pylist() == ["p1"]
    [refused] = made.read("rows_quarantine").to_pylist()
    assert (refused["table_name"], refused["rule"]) == ("paid", "not_negative")
    assert json.loads(refused["row_key"]) == ["p2", "north"]
    assert json.loads(refused["row"])["cents"] == -7
    assert counted() == {"not_negative": (2, 1), "not_large": (1, 0)}
    assert made.read("total").to_pylist() == [{"day": date(2026, 3, 1), "cents": 5, "payments": 1}]
    made.run(as_table([corrected("p2", 200, 3), corrected("p1", -1, 4)]))  # one each way
    assert made.read("paid")["payment_id"].to_pylist() == ["p2"]
    assert [
        json.loads(row)["cents"] for row in made.read("rows_quarantine")["row"].to_pylist()
    ] == [-1]
    assert counted() == {"not_negative": (2, 1), "not_large": (1, 1)}
    assert made.read("total")["cents"].to_pylist() == [200]
    made.replay()
    assert counted() == {"not_negative": (2, 1), "not_large": (1, 1)}
    assert made.read("rows_quarantine").num_rows == made.read("paid").num_rows == 1


class PlaceOrder(msgspec.Struct):
    id: str
    cents: int


class OrderPlaced(msgspec.Struct):
    id: str
    cents: int


class PlacedRow(msgspec.Struct):
    id: str
    cents: int
    at: datetime


def events_of_an_app(folder: Path, count: int) -> list[dict]:
    """Return what a handler wrote to its outbox, as entries of a log."""
    app = App("shop", database=f"sqlite:///{folder}/shop.db")

    @app.on
    def place(order: PlaceOrder) -> OrderPlaced:
        return OrderPlaced(order.id, order.cents)

    with app.test() as client:
        for number in range(count):
            client.send(PlaceOrder(f"o{number}", number * 10))
        messages = list(client.outbox)
    return [
        {
            "stream": "shop",
            "entry_id": f"{number}-0",
            "entry_time": START,
            "event_id": one.id,
            "type": one.attributes["type"],
            "time": datetime.fromisoformat(one.attributes["time"]),
            "data": msgspec.json.encode(one.data),
        }
        for number, one in enumerate(messages, 1)
    ]


def test_events_of_handlers_need_no_envelope(tmp_path):
    log = events_of_an_app(tmp_path, 3)
    made = Pipeline(lake=tmp_path / "lake", name="shop")
    made.event("order.placed", OrderPlaced, envelope=False)
    made.table(key="id")(PlacedRow)

    @made.fact(key="id", events=["order.placed"])
    class State(msgspec.Struct):
        key: str = ""
        said: tuple[datetime, int] | None = None

        def apply(self, event):
            self.said = min(
                self.said or (event.moment, event.data.cents), (event.moment, event.data.cents)
            )

        def rows(self):
            yield PlacedRow(self.key, self.said[1], self.said[0])

    made.mart("total", of=PlacedRow, by=("at",), sums=("cents",))
    bad = {"null_data": b"null", "broken_json": b"{", "invalid_data": b'{"id": 4}'}
    wrong = [{**log[0], "event_id": reason, "data": data} for reason, data in bad.items()]
    wrong.append({**log[0], "event_id": "malformed_entry", "time": None, "entry_time": None})
    made.run(as_table([*log, *wrong]))
    made.run(as_table(log))  # redelivered
    assert made.read("order_placed")["cents"].to_pylist() == [0, 10, 20]
    assert sorted(made.read("placed_row")["cents"].to_pylist()) == [0, 10, 20]
    assert sorted(made.read("placed_row")["at"].to_pylist()) == [one["time"] for one in log]
    assert sum(made.read("total")["cents"].to_pylist()) == 30
    refused = made.read("events_quarantine").to_pylist()
    assert {row["event_id"] for row in refused} == {*bad, "malformed_entry"}
    assert all(row["reason"] == row["event_id"] for row in refused)
    assert made.quarantine.retry() == 0
    before = contents(made)
    made.replay()
    assert contents(made) == before
    with pytest.raises(ConfigError, match=r"order\.placed has one version alone"):
        made.event("order.placed", OrderPlaced, version=2)
    with pytest.raises(ConfigError, match="has the name of another table"):
        made.event("order_placed", OrderPlaced)


@pytest.mark.parametrize("name", ["events", "outbox.delivery", "mine", "com.shop.Paid", "../paid"])
def test_an_event_type_names_a_table_of_its_own(tmp_path, name):
    made = Pipeline(lake=tmp_path / "lake")
    made.table(key="payment_id", name="mine")(Counted)
    with pytest.raises(ConfigError, match=r"has the name of another table|names are in snake_case"):
        made.event(name, Captured)
    if name not in ("com.shop.Paid", "../paid"):
        plain = Pipeline(lake=tmp_path / "lake", typed=False)
        plain.event(name, Captured)
        assert name in plain.definition.types


def test_a_rule_over_a_class_that_cannot_be_found_is_refused(tmp_path):
    made = Pipeline(CATALOG, lake=tmp_path / "lake")

    def positive(row: Nowhere) -> bool:  # noqa: F821 - as a class within a function
        return row.cents > 0

    with pytest.raises(ConfigError, match="rule positive: name 'Nowhere' is not defined; define"):
        made.expect("positive", on_fail="count")(positive)


def test_row_classes_of_one_name_in_two_tables(tmp_path):
    made = Pipeline(CATALOG, lake=tmp_path / "lake")

    def row_class(table: str) -> type:
        @made.table(key="payment_id", name=table)
        class Row(msgspec.Struct):
            payment_id: str

        return Row

    both = [row_class("ones"), row_class("others")]

    @made.fact(key="payment_id")
    class State(msgspec.Struct):
        key: str = ""

        def apply(self, event):
            pass

        def rows(self):
            return [one(self.key) for one in both]

    tables = made.local(entries(3))
    assert len(tables["ones"]) == len(tables["others"]) == 3


def test_a_kill_while_a_record_is_written_leaves_nothing_behind(tmp_path):
    """The rest of a record is replaced by the next one of its name."""
    write = (
        "import os\n"
        "from conquiet.lake.tables import Files\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), 9)\n"
        f"Files({str(tmp_path)!r}).put('_pipeline/refresh.json', b'half')"
    )
    assert zygote.run([sys.executable, "-c", write], check=False).returncode == -9
    files = Files(str(tmp_path))
    assert files.get("_pipeline/refresh.json") is None
    files.put("_pipeline/refresh.json", b"whole")
    assert files.list("_pipeline") == ["refresh.json"]


def test_a_rule_that_stops_leaves_silver_as_it_was(tmp_path):
    strict = Pipeline(CATALOG, lake=tmp_path / "lake", name="strict")

    @strict.expect("never_zero", on_fail="stop")
    def never_zero(data: Captured) -> bool:
        return data.cents > 0

    log = entries(3)
    with pytest.raises(ExpectationFailed, match="never_zero"):
        strict.run(as_table(log))
    assert len(strict.read("events")) == 0


def test_a_fact_that_raises_is_named_with_its_event(tmp_path):
    bad = Pipeline(CATALOG, lake=tmp_path / "lake", name="bad")

    @bad.fact(key="payment_id")
    class Broken(msgspec.Struct):
        def apply(self, event):
            raise KeyError("oops")

        def rows(self):
            return []

    with pytest.raises(FactFailed, match=r"fact broken.*oops.*payment_authorized version 1"):
        bad.run(as_table(entries(1)))


@pytest.mark.parametrize(
    ("key", "rows", "said"),
    [
        ("payment_id", [("p", 1), ("p", 2)], "gave two rows with one key of their table"),
        ("payment_id", [("p", "one")], "table counted: a row's events: Could not convert 'one'"),
        (lambda event: event.data.nothing, [], "its key raised AttributeError.* on the event"),
    ],
)
def test_a_fact_that_gives_what_no_table_can_hold_is_named(tmp_path, key, rows, said):
    bad = Pipeline(CATALOG, lake=tmp_path / "lake", name="bad")
    bad.table(key="payment_id")(Counted)

    @bad.fact(key=key)
    class Given(msgspec.Struct):
        applied: bool = False

        def apply(self, event):
            self.applied = True

        def rows(self):
            return [Counted(*row) for row in rows if self.applied]

    with pytest.raises(FactFailed, match=said):
        bad.run(as_table(entries(1)))


def test_keys_of_a_function_may_be_of_any_plain_type(tmp_path):
    made = Pipeline(CATALOG, lake=tmp_path / "lake", name="keys")
    made.table(key="payment_id")(Counted)

    @made.fact(key=lambda event: [UUID(int=1), event.version, "text"])
    class Seen(msgspec.Struct):
        key: str = ""

        def apply(self, event):
            pass

        def rows(self):
            yield Counted(self.key, 1)

    made.run(as_table(entries(1)))
    found = made.read("counted")["payment_id"].to_pylist()
    assert sorted(found) == [str(UUID(int=1)), "1", "text"]


def test_a_name_that_is_misspelt_is_refused_where_it_is_declared(tmp_path):
    made = Pipeline(CATALOG, lake=tmp_path / "lake")
    made.table(key="payment_id")(Counted)
    with pytest.raises(ConfigError, match="mart daily: Counted has no field day, evnts"):
        made.mart("daily", of=Counted, by=("day",), sums=("evnts",))
    with pytest.raises(ConfigError, match="its key 'paymnt_id' is no field of any event that is"):
        made.fact(key="paymnt_id")(PaymentState)
    both = ("payment_captured", "payment_corrected")
    with pytest.raises(ConfigError, match="'captured_at' is no field of payment_corrected"):
        made.fact(key="captured_at", events=both)(PaymentState)
    made.query(
        "worst", sql="SELECT nothing FROM counted", group="payment_id", key="payment_id",
        touched="SELECT payment_id FROM changed_counted",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"the SQL of the table worst: Binder Error: .*nothing"):
        made.run(as_table(entries(1)))


def test_quarantine_comes_back_after_a_fix(tmp_path):
    def version(known: int) -> Pipeline:
        made = Pipeline(None, lake=tmp_path / "lake", name="late")
        for number in range(1, known + 1):
            made.event("payment_captured", Captured, version=number)
        return made

    data = {"payment_id": "p", "captured_at": "2026-01-01T00:00:00Z", "cents": 1}
    log = [
        entry("payment_captured", data, hour=hour, number=hour, version=1 + hour % 2)
        for hour in range(1, 11)
    ]
    old, new = version(1), version(2)
    old.run(as_table(log))
    assert [row["reason"] for row in old.quarantine.list()] == ["unknown_version"] * 5
    assert len(old.quarantine.list("unknown_version", limit=2)) == 2
    assert old.quarantine.retry() == 0
    assert new.quarantine.retry("null_data") == 0
    assert new.quarantine.retry("unknown_version") == 5
    assert new.quarantine.list() == []
    assert len(new.read("events")) == 10
    assert new.read("recon_completeness")["complete"].to_pylist() == [True] * 10
    new.run(as_table(log[:1]))  # a redelivery of what came back
    assert new.read("events").num_rows == 10
    assert sum(new.read("events")["delivery_count"].to_pylist()) == 11


def test_a_replay_holds_the_rows_of_one_file_and_says_how_far_it_is(lake, monkeypatch):
    log = entries(20)
    size = -(-len(log) // 4)
    for start in range(0, len(log), size):
        lake.take(log[start : start + size])
    lake.refresh()
    before = contents(lake)
    rows, steps = [], []
    write = facts.write_changes

    def count(files, table, changed):
        rows.append(len(changed))
        return write(files, table, changed)

    monkeypatch.setattr(facts, "write_changes", count)
    monkeypatch.setattr(silver, "_PARTS_PER_CORE", 3)
    lake.replay(on_progress=lambda progress: steps.append(progress.step))
    assert contents(lake) == before
    assert 0 < max(rows) <= size
    assert [one for one in steps if one.endswith("files judged")] == [
        "3 of 4 files judged",
        "4 of 4 files judged",
    ]
    assert steps[-1] == "applied"


@pytest.mark.parametrize("bounds", [(None, None), (date(2026, 3, 2), date(2026, 3, 4))])
def test_replay_after_a_fix_gives_what_a_new_lake_would(tmp_path, bounds):
    def made(folder: str, least: int) -> Pipeline:
        one = Pipeline(CATALOG, lake=tmp_path / folder, name="payments")

        @one.expect("enough")
        def enough(data: Captured) -> bool:
            return data.cents >= least

        @one.table(key="payment_id")
        class Money(msgspec.Struct):
            payment_id: str
            cents: int

        @one.fact(key="payment_id")
        class State(msgspec.Struct):
            key: str = ""
            most: int = 0

            def apply(self, event):
                self.most = max(self.most, event.data.cents)

            def rows(self):
                yield Money(self.key, self.most)

        one.mart("total", of="SELECT 1 AS one, cents FROM money", by=("one",), sums=("cents",))
        return one

    log = [one for one in entries(16) if one["type"] == "payment_captured"]
    once = made("lake", 1010)
    half = len(log) // 2
    once.run(as_table(log[:half]))
    once.run(as_table(log[half:]))
    fixed = made("lake", 1)
    before = fixed.read("events").num_rows
    assert fixed.replay(*bounds) > 0
    assert fixed.read("events").num_rows > before
    if bounds == (None, None):
        fresh = made("fresh", 1)
        fresh.run(as_table(log))
        assert contents(fixed) == contents(fresh)
    days = fixed.read("events")["created_at"].to_pylist()
    assert len(days) == len(set(fixed.read("events")["event_id"].to_pylist()))
    total = sum(fixed.read("money")["cents"].to_pylist())
    assert fixed.read("total")["cents"].to_pylist() == [total]


def test_a_fold_in_many_tasks_gives_the_same_tables(lake, tmp_path, monkeypatch):
    log = entries(20)
    lake.run(as_table(log))
    whole = contents(lake)
    lake.lake = str(tmp_path / "many")
    monkeypatch.setattr(facts, "_ROWS_PER_TASK", 5)
    lake.run(as_table(log))
    assert contents(lake) == whole
    assert len(list((tmp_path / "many" / "_pipeline" / "states").iterdir())) > 4


def test_one_hot_day_is_divided_among_all_cores(lake, monkeypatch):
    """Tasks are made of keys and not of days, and have about the same number of events."""
    loads = []

    class Four(Here):
        cores = 4

        def map(self, function, items):
            done = super().map(function, items)
            if function is facts.fold:
                loads.extend(one.states.rows for one in done)
            return done

    log = [
        entry("payment_corrected", {"payment_id": f"p{number}", "cents": 5}, hour=1, number=number)
        for number in range(800)
    ]
    monkeypatch.setattr("conquiet.lake.pipeline._FEW_ROWS", 0)
    with Driver(lake, Four()) as driver:
        driver.take(as_table(log), "test", 0)
        driver.refresh()
    assert len(loads) == 8
    assert max(loads) < 1.2 * sum(loads) / len(loads)


@pytest.mark.slow
def test_states_stay_in_few_levels(lake):
    log = entries(12)
    with lake.driver() as driver:
        for number, one in enumerate(log):
            driver.take(as_table([one]), "test", number)
            driver.refresh()
        assert len(driver.journal.refresh.levels) < 10
        kept = driver.files.list("_pipeline/states")
        named = {one.file for level in driver.journal.refresh.levels for one in level}
        assert set(kept) == named
        assert driver.files.list("_pipeline/feed") == []
        assert len(driver.journal.batches) == 1


def test_optimize_puts_small_files_together(lake):
    log = entries()
    for start in range(0, len(log), 10):
        lake.take(log[start : start + 10])
    lake.refresh()
    before = contents(lake)
    assert len(lake.open_store().files("events")) > 5
    removed = lake.optimize(hours=0)
    assert len(lake.open_store().files("events")) == 1
    assert removed["events"] > 5
    assert contents(lake) == before
    lake.run(as_table(log))  # all of it again
    assert lake.read("payment").num_rows == 40


@pytest.mark.slow
def test_optimize_puts_small_files_of_facts_and_marts_together(lake):
    log = entries(24)
    for start in range(0, len(log), 6):
        lake.run(as_table(log[start : start + 6]))
    before = contents(lake)
    made = ("payment", "shop_daily", "recon_completeness", "outbox_delivery")
    files = {name: len(lake.open_store().files(name)) for name in made}
    lake.optimize(hours=0)
    store = lake.open_store()
    days = {row["day"] for row in lake.read("payment").to_pylist()}
    assert len(days) > 1
    assert {name: len(store.files(name)) for name in made} == {
        **dict.fromkeys(made, 1),
        "payment": len(days),  # a file holds one day
    }
    assert files["payment"] > len(days)
    assert files["shop_daily"] > 1
    assert {low == high for _, low, high in store.ranges("payment", "day")} == {True}
    assert contents(lake) == before
    versions = {name: store.version(name, "payments/optimize") for name in made}
    lake.optimize(hours=0)  # nothing left to do
    store = lake.open_store()
    assert {name: store.version(name, "payments/optimize") for name in made} == versions
    lake.run(as_table([one for one in entries(30) if one not in log]))
    assert lake.read("payment").num_rows == 30


def test_optimize_between_a_batch_and_its_refresh(lake):
    log = entries(12)
    for start in range(0, len(log), 6):
        lake.take(log[start : start + 6])
    lake.optimize(hours=0)  # files of the batches are put together and removed
    assert lake.read("payment").num_rows == 12
    assert all(lake.read("recon_completeness")["complete"].to_pylist())


def test_optimize_removes_what_killed_tasks_have_left(lake):
    lake.take(entries(4))
    left = ("states/part-1.arrow", "feed/part-2.arrow", "changes/payment/part-3.parquet")
    files = Files(lake.lake)
    for name in left:
        files.put(f"_pipeline/{name}", b"half of a file")
    lake.optimize()
    assert files.list("_pipeline/feed") == files.list("_pipeline/changes/payment") == []
    assert "part-1.arrow" not in files.list("_pipeline/states")
    lake.run(as_table(entries(8)))
    assert lake.read("payment").num_rows == 8


def test_one_driver_per_lake(lake):
    with lake.driver(), pytest.raises(ConfigError, match="in use by process"):
        lake.refresh()


def test_a_lease_is_renewed_until_it_is_released(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_RENEW_SECONDS", 0.01)
    files = Files(str(tmp_path / "lake"))
    lease, other = journal.Lease(files), journal.Lease(files)
    lease.acquire()
    until = lease._until
    eventually(lambda: lease._until > until, message="a renewal")
    with pytest.raises(ConfigError, match="in use by another driver"):
        other.acquire()
    lease.release()
    other.acquire()
    other.release()
    assert lease.renew() is None


def test_without_event_types_there_is_bronze_alone(tmp_path):
    bare = Pipeline(lake=tmp_path / "lake")
    bare.run(as_table(entries(3)))
    assert bare.names == ["raw_events"]
    assert len(bare.read("raw_events")) == len(entries(3))
    bare.mart("streams", of="raw_events", by=("stream",), counts={"entries": None})
    before = bare.open_store().version("raw_events")
    assert bare.refresh() == bare.refresh() == 0  # marts need event types
    assert bare.open_store().version("raw_events") == before


def test_types_bound_to_streams_are_refused_elsewhere(tmp_path):
    class Seen(msgspec.Struct):
        payment_id: str

    made = Pipeline(CATALOG, lake=tmp_path / "lake")
    made.event("seen", Seen, streams="telemetry*")
    one = entry("seen", {"payment_id": "p"}, hour=0, number=1)
    other = entry("seen", {"payment_id": "p"}, hour=0, number=2)
    mixed = entry(
        "payment_authorized", {"payment_id": "p", "shop": "s", "cents": 1}, hour=0, number=3
    )
    tables = made.local(
        [{**one, "stream": "telemetry:{0}"}, other, {**mixed, "stream": "telemetry"}]
    )
    assert [row["event_id"] for row in tables["seen"]] == [one["event_id"]]
    assert tables["events"] == []
    assert {row["reason"] for row in tables["events_quarantine"]} == {"unknown_type"}
    again = made.local([{**one, "stream": "telemetry"}], [{**one, "stream": "telemetry"}])
    assert len(again["seen"]) == 1
    assert again["redeliveries"][0]["entries"] == 1


def test_a_late_redelivery_shows_the_earliest_time(lake):
    one = entry(
        "payment_authorized", {"payment_id": "p", "shop": "s", "cents": 1}, hour=5, number=1
    )
    early = {**one, "entry_time": one["entry_time"] - timedelta(hours=1), "entry_id": "5-0"}
    tables = lake.local([one], [early])
    assert tables["events"][0]["first_seen_at"] == early["entry_time"].astimezone(UTC)
    assert tables["events"][0]["delivery_count"] == 2
    assert isinstance(tables["events"][0]["occurred_at"], datetime)


def test_ids_of_other_days_leave_the_memory_and_are_found_again(lake, monkeypatch):
    monkeypatch.setattr(silver, "_MOST_IDS", 3)
    days = [[entry("payment_corrected", {"payment_id": "p", "cents": n}, hour=24 * day, number=n)
             for n in range(day * 10, day * 10 + 2)] for day in range(4)]  # fmt: skip
    with lake.driver() as driver:
        for number, log in enumerate([*days, *days]):
            driver.take(as_table(log), "rows", number)
            assert len(driver.known._days) <= 2
    assert lake.read("events").num_rows == 8
    assert set(lake.read("events")["delivery_count"].to_pylist()) == {2}


def test_a_batch_of_a_day_between_the_days_of_a_file(lake):
    """A file that may have events of the day has none: the batch is all new."""
    paid = {"payment_id": "p1", "shop": "a", "cents": 1}
    hours = {1: 0, 2: 96, 3: 48}
    made = {n: entry("payment_authorized", paid, hour=at, number=n) for n, at in hours.items()}
    lake.take([made[1], made[2]])
    lake.take([made[3]])  # a driver of its own, which knows no day yet
    assert len(lake.read("events")) == 3


def test_reconciliation_reads_no_file_of_other_days(lake):
    """Files of days that a batch does not touch may be unreadable but for their statistics."""
    paid = {"payment_id": "p1", "shop": "a", "cents": 1}
    old, new = (
        entry("payment_authorized", paid, hour=hour, number=number)
        for number, hour in enumerate((0, 96), 1)
    )
    lake.take([old])
    lake.refresh()
    for table in ("raw_events", "events"):
        [file] = Path(lake.lake, table).glob("*.parquet")
        whole = file.read_bytes()
        footer = int.from_bytes(whole[-8:-4], "little") + 8
        file.write_bytes(b"PAR1" + bytes(len(whole) - footer - 4) + whole[-footer:])
    lake.take([new])
    lake.refresh()
    hours = {
        row["hour"]: row["silver_count"] for row in lake.read("recon_completeness").to_pylist()
    }
    assert hours == {START: 1, START + timedelta(hours=96): 1}
    with pytest.raises(Exception, match="Invalid data"):
        lake.reconcile(all=True)  # it counts all hours again


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT day, nothing FROM payment", "the chart 'Mine': Binder Error: .*nothing"),
        ("SELECT day, shop FROM payment", "the chart 'Mine': its SQL gives a day or a name, then"),
        ("SELECT day FROM payment", r"then a number; not \(datetime"),
    ],
)
def test_a_chart_that_cannot_be_drawn_is_named(lake, sql, said):
    lake.run(as_table(entries(1)))
    with lake.database() as database, pytest.raises(ConfigError, match=said):
        report(database, "page", [Chart("Mine", sql)])


def test_the_report_takes_the_age_of_imported_events_for_no_lag(lake):
    paid = {"payment_id": "p1", "shop": "a", "cents": 1}
    title = "Lag from outbox to log"
    lake.take([entry("payment_authorized", paid, hour=0, number=1, delivered=24 * 200)])
    lake.refresh()
    with lake.database() as database:
        assert title not in report(database, "payments")
    lake.take([entry("payment_authorized", paid, hour=48, number=2, delivered=2)])
    lake.refresh()
    with lake.database() as database:
        page = report(database, "payments")
    assert title in page
    assert "2026-03-03: 7,201" in page
    assert "2026-03-01: 17" not in page


def amended(folder: Path, **parts: bool) -> Pipeline:
    """Return a pipeline of captured payments, as it is declared after a change."""
    made = Pipeline(CATALOG, lake=folder, name="amended")

    @made.table(key="payment_id")
    class Money(msgspec.Struct):
        payment_id: str
        cents: int

    @made.fact(
        key="payment_id", events=["payment_captured"], name="x" if parts.get("fact") else "m"
    )
    class State(msgspec.Struct):
        key: str = ""
        most: int | str = 0

        def apply(self, event):
            self.most = max(self.most, event.data.cents)

        def rows(self):
            yield Money(self.key, self.most)

    if parts.get("mart"):
        made.mart("total", of="SELECT 1 AS one, cents FROM money", by=("one",), sums=("cents",))
        made.query(
            "top",
            sql="SELECT 1 AS one, max(cents) AS cents FROM money WHERE 1 IN (FROM touched)",
            touched="SELECT 1 FROM changed_money",
            group="one",
            key="one",
        )
    return made


def test_marts_and_queries_that_are_added_later_have_all_rows(tmp_path):
    log = [one for one in entries(16) if one["type"] == "payment_captured"]
    amended(tmp_path).run(as_table(log[:10]))
    later = amended(tmp_path, mart=True)
    later.run(as_table(log[10:]))
    cents = later.read("money")["cents"].to_pylist()
    assert later.read("total")["cents"].to_pylist() == [sum(cents)]
    assert later.read("top")["cents"].to_pylist() == [max(cents)]


def test_a_fact_that_is_added_later_asks_for_a_replay(tmp_path):
    log = [one for one in entries(16) if one["type"] == "payment_captured"]
    amended(tmp_path).run(as_table(log[:10]))
    later = amended(tmp_path, fact=True)
    with pytest.raises(ConfigError, match=r"before x was declared: replay"):
        later.run(as_table(log[10:]))
    later.replay()
    assert len(later.read("money")) == 16


def test_a_stream_of_spark_connect_is_refused(lake):
    pytest.importorskip("pyspark")
    frame = SimpleNamespace(isStreaming=True, sparkSession=None)
    with pytest.raises(ConfigError, match="no stream through Spark Connect"):
        lake.run(frame)
