"""Business: what the marketplace earned; from Spark's tables, or where it was left out, by SQL."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from marketplace.charts import Point
from marketplace.demo.lake import Lake
from marketplace.demo.servers import Servers

TOP = 10
_STEPS = {
    "placed": "created_at",
    "accepted, in whole or in part": "decided_at",
    "ready for dispatch": "ready_at",
    "in transit": "in_transit_at",
    "delivered": "delivered_at",
    "paid": "collected_at",
    "closed": "closed_at",
}
_STATES = {
    "placed": ("created_pending",),
    "accepted, in whole or in part": ("accepted", "partially_accepted"),
    "ready for dispatch": ("ready_for_dispatch",),
    "in transit": ("in_transit",),
    "delivered": ("delivered",),
    "paid": ("paid",),
    "closed": ("closed",),
}

_BY_DAY = """
WITH collected AS (
    SELECT order_id, min(recorded_at) AS at FROM market_ledger
    WHERE kind IN ('cash_collected', 'payment_settled') GROUP BY order_id)
SELECT (at AT TIME ZONE 'America/Chicago')::date::text, sum(collected_cents)
FROM market_orders JOIN collected ON order_id = id
WHERE status NOT IN ('canceled', 'expired', 'rejected') GROUP BY 1 ORDER BY 1
"""
_BY_PRODUCT = """
SELECT product_id::text, sum(line_total_cents) FROM market_order_lines l
JOIN market_orders o ON o.id = l.order_id
WHERE collected_cents > 0 AND l.status <> 'rejected'
AND o.status NOT IN ('canceled', 'expired', 'rejected')
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 10
"""
_BY_STATE = """
SELECT payload_json #>> '{data,to_status}', count(*) FROM outbox_events
WHERE event_type = 'order_state_changed' GROUP BY 1
UNION ALL SELECT 'created_pending', count(*) FROM market_orders
UNION ALL SELECT 'paid', count(*) FROM market_orders WHERE collected_cents > 0
"""


@dataclass(frozen=True)
class Business:
    """Dollars by business day and by product, and how far orders came."""

    source: str
    revenue: list[Point]
    products: list[Point]
    funnel: list[Point]


def business_by_spark(lake: Lake) -> Business:
    days: Counter[str] = Counter()
    for row in lake.rows("store_daily"):
        days[str(row["business_day"])] += row["revenue_cents"]
    products, titles = Counter[str](), dict[str, str]()
    for row in lake.rows("fact_order_line", ["product_id", "title", "revenue_cents"]):
        products[row["product_id"]] += row["revenue_cents"]
        titles[row["product_id"]] = row["title"]
    best = sorted(products.items(), key=lambda item: (-item[1], item[0]))[:TOP]
    orders = lake.rows("fact_order")
    return Business(
        "from the tables that Spark made",
        [(day, cents / 100) for day, cents in sorted(days.items())],
        [(f"{titles[id_]} ({id_[:8]})", cents / 100) for id_, cents in best],
        [(name, _reached(orders, column)) for name, column in _STEPS.items()],
    )


def _reached(orders: list[dict[str, Any]], column: str) -> int:
    return sum(
        row[column] is not None and not (column == "decided_at" and row["decision"] == "rejected")
        for row in orders
    )


def business_by_sql(servers: Servers) -> Business:
    with servers.connect() as connection:
        revenue: list[Any] = connection.execute(_BY_DAY).fetchall()
        products: list[Any] = connection.execute(_BY_PRODUCT).fetchall()
        states: dict[str, int] = dict(connection.execute(_BY_STATE).fetchall())
    return Business(
        "from the business tables of PostgreSQL, since Spark was left out",
        [(day, float(cents) / 100) for day, cents in revenue],
        [(f"product {id_[:8]}", float(cents) / 100) for id_, cents in products],
        [(name, sum(states.get(one, 0) for one in names)) for name, names in _STATES.items()],
    )
