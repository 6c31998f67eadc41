"""The oracle agrees with a second opinion that has nothing but the log, and with the contract."""

from __future__ import annotations

import re
from datetime import date, datetime
from pathlib import Path

import pytest
from tests.unit.marketplace.second_opinion import Opinion

from conquiet.errors import ConfigError
from marketplace.generator import Generator
from marketplace.oracle import TABLES, Oracle
from marketplace.oracle.calendar import business_day, nearest_rank

CONTRACT = Path(__file__).resolve().parents[3] / "docs" / "marketplace.md"
WORLDS = {
    "faultless": Generator(seed=1, orders=120),
    "all faults": Generator(seed=2, orders=400, faults="all"),
    "cut in autumn": Generator(
        seed=3, orders=400, faults="all", cut=True, days=6, first_day=date(2026, 10, 30)
    ),
}


@pytest.fixture(scope="module", params=WORLDS)
def answers(request):
    oracle = Oracle()
    return oracle, Opinion(WORLDS[request.param].entries(oracle))


@pytest.mark.parametrize("name", TABLES)
def test_a_reader_of_the_log_alone_comes_to_the_same_rows(name, answers):
    oracle, opinion = answers
    assert oracle.differences(name, opinion.rows(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102, 103])
@pytest.mark.parametrize("first_day", [date(2026, 2, 25), date(2026, 10, 20)])
def test_a_reader_of_a_longer_log_comes_to_the_same_rows(seed, first_day):
    oracle = Oracle()
    world = Generator(seed=seed, orders=2_500, faults="all", first_day=first_day, days=15)
    opinion = Opinion(world.entries(oracle))
    for name in TABLES:
        assert oracle.differences(name, opinion.rows(name)) == []


def test_every_row_of_a_table_has_a_key_of_its_own(answers):
    oracle, _ = answers
    for name, table in TABLES.items():
        keys = [tuple(row[column] for column in table.key) for row in oracle.rows(name)]
        assert len(set(keys)) == len(keys), name


def test_every_problem_and_every_reason_of_the_faults_occurs():
    oracle = Oracle()
    for _ in Generator(seed=1, orders=700, faults="all").batches(oracle):
        pass
    problems = {row["problem"] for row in oracle.rows("recon_money")}
    assert problems == {
        *("no_order_created", "collected_not_final", "collections_differ"),
        *("paid_without_collection", "paid_not_collected", "closed_without_payout"),
    }
    reasons = {row["reason"] for row in oracle.rows("events_quarantine")}
    assert reasons == {
        *("broken_json", "unknown_type", "unknown_version", "null_data"),
        *("invalid_data", "wrong_amounts"),
    }
    assert any("\ufffd" in row["title"] for row in oracle.rows("fact_order_line"))
    won = {row["won"] for row in oracle.rows("fact_attribution")}
    assert won == {True, False}
    assert {row["scope"] for row in oracle.rows("fact_attribution")} == {"store", "line"}
    assert any(row["orphan_clicks"] for row in oracle.rows("ad_daily"))


def test_without_faults_nothing_is_refused_and_all_money_fits():
    oracle = Oracle()
    for _ in Generator(seed=4, orders=200).batches(oracle):
        pass
    assert oracle.rows("events_quarantine") == []
    assert oracle.rows("recon_money") == []
    assert all(row["complete"] for row in oracle.rows("recon_completeness"))
    for order in oracle.rows("fact_order"):
        assert order["created_cents"] >= order["final_cents"] >= order["collected_cents"]
        assert order["collected_cents"] == order["paid_cents"]


def test_without_an_outbox_its_columns_are_null():
    oracle = Oracle(outbox=False)
    for _ in Generator(seed=4, orders=50, faults="all").batches(oracle):
        pass
    assert {row["outbox_count"] for row in oracle.rows("recon_completeness")} == {None}
    assert {row["failed_attempts"] for row in oracle.rows("outbox_delivery")} == {None}
    assert all(row["complete"] for row in oracle.rows("recon_completeness"))


def test_large_tables_can_live_in_files(tmp_path):
    generator = Generator(seed=6, orders=60, faults="all")
    kept, spilled = Oracle(), Oracle(spill=tmp_path)
    for oracle in (kept, spilled):
        for _ in generator.batches(oracle):
            pass
    for name in TABLES:
        assert spilled.rows(name) == kept.rows(name)
        assert spilled.count(name) == kept.arrow(name).num_rows


def test_rows_of_another_run_are_not_taken_for_those_of_this_one(tmp_path):
    first = Oracle(spill=tmp_path)
    for _ in Generator(orders=2).batches(first):
        pass
    first.arrow("events")
    with pytest.raises(ConfigError, match="spill into a new directory"):
        Oracle(spill=tmp_path)


def test_every_kind_of_difference_is_named():
    oracle = Oracle()
    for _ in Generator(orders=5).batches(oracle):
        pass
    rows = oracle.rows("fact_order")
    assert oracle.differences("fact_order", rows) == []
    missing, twice, other, strange = rows[0], rows[1], rows[2] | {"state": "lost"}, dict(rows[3])
    strange["order_id"] = "nobody's"
    said = oracle.differences("fact_order", [twice, twice, other, strange, *rows[3:]])
    assert said == [
        f"fact_order order_id={missing['order_id']}: missing",
        f"fact_order order_id={twice['order_id']}: there more than once",
        f"fact_order order_id={other['order_id']}: state is 'lost', should be 'closed'",
        "fact_order order_id=nobody's: too many",
    ]


def test_an_oracle_is_for_one_run_and_for_known_tables():
    oracle, generator = Oracle(), Generator(orders=2)
    for _ in generator.batches(oracle):
        pass
    with pytest.raises(ConfigError, match="there are events"):
        oracle.rows("fact_orders")
    oracle.rows("events")
    with pytest.raises(ConfigError, match="make a new one"):
        list(generator.batches(oracle))


def test_the_contract_names_every_table_and_column():
    text = CONTRACT.read_text()
    for name, table in TABLES.items():
        assert f"`{name}`" in text
        for column in table.columns:
            stage = re.sub(r"^(decide|dispatch|deliver|collect|payout)_", "<stage>_", column)
            assert column in text or stage in text, f"{name}.{column}"


@pytest.mark.parametrize(
    ("moment", "day"),
    [
        ("2026-03-08T05:59:59.999Z", date(2026, 3, 7)),
        ("2026-03-08T06:00:00Z", date(2026, 3, 8)),
        ("2026-03-09T04:59:59.999Z", date(2026, 3, 8)),  # 23 hours later
        ("2026-03-09T05:00:00Z", date(2026, 3, 9)),
        ("2026-11-01T05:00:00Z", date(2026, 11, 1)),
        ("2026-11-02T05:59:59.999Z", date(2026, 11, 1)),  # 25 hours later
        ("2026-11-02T06:00:00Z", date(2026, 11, 2)),
    ],
)
def test_business_days_are_those_of_chicago(moment, day):
    assert business_day(int(datetime.fromisoformat(moment).timestamp() * 1000)) == day


def test_percentiles_are_values_that_occurred():
    values = list(range(1, 101))
    assert [nearest_rank(values, percent) for percent in (50, 95, 99)] == [50, 95, 99]
    assert nearest_rank([7], 50) == 7
