"""Ads by hand: a token once, the last revision of a rollup, and which ad an order is owed to."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from tests.unit.marketplace.entries import START, TELEMETRY, entry, envelope, uuid
from tests.unit.marketplace.history import History, Order

from marketplace.lake import pipeline

AD, VENDOR = uuid(501), uuid(4000)
DAY = date(2026, 3, 7)
SEEN, CLICKED, ORPHAN = uuid(601), uuid(602), uuid(603)


def touch(number: int, type: str, token: str, second: float = 0, **more: Any) -> dict[str, Any]:
    data = {"ad_id": AD, "vendor_store_id": VENDOR, "token_id": token, "placement": "top"}
    data |= {"buyer_store_id": uuid(503), "target_type": "store", "target_id": VENDOR, **more}
    at = START + timedelta(seconds=second)
    return entry(number, type, envelope(number, data, at=at), stream=TELEMETRY)


def ad_event(number: int, type: str, **data: Any) -> dict[str, Any]:
    keys = {"ad_id": AD, "vendor_store_id": VENDOR}
    return entry(number, type, envelope(number, {**keys, **data}))


def rollup(number: int, revision: int, impressions: int) -> dict[str, Any]:
    counts = {"impressions": impressions, "clicks": 1, "spend_micros": 10 * impressions}
    about = {"day": str(DAY), "timezone": "America/Chicago", "rollup_revision": revision}
    return ad_event(number, "ad_daily_rollup_ready", **counts, **about)


PAUSED = {"from_status": "active", "changed_at": "2026-03-07T12:00:00Z", "cause": "budget\0spent"}
ENTRIES = [
    touch(1, "ad_impression", SEEN, second=9),
    touch(2, "ad_impression", SEEN, second=4),  # the first of the token, published later
    touch(3, "ad_click", CLICKED, second=12, impression_token_id=SEEN),
    touch(4, "ad_click", ORPHAN, second=13, impression_token_id=uuid(604)),
    ad_event(5, "ad_paused", **PAUSED),
    rollup(6, revision=2, impressions=7),
    rollup(7, revision=1, impressions=99),  # older, though it came later
]


@pytest.fixture(
    scope="module",
    params=["one batch", pytest.param("a batch per entry", marks=pytest.mark.slow)],
)
def tables(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    entries = [*ENTRIES, ENTRIES[0]]
    if request.param == "one batch":
        return pipeline.local(entries)
    return pipeline.local(*([one] for one in entries))


def test_a_token_is_one_touch_of_its_first_event(tables) -> None:
    touches = {row["token_id"]: row for row in tables["ad_touches"]}
    assert touches.keys() == {SEEN, CLICKED, ORPHAN}
    seen = touches[SEEN]
    assert (seen["kind"], seen["event_id"]) == ("impression", uuid(2))
    assert seen["occurred_at"] == START + timedelta(seconds=4)
    assert (seen["delivery_count"], seen["first_seen_at"]) == (3, START + timedelta(seconds=1))
    assert (seen["impression_token_id"], seen["business_day"]) == (None, DAY)
    assert touches[CLICKED]["impression_token_id"] == SEEN


def test_an_event_of_an_ad_has_the_status_after_it(tables) -> None:
    found = {row["event_id"]: row for row in tables["fact_ad_event"]}
    paused = found[uuid(5)]
    assert (paused["status"], paused["from_status"]) == ("paused", "active")
    assert paused["cause"] == "budget\ufffdspent"
    assert (paused["rollup_day"], paused["impressions"]) == (None, None)
    assert (found[uuid(6)]["rollup_day"], found[uuid(6)]["rollup_revision"]) == (DAY, 2)
    assert found[uuid(6)]["status"] is None


def test_a_day_of_an_ad_has_its_touches_and_the_last_rollup(tables) -> None:
    [day] = tables["ad_daily"]
    names = ("impressions", "clicks", "orphan_clicks", "rollup_impressions", "spend_micros")
    assert [day[name] for name in names] == [1, 2, 1, 7, 70]
    assert (day["business_day"], day["rollup_revision"]) == (DAY, 2)
    assert day["vendor_store_id"] == VENDOR


def test_hours_of_the_outbox_have_lags_and_no_telemetry(tables) -> None:
    [hour] = tables["outbox_delivery"]
    assert (hour["hour"], hour["events"], hour["entries"], hour["duplicates"]) == (START, 3, 3, 0)
    assert (hour["lag_p50_ms"], hour["lag_p99_ms"], hour["lag_max_ms"]) == (6000, 7000, 7000)
    assert hour["failed_attempts"] is None


# --- attribution ----------------------------------------------------------------------------------

TOUCHES = [  # token, kind, ad, target, minutes before the order
    (1, "ad_impression", 1, "shop", 1),
    (2, "ad_click", 1, "shop", 9),  # a click wins over what came later
    (3, "ad_click", 2, "shop", 9),  # as late: the larger token
    (4, "ad_impression", 3, "first line", 2),
    (5, "ad_impression", 4, "first line", 3),
    (6, "ad_click", 5, "shop", -1),  # after the order
    (7, "ad_click", 6, "elsewhere", 1),
    (8, "ad_click", 7, "shop", 1),  # not presented
]


def token(number: int) -> str:
    return uuid(700 + number)


def ad(number: int) -> str:
    return uuid(800 + number)


def test_the_best_touch_of_an_ad_and_the_best_ad_of_an_order_or_a_line() -> None:
    history = History()
    presented = [token(number) for number in (1, 1, 2, 3, 4, 5, 6, 7, 99)]
    order = Order(history, 1, attribution={"token_ids": presented})
    order.collects(1600, 1)
    targets = {
        "shop": order.keys["vendor_store_id"],
        "first line": order.lines[0]["product_id"],
        "elsewhere": uuid(999),
    }
    for number, kind, ad_number, target, minutes in TOUCHES:
        more = {"impression_token_id": uuid(605)} if kind == "ad_click" else {}
        kinds = {"target_type": "store", "target_id": targets[target], "ad_id": ad(ad_number)}
        history.entries.append(
            touch(100 + number, kind, token(number), -60 * minutes, **kinds, **more)
        )
    tables = history.tables()
    line = order.lines[0]["line_item_id"]
    found = {
        (row["scope"], row["line_item_id"], row["ad_id"]): (
            *(row["token_id"], row["candidates"], row["won"], row["revenue_cents"]),
        )
        for row in tables["fact_attribution"]
    }
    assert found == {
        ("store", None, ad(1)): (token(2), 2, False, 0),
        ("store", None, ad(2)): (token(3), 1, True, 1600),
        ("line", line, ad(3)): (token(4), 1, True, 1000),
        ("line", line, ad(4)): (token(5), 1, False, 0),
    }
    sold = {row["ad_id"]: row for row in tables["ad_daily"] if row["business_day"] > DAY}
    assert (sold[ad(2)]["attributed_orders"], sold[ad(2)]["attributed_order_cents"]) == (1, 1600)
    assert (sold[ad(3)]["attributed_lines"], sold[ad(3)]["attributed_line_cents"]) == (1, 1000)
    assert sold.keys() == {ad(2), ad(3)}
