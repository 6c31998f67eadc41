"""Tables: the contract of each table, its rows, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from conquiet.errors import ConfigError


class Table(NamedTuple):
    """Lists the columns of a table with their types; the first are its key."""

    columns: dict[str, str]
    key: tuple[str, ...]


def _table(key: str, text: str) -> Table:
    """Parse lines such as `ts created_at closed_at`: a type, and its columns."""
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
"""The tables that the oracle derives. `entry_id` of the quarantine is missing, since the number of
partitions decides it; `stream` is the topic."""


def table(name: str) -> Table:
    if name not in TABLES:
        raise ConfigError(f"no table {name!r}; there are {', '.join(TABLES)}")
    return TABLES[name]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ROWS_PER_FILE = 20_000


class Rows:
    """Collects the rows of one table; times are microseconds until they are read."""

    def __init__(self, name: str, spill: Path | None = None) -> None:
        self.name = name
        self.table = table(name)
        self.count = 0
        self._kept: list[tuple[Any, ...]] = []
        self._directory = None if spill is None else spill / name
        self._files = 0
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            if any(self._directory.iterdir()):  # a reader would read those rows, too
                raise ConfigError(f"{self._directory} is not empty; spill into a new directory")

    def add(self, row: tuple[Any, ...]) -> None:
        self._kept.append(row)
        self.count += 1
        if self._directory is not None and len(self._kept) >= _ROWS_PER_FILE:
            self.flush()

    def flush(self) -> None:
        """Write the rows in memory, if there is a directory for them."""
        if self._directory is None or not self._kept:
            return
        import pyarrow.parquet

        path = self._directory / f"part-{self._files:05}.parquet"
        pyarrow.parquet.write_table(self._arrow(self._kept), path)
        self._files += 1
        self._kept.clear()

    def arrow(self) -> Any:
        """Return all rows as a pyarrow Table."""
        if self._directory is None:
            return self._arrow(self._kept)
        import pyarrow
        import pyarrow.parquet

        self.flush()
        parts = [pyarrow.parquet.read_table(path) for path in sorted(self._directory.iterdir())]
        return pyarrow.concat_tables(parts) if parts else self._arrow([])

    def dicts(self) -> list[dict[str, Any]]:
        """Return all rows by column, sorted by the key."""
        if self._directory is not None:
            found: list[dict[str, Any]] = self.arrow().to_pylist()
        else:
            names = list(self.table.columns)
            times = [
                place for place, kind in enumerate(self.table.columns.values()) if kind == "ts"
            ]
            found = [dict(zip(names, _dated(row, times), strict=True)) for row in self._kept]
        key = self.table.key
        found.sort(key=lambda row: [str(row[name] or "") for name in key])
        return found

    def _arrow(self, rows: list[tuple[Any, ...]]) -> Any:
        import pyarrow as pa

        types = {
            "string": pa.string(),
            "int": pa.int32(),
            "bigint": pa.int64(),
            "boolean": pa.bool_(),
            "binary": pa.binary(),
            "date": pa.date32(),
            "ts": pa.timestamp("us", tz="UTC"),
            "strings": pa.list_(pa.string()),
        }
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.table.columns)
        return pa.table(
            {
                name: pa.array(values, types[kind])
                for (name, kind), values in zip(self.table.columns.items(), columns, strict=True)
            }
        )


def _dated(row: tuple[Any, ...], times: list[int]) -> list[Any]:
    values = list(row)
    for place in times:
        if values[place] is not None:
            values[place] = _EPOCH + timedelta(microseconds=values[place])
    return values


_Rows = Iterable[Mapping[str, Any]]


def differences(name: str, expected: _Rows, found: _Rows) -> Iterator[str]:
    """Yield a line for each row that is missing, unexpected, duplicate or different.

    >>> right = [{"hour": 1, "events": 2}, {"hour": 2, "events": 5}]
    >>> list(differences("outbox_delivery", right, [{"hour": 2, "events": 4}]))
    ['outbox_delivery hour=1: missing', 'outbox_delivery hour=2: events is 4, should be 5']

    Only columns that are expected are compared. Arrays count by their order.
    """
    key = table(name).key
    left = {tuple(row[column] for column in key): row for row in expected}
    seen: set[tuple[Any, ...]] = set()
    wrong: list[str] = []
    for row in found:
        identity = tuple(row[column] for column in key)
        place = " ".join(f"{column}={value}" for column, value in zip(key, identity, strict=True))
        if identity in seen:
            wrong.append(f"{name} {place}: there more than once")
            continue
        seen.add(identity)
        right = left.pop(identity, None)
        if right is None:
            wrong.append(f"{name} {place}: too many")
            continue
        said = [
            f"{column} is {row.get(column)!r}, should be {value!r}"
            for column, value in right.items()
            if row.get(column) != value
        ]
        if said:
            wrong.append(f"{name} {place}: {'; '.join(said)}")
    for identity in left:
        place = " ".join(f"{column}={value}" for column, value in zip(key, identity, strict=True))
        yield f"{name} {place}: missing"
    yield from wrong
