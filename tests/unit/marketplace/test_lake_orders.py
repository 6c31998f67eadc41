"""Facts and marts of a few orders by hand."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from tests.unit.marketplace.entries import START
from tests.unit.marketplace.history import History, Order

FIRST = date(2026, 3, 7)


@pytest.fixture(scope="module")
def told():
    """The tables of five orders, and the orders."""
    history = History()
    paid = Order(history, 1)
    paid.settles(1600, 3)  # told before what came before it: revenue is the cash of day 2
    paid.collects(1600, 2)
    paid.pays_out(1600, 4)
    for step, day in {"closed": 4, "delivered": 2, "in_transit": 1.5, "accepted": 1}.items():
        paid.moves(step, day)
    partial = Order(history, 2, day=0.9, buyer_store_id=paid.keys["buyer_store_id"])
    partial.line_becomes(0, "accepted", 1)
    partial.line_becomes(0, "rejected", 1.1)  # the latest counts
    partial.line_becomes(1, "accepted", 1)
    partial.moves("partially_accepted", 1.2)
    partial.collects(500, 2)  # 600 are due
    canceled = Order(history, 3)
    canceled.collects(1600, 1)
    canceled.is_canceled(2)
    rejected = Order(history, 4)
    for place in (0, 1):
        rejected.line_becomes(place, "rejected", 1)
    rejected.moves("rejected", 1)
    orphan = Order(history, 5)
    history.entries[-1]["data"] = b"{"  # its order_created is refused
    orphan.moves("accepted", 1)
    return history.tables(), [paid, partial, canceled, rejected, orphan]


def test_an_order_is_a_row_that_its_events_fill_in_whatever_order(told) -> None:
    tables, known = told
    rows = {row["order_number"]: row for row in tables["fact_order"]}
    assert {number: row["state"] for number, row in rows.items()} == {
        1: "closed",
        2: "partially_accepted",
        3: "canceled",
        4: "rejected",
    }
    assert {number: row["final_cents"] for number, row in rows.items()} == {
        1: 1600,
        2: 600,
        3: 0,
        4: 0,
    }
    assert {number: row["revenue_cents"] for number, row in rows.items()} == {
        1: 1600,
        2: 500,
        3: 0,
        4: 0,
    }
    first = rows[1]
    assert first["order_id"] == known[0].keys["order_id"]
    assert (first["created_cents"], first["collected_cents"], first["paid_cents"]) == (1600,) * 3
    assert first["collected_at"] == START + timedelta(days=2)  # by cash, and not again by the bank
    assert (first["business_day"], first["revenue_day"]) == (FIRST, date(2026, 3, 9))
    assert rows[3]["collected_cents"] == 1600  # it was; and no revenue
    assert rows[3]["revenue_day"] is None


def test_a_line_has_its_latest_status_and_money_while_it_lives(told) -> None:
    tables, known = told
    rows = {row["line_item_id"]: row for row in tables["fact_order_line"]}
    money = [
        [
            (rows[line["line_item_id"]]["status"], rows[line["line_item_id"]]["final_cents"])
            for line in one.lines
        ]
        for one in known[:4]
    ]
    assert money == [
        [("pending", 1000), ("pending", 500)],
        [("rejected", 0), ("accepted", 500)],
        [("pending", 0), ("pending", 0)],
        [("rejected", 0), ("rejected", 0)],
    ]
    assert sum(row["revenue_cents"] for row in rows.values()) == 2000


def test_measures_stand_on_the_day_that_is_theirs(told) -> None:
    tables, _ = told
    names = ("orders", "lost_orders", "units", "revenue_orders", "revenue_cents", "paid_cents")
    days = {
        row["business_day"]: tuple(row[name] for name in names) for row in tables["store_daily"]
    }
    assert days == {
        FIRST: (3, 2, 3, 0, 0, 0),
        date(2026, 3, 8): (1, 0, 1, 0, 0, 0),
        date(2026, 3, 9): (0, 0, 0, 2, 2100, 0),
        date(2026, 3, 11): (0, 0, 0, 0, 0, 1600),
    }
    [category] = {row["category"] for row in tables["category_daily"]}
    assert category == "vegetables"
    products = tables["product_daily"]
    assert sum(row["revenue_cents"] for row in products) == 2000
    assert sum(row["created_cents"] for row in tables["zip_daily"]) == 4 * 1600


def test_a_buyer_is_new_once(told) -> None:
    tables, known = told
    [buyer] = tables["buyer_first_purchase"]  # the others bought nothing that lasted
    assert buyer["first_order_id"] == known[0].keys["order_id"]
    assert (buyer["purchases"], buyer["first_day"]) == (2, FIRST)
    weeks = {row["week"]: row for row in tables["admin_weekly"]}
    first, second = weeks[date(2026, 3, 2)], weeks[date(2026, 3, 9)]
    assert (first["orders"], first["lost_orders"], first["gmv_cents"]) == (4, 2, 2200)
    assert (first["buyers"], first["new_buyers"], first["returning_buyers"]) == (1, 1, 0)
    day = 24 * 3600 * 1000
    assert (first["decide_p50_ms"], first["decide_p95_ms"]) == (day, day)
    assert (first["payout_p50_ms"], second["payout_p50_ms"]) == (2 * day, None)
    assert (second["orders"], second["revenue_cents"]) == (0, 2100)


def test_money_that_contradicts_itself_is_named_with_its_events(told) -> None:
    tables, known = told
    rows = tables["recon_money"]
    found = {(row["order_id"], row["problem"]): row["event_ids"] for row in rows}
    _, partial, canceled, _, orphan = (one.keys["order_id"] for one in known)
    assert set(found) == {
        (partial, "collected_not_final"),
        (canceled, "collected_not_final"),
        (orphan, "no_order_created"),
    }
    assert known[1].created in found[partial, "collected_not_final"]
    assert len(found[partial, "collected_not_final"]) == 2
    assert len(found[orphan, "no_order_created"]) == 1


def test_an_order_that_was_closed_has_been_collected_and_paid_out_in_its_currency() -> None:
    history = History()
    forgotten, unpaid, abroad = (Order(history, number) for number in (1, 2, 3))
    right = Order(history, 4)
    unpaid.collects(1600, 1)
    abroad.collects(1600, 1, currency="EUR")
    abroad.pays_out(1600, 2)
    right.collects(1600, 1)
    right.pays_out(1600, 2)
    for one in (forgotten, unpaid, abroad, right):
        one.moves("closed", 3)
    rows = history.tables()["recon_money"]
    assert {(row["order_id"], row["problem"]) for row in rows} == {
        (forgotten.keys["order_id"], "closed_without_collection"),
        (unpaid.keys["order_id"], "closed_without_payout"),
        (abroad.keys["order_id"], "currencies_differ"),
    }


def test_events_of_a_type_have_typed_columns() -> None:
    history = History()
    paid = Order(history, 1)
    paid.collects(1600, 2)
    paid.collects(7, 3)
    tables = history.tables()
    [created] = tables["order_created"]
    assert created["lines"][0]["qty"] == 2
    assert created["ship_to"] == {"postal_code": "60601"}
    assert {(row["amount_cents"], row["collected_at"]) for row in tables["cash_collected"]} == {
        (1600, START + timedelta(days=2)),
        (7, START + timedelta(days=3)),
    }
