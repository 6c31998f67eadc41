"""Facts of a few orders by hand: what each function says of a small frame."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from tests.spark.marketplace.entries import START
from tests.spark.marketplace.history import History, Order
from tests.spark.marketplace.tables import rows_of

from marketplace.pipeline import marts
from marketplace.pipeline.facts import fact_order, fact_order_line, order_lives
from marketplace.pipeline.recon import (
    hourly_counts,
    lost_ids,
    recon_completeness,
    recon_money,
)
from marketplace.pipeline.silver import events
from marketplace.pipeline.weekly import admin_weekly

pytestmark = pytest.mark.slow

FIRST = date(2026, 3, 7)


@pytest.fixture(scope="module")
def told(spark):
    """What is said of five orders, their facts, and the orders as they were told."""
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
    silver = history.silver(spark)
    lives = order_lives(events(silver)).persist()
    orders, lines = fact_order(lives), fact_order_line(lives)
    yield lives, orders, lines, [paid, partial, canceled, rejected, orphan]
    for kept in (silver, lives):
        kept.unpersist()


def test_an_order_is_a_row_that_its_events_fill_in_whatever_order(told) -> None:
    _, orders, _, known = told
    rows = {row["order_number"]: row for row in rows_of(orders)}
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
    _, _, lines, known = told
    rows = {row["line_item_id"]: row for row in rows_of(lines)}
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
    _, orders, lines, _ = told
    names = ("orders", "lost_orders", "units", "revenue_orders", "revenue_cents", "paid_cents")
    days = {
        row["business_day"]: tuple(row[name] for name in names)
        for row in rows_of(marts.store_daily(orders, lines))
    }
    assert days == {
        FIRST: (3, 2, 3, 0, 0, 0),
        date(2026, 3, 8): (1, 0, 1, 0, 0, 0),
        date(2026, 3, 9): (0, 0, 0, 2, 2100, 0),
        date(2026, 3, 11): (0, 0, 0, 0, 0, 1600),
    }
    [category] = {row["category"] for row in rows_of(marts.category_daily(lines))}
    assert category == "vegetables"
    products = rows_of(marts.product_daily(lines))
    assert sum(row["revenue_cents"] for row in products) == 2000
    assert sum(row["created_cents"] for row in rows_of(marts.zip_daily(orders))) == 4 * 1600


def test_a_buyer_is_new_once(told) -> None:
    _, orders, _, known = told
    buyers = marts.buyer_first_purchase(orders)
    [buyer] = rows_of(buyers)  # the others bought nothing that lasted
    assert buyer["first_order_id"] == known[0].keys["order_id"]
    assert (buyer["purchases"], buyer["first_day"]) == (2, FIRST)
    weeks = {row["week"]: row for row in rows_of(admin_weekly(orders, buyers))}
    first, second = weeks[date(2026, 3, 2)], weeks[date(2026, 3, 9)]
    assert (first["orders"], first["lost_orders"], first["gmv_cents"]) == (4, 2, 2200)
    assert (first["buyers"], first["new_buyers"], first["returning_buyers"]) == (1, 1, 0)
    day = 24 * 3600 * 1000
    assert (first["decide_p50_ms"], first["decide_p95_ms"]) == (day, day)
    assert (first["payout_p50_ms"], second["payout_p50_ms"]) == (2 * day, None)
    assert (second["orders"], second["revenue_cents"]) == (0, 2100)


def test_money_that_contradicts_itself_is_named_with_its_events(told) -> None:
    lives, _, _, known = told
    rows = rows_of(recon_money(lives))
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


def test_an_order_that_was_closed_has_been_collected_and_paid_out_in_its_currency(spark) -> None:
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
    rows = rows_of(recon_money(order_lives(events(history.silver(spark)))))
    assert {(row["order_id"], row["problem"]) for row in rows} == {
        (forgotten.keys["order_id"], "closed_without_collection"),
        (unpaid.keys["order_id"], "closed_without_payout"),
        (abroad.keys["order_id"], "currencies_differ"),
    }


def test_an_event_that_is_lost_on_the_way_is_named(spark, told) -> None:
    from tests.spark.marketplace.entries import entry, envelope, frame, order, uuid

    log = [entry(number, "order_created", envelope(number, order())) for number in (1, 2, 3)]
    raw = frame(spark, [*log, log[0]])
    kept = History()
    kept.entries = [log[0], log[1]]
    silver = kept.silver(spark)
    counts = hourly_counts(raw, silver, None)
    [row] = rows_of(counts)
    assert (row["log_count"], row["entry_count"], row["silver_count"]) == (3, 4, 2)
    assert row["agrees"] is False
    hours = [int(row["hour"].timestamp())]
    [row] = rows_of(recon_completeness(counts, lost_ids(raw, silver, hours)))
    assert (row["lost_ids"], row["complete"]) == ([uuid(3)], False)
    kept.entries = log
    counts = hourly_counts(raw, kept.silver(spark), None)
    [row] = rows_of(recon_completeness(counts))
    assert (row["lost_ids"], row["complete"]) == ([], True)
    outbox = frame(spark, [log[0], log[1], entry(4, "order_created", envelope(4, order()))])
    [row] = rows_of(recon_completeness(hourly_counts(raw, kept.silver(spark), outbox)))
    assert (row["missing_ids"], row["foreign_ids"]) == ([uuid(4)], [uuid(3)])
    assert (row["outbox_count"], row["complete"]) == (3, False)
