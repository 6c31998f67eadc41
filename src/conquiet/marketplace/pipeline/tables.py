"""Tables: which there are, how their files are grouped, and in which order rows are written."""

from __future__ import annotations

from typing import NamedTuple

from conquiet.errors import ConfigError


class Table(NamedTuple):
    """How a table lies on disk; `key` sorts the rows of a partition, and names each once."""

    partition_by: str
    key: tuple[str, ...]


STORED = {
    "ad_touches": Table("business_day", ("token_id",)),
    "fact_order": Table("business_day", ("order_id",)),
    "fact_order_line": Table("business_day", ("line_item_id",)),
    "fact_ad_event": Table("day", ("event_id",)),
    "fact_attribution": Table("business_day", ("scope", "order_id", "line_item_id", "ad_id")),
    "store_daily": Table("business_day", ("vendor_store_id",)),
    "product_daily": Table("business_day", ("product_id",)),
    "category_daily": Table("business_day", ("category",)),
    "zip_daily": Table("business_day", ("postal_code",)),
    "ad_daily": Table("business_day", ("ad_id",)),
    "buyer_first_purchase": Table("first_day", ("buyer_store_id",)),
    "admin_weekly": Table("week", ("orders",)),
    "recon_completeness": Table("day", ("hour",)),
    "recon_money": Table("bucket", ("order_id", "problem")),
    "outbox_delivery": Table("day", ("hour",)),
}
MARTS = ("store_daily", "product_daily", "category_daily", "zip_daily", "ad_daily")
VIEWS = ("events", "events_quarantine")
"""What is read from silver, where all kinds of rows lie side by side."""
RAW, SILVER = "raw_events", "silver"
NAMES = (RAW, *VIEWS, *STORED)


def checked(name: str) -> str:
    if name not in NAMES:
        raise ConfigError(f"no table {name!r}; there are {', '.join(NAMES)}")
    return name
