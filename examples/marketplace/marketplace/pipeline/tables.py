"""Tables: which there are, how their files are grouped, and in which order rows are written."""

from __future__ import annotations

from collections.abc import Iterable
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
MADE_OF = {
    "fact_order_line": ("fact_order",),
    "fact_attribution": ("fact_order", "fact_order_line", "ad_touches"),
    "store_daily": ("fact_order", "fact_order_line"),
    "product_daily": ("fact_order_line",),
    "category_daily": ("fact_order_line",),
    "zip_daily": ("fact_order",),
    "ad_daily": ("ad_touches", "fact_ad_event", "fact_order_line", "fact_attribution"),
    "buyer_first_purchase": ("fact_order",),
    "admin_weekly": ("fact_order", "buyer_first_purchase"),
}
"""Of which others a table is made; the rest are made of bronze and silver alone."""
MARTS = ("store_daily", "product_daily", "category_daily", "zip_daily", "ad_daily")
VIEWS = ("events", "events_quarantine")
"""What is read from silver, where all kinds of rows lie side by side."""
RAW, SILVER = "raw_events", "silver"
NAMES = (RAW, *VIEWS, *STORED)


def with_sources(names: Iterable[str]) -> frozenset[str]:
    """Those of the names that are made of silver, and all that they are made of.

    >>> sorted(with_sources(["events", "zip_daily"]))
    ['fact_order', 'zip_daily']
    """
    found = {name for name in map(checked, names) if name in STORED}
    return frozenset(found).union(*(with_sources(MADE_OF.get(name, ())) for name in found))


def checked(name: str) -> str:
    if name not in NAMES:
        raise ConfigError(f"no table {name!r}; there are {', '.join(NAMES)}")
    return name
