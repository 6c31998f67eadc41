"""The columns of the contract (docs/marketplace.md), by table and in order."""

from __future__ import annotations

from typing import NamedTuple

from conquiet.errors import ConfigError


class Table(NamedTuple):
    """A table's columns with their types, and how many of the first are its key."""

    columns: dict[str, str]
    key: tuple[str, ...]


def _table(key: str, text: str) -> Table:
    """From lines such as `ts created_at closed_at`: a type, and the columns of it."""
    columns: dict[str, str] = {}
    for line in text.strip().splitlines():
        kind, *names = line.split()
        columns.update(dict.fromkeys(names, kind))
    return Table(columns, tuple(key.split()))


_STAGES = ("decide", "dispatch", "deliver", "collect", "payout")
_DURATIONS = " ".join(f"{stage}_{part}_ms" for stage in _STAGES for part in ("p50", "p95"))
_LINES = "bigint lines units discounts_cents final_cents revenue_lines revenue_cents"

TABLES: dict[str, Table] = {
    "events": _table(
        "event_id",
        """
        string event_id event_type
        int version
        string aggregate_type aggregate_id
        ts occurred_at created_at
        string actor_type actor_id actor_store_id payload
        ts first_seen_at
        bigint delivery_count
        """,
    ),
    "events_quarantine": _table(
        "event_id",
        """
        string event_id stream event_type
        int version
        string reason
        ts created_at
        binary data
        ts first_seen_at
        bigint delivery_count
        """,
    ),
    "ad_touches": _table(
        "token_id",
        """
        string token_id kind ad_id vendor_store_id buyer_store_id placement target_type target_id
        string impression_token_id
        ts occurred_at
        date business_day
        string event_id
        ts first_seen_at
        bigint delivery_count
        """,
    ),
    "fact_order": _table(
        "order_id",
        """
        string order_id checkout_group_id buyer_store_id vendor_store_id
        bigint order_number
        string currency payment_method postal_code
        bigint lines
        ts created_at decided_at
        string decision
        ts ready_at in_transit_at delivered_at closed_at canceled_at expired_at released_at
        ts collected_at paid_out_at
        bigint subtotal_cents discounts_cents tax_cents transport_fee_cents created_cents
        bigint final_cents collected_cents paid_cents
        string state
        bigint revenue_cents
        date business_day revenue_day
        """,
    ),
    "fact_order_line": _table(
        "line_item_id",
        """
        string line_item_id order_id buyer_store_id vendor_store_id product_id title category unit
        bigint qty unit_price_cents discount_cents line_total_cents
        string status
        ts decided_at
        string order_state
        ts created_at
        bigint final_cents revenue_cents
        date business_day revenue_day
        """,
    ),
    "fact_ad_event": _table(
        "event_id",
        """
        string event_id event_type ad_id vendor_store_id
        ts happened_at
        date business_day
        string status from_status cause placement target_type target_id
        bigint bid_cents_cpm daily_budget_cents
        date rollup_day
        bigint impressions clicks spend_micros rollup_revision
        """,
    ),
    "fact_attribution": _table(
        "scope order_id line_item_id ad_id",
        """
        string scope order_id line_item_id ad_id token_id kind
        ts touched_at
        bigint candidates
        boolean won
        string vendor_store_id buyer_store_id
        date business_day revenue_day
        bigint revenue_cents
        """,
    ),
    "store_daily": _table(
        "business_day vendor_store_id",
        """
        date business_day
        string vendor_store_id
        bigint orders lost_orders created_cents live_orders units discounts_cents final_cents
        bigint revenue_orders revenue_cents payouts paid_cents
        """,
    ),
    "product_daily": _table(
        "business_day product_id",
        f"date business_day\nstring product_id vendor_store_id\n{_LINES}",
    ),
    "category_daily": _table(
        "business_day category", f"date business_day\nstring category\n{_LINES}"
    ),
    "zip_daily": _table(
        "business_day postal_code",
        """
        date business_day
        string postal_code
        bigint orders lost_orders created_cents final_cents revenue_orders revenue_cents
        """,
    ),
    "ad_daily": _table(
        "business_day ad_id",
        """
        date business_day
        string ad_id vendor_store_id
        bigint impressions clicks orphan_clicks
        bigint rollup_impressions rollup_clicks spend_micros rollup_revision
        bigint attributed_orders attributed_order_cents attributed_lines attributed_line_cents
        """,
    ),
    "buyer_first_purchase": _table(
        "buyer_store_id",
        """
        string buyer_store_id first_order_id first_vendor_store_id
        ts first_purchase_at
        date first_day
        bigint purchases
        ts last_purchase_at
        """,
    ),
    "admin_weekly": _table(
        "week",
        f"""
        date week
        bigint orders lost_orders gmv_cents buyers new_buyers returning_buyers revenue_cents
        bigint {_DURATIONS}
        """,
    ),
    "recon_completeness": _table(
        "hour",
        """
        ts hour
        bigint outbox_count log_count entry_count silver_count quarantine_count
        strings missing_ids foreign_ids lost_ids
        boolean complete
        """,
    ),
    "recon_money": _table(
        "order_id problem",
        """
        string order_id problem
        bigint created_cents final_cents collected_cents paid_cents
        strings event_ids
        """,
    ),
    "outbox_delivery": _table(
        "hour",
        """
        ts hour
        bigint events entries duplicates failed_attempts
        bigint lag_p50_ms lag_p95_ms lag_p99_ms lag_max_ms
        """,
    ),
}
"""What the oracle can tell. `entry_id` of the quarantine is missing, since the number of
partitions decides it; `stream` is the topic."""


def table(name: str) -> Table:
    if name not in TABLES:
        raise ConfigError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]
