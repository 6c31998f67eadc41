"""Ads on small frames: a token once, the last revision of a rollup, clicks without impression."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from tests.spark.marketplace.entries import START, TELEMETRY, entry, envelope, frame, uuid
from tests.spark.marketplace.tables import rows_of

from marketplace.pipeline.ad_marts import ad_daily
from marketplace.pipeline.ads import ad_touches, fact_ad_event
from marketplace.pipeline.ops import outbox_delivery
from marketplace.pipeline.silver import events, silver

pytestmark = pytest.mark.slow

AD, VENDOR, SHOP = uuid(501), uuid(502), uuid(502)
DAY = date(2026, 3, 7)
KEYS = {"ad_id": AD, "vendor_store_id": VENDOR}
SEEN, CLICKED, ORPHAN = uuid(601), uuid(602), uuid(603)


def touch(number: int, type: str, token: str, second: int = 0, **more: Any) -> dict[str, Any]:
    data = {**KEYS, "token_id": token, "buyer_store_id": uuid(503), "placement": "top"}
    data |= {"target_type": "store", "target_id": SHOP, **more}
    at = START + timedelta(seconds=second)
    return entry(number, type, envelope(number, data, at=at), stream=TELEMETRY)


def ad_event(number: int, type: str, **data: Any) -> dict[str, Any]:
    return entry(number, type, envelope(number, {**KEYS, **data}))


def rollup(number: int, revision: int, impressions: int) -> dict[str, Any]:
    counts = {"impressions": impressions, "clicks": 1, "spend_micros": 10 * impressions}
    about = {"day": str(DAY), "timezone": "America/Chicago", "rollup_revision": revision}
    return ad_event(number, "ad_daily_rollup_ready", **counts, **about)


@pytest.fixture(scope="module")
def rows(spark):
    """Silver of one ad: three tokens, one of them by two events, and its life with two rollups."""
    entries = [
        touch(1, "ad_impression", SEEN, second=9),
        touch(2, "ad_impression", SEEN, second=4),  # the first of the token, told later
        touch(3, "ad_click", CLICKED, second=12, impression_token_id=SEEN),
        touch(4, "ad_click", ORPHAN, second=13, impression_token_id=uuid(604)),
        ad_event(5, "ad_paused", from_status="active", changed_at="2026-03-07T12:00:00Z",
                 cause="budget\0spent"),
        rollup(6, revision=2, impressions=7),
        rollup(7, revision=1, impressions=99),  # older, though it came later
    ]  # fmt: skip
    kept = silver(frame(spark, [*entries, entries[0]])).persist()
    yield kept
    kept.unpersist()


def test_a_token_is_one_touch_and_its_first_event_tells_it(rows) -> None:
    touches = {row["token_id"]: row for row in rows_of(ad_touches(rows))}
    assert touches.keys() == {SEEN, CLICKED, ORPHAN}
    seen = touches[SEEN]
    assert (seen["kind"], seen["event_id"]) == ("impression", uuid(2))
    assert seen["occurred_at"] == START + timedelta(seconds=4)
    assert (seen["delivery_count"], seen["first_seen_at"]) == (3, START + timedelta(seconds=1))
    assert (seen["impression_token_id"], seen["business_day"]) == (None, DAY)
    assert touches[CLICKED]["impression_token_id"] == SEEN


def test_an_event_of_an_ad_says_what_became_of_it(rows) -> None:
    found = {row["event_id"]: row for row in rows_of(fact_ad_event(events(rows)))}
    paused = found[uuid(5)]
    assert (paused["status"], paused["from_status"]) == ("paused", "active")
    assert paused["cause"] == "budget\ufffdspent"
    assert (paused["rollup_day"], paused["impressions"]) == (None, None)
    assert (found[uuid(6)]["rollup_day"], found[uuid(6)]["rollup_revision"]) == (DAY, 2)
    assert found[uuid(6)]["status"] is None


def test_a_day_of_an_ad_has_touches_the_last_rollup_and_what_it_sold(spark, rows) -> None:
    won = [
        ("store", None, 900, True, DAY),
        ("store", None, 0, False, DAY),  # another ad has it
        ("line", "sold", 300, True, DAY + timedelta(days=1)),
        ("line", "rejected", 0, True, DAY + timedelta(days=1)),
        ("line", "sold", 300, True, None),  # nothing was collected
    ]
    attribution = spark.createDataFrame(
        [(scope, line, AD, VENDOR, cents, is_won, day) for scope, line, cents, is_won, day in won],
        "scope string, line_item_id string, ad_id string, vendor_store_id string,"
        " revenue_cents bigint, won boolean, revenue_day date",
    )
    lines = spark.createDataFrame(
        [("sold", "accepted", "closed"), ("rejected", "rejected", "closed")],
        "line_item_id string, status string, order_state string",
    )
    touches = ad_touches(rows)
    found = ad_daily(touches, touches, fact_ad_event(events(rows)), attribution, lines)
    days = {row["business_day"]: row for row in rows_of(found)}
    assert days.keys() == {DAY, DAY + timedelta(days=1)}
    first, second = days[DAY], days[DAY + timedelta(days=1)]
    names = ("impressions", "clicks", "orphan_clicks", "rollup_impressions", "spend_micros")
    assert [first[name] for name in names] == [1, 2, 1, 7, 70]
    assert (first["rollup_revision"], first["vendor_store_id"]) == (2, VENDOR)
    assert (first["attributed_orders"], first["attributed_order_cents"]) == (1, 900)
    assert (second["attributed_lines"], second["attributed_line_cents"]) == (1, 300)
    assert (second["impressions"], second["rollup_revision"]) == (0, 0)


def test_hours_of_the_outbox_tell_lags_and_duplicates_but_no_telemetry(spark, rows) -> None:
    [hour] = rows_of(outbox_delivery(rows, None))
    assert (hour["hour"], hour["events"], hour["entries"], hour["duplicates"]) == (START, 3, 3, 0)
    assert (hour["lag_p50_ms"], hour["lag_p99_ms"], hour["lag_max_ms"]) == (6000, 7000, 7000)
    assert hour["failed_attempts"] is None
    tried = entry(5, "ad_paused", b"{}", attributes={"attempts": "4"})
    [hour] = rows_of(outbox_delivery(rows, frame(spark, [tried])))
    assert hour["failed_attempts"] == 4
