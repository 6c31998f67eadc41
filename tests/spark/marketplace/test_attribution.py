"""Attribution by rule: a click over an impression, then the latest, then the largest token id."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from tests.spark.marketplace.entries import START
from tests.spark.marketplace.tables import rows_of

from marketplace.pipeline.attribution import fact_attribution

pytestmark = pytest.mark.slow

TOUCHES = [  # token, kind, ad, target, minutes before the order
    ("t1", "impression", "ad1", "shop", 1),
    ("t2", "click", "ad1", "shop", 9),  # a click wins over what came later
    ("t3", "click", "ad2", "shop", 9),  # as late: the larger token
    ("t4", "impression", "ad3", "tomato", 2),
    ("t5", "impression", "ad4", "tomato", 3),
    ("t6", "click", "ad5", "shop", -1),  # after the order
    ("t7", "click", "ad6", "elsewhere", 1),
    ("t8", "click", "ad7", "shop", 1),  # not presented
]


def test_the_best_touch_of_an_ad_and_the_best_ad_of_an_order_or_a_line(spark) -> None:
    day = date(2026, 3, 7)
    tokens = ["t1", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "lost"]
    orders = spark.createDataFrame(
        [("o", "shop", "buyer", START, day, day, 900, tokens)],
        "order_id string, vendor_store_id string, buyer_store_id string, created_at timestamp,"
        " business_day date, revenue_day date, revenue_cents bigint,"
        " token_ids array<string>",
    )
    lines = spark.createDataFrame(
        [("o", "l1", "tomato", 300), ("o", "l2", "tomato", 400), ("o", "l3", "salt", 200)],
        "order_id string, line_item_id string, product_id string, revenue_cents bigint",
    )
    touches = spark.createDataFrame(
        [
            (token, kind, ad, target, START - timedelta(minutes=minutes))
            for token, kind, ad, target, minutes in TOUCHES
        ],
        "token_id string, kind string, ad_id string, target_id string, occurred_at timestamp",
    )
    rows = rows_of(fact_attribution(orders, lines, touches))
    found = {
        (row["scope"], row["line_item_id"], row["ad_id"]): (
            *(row["token_id"], row["candidates"], row["won"], row["revenue_cents"]),
        )
        for row in rows
    }
    assert found == {
        ("store", None, "ad1"): ("t2", 2, False, 0),
        ("store", None, "ad2"): ("t3", 1, True, 900),
        ("line", "l1", "ad3"): ("t4", 1, True, 300),
        ("line", "l1", "ad4"): ("t5", 1, False, 0),
        ("line", "l2", "ad3"): ("t4", 1, True, 400),
        ("line", "l2", "ad4"): ("t5", 1, False, 0),
    }
