"""The oracle: derives the expected rows of every table from the state of the world."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conquiet.errors import ConfigError
from marketplace.generator.orders import Order
from marketplace.generator.publication import Seen
from marketplace.oracle.ads import AdTables
from marketplace.oracle.log import LogTables
from marketplace.oracle.marts import Marts
from marketplace.oracle.orders import (
    Note,
    attribute,
    known,
    line_row,
    mismatches,
    order_row,
)
from marketplace.oracle.tables import TABLES, Rows, differences, table

_OF_ORDERS = frozenset(
    (
        *("order_created", "order_state_changed", "line_item_state_changed", "order_canceled"),
        *("order_expired", "reservation_released", "cash_collected", "payment_settled"),
        "vendor_payout_recorded",
    )
)
_TELEMETRY = frozenset(("ad_impression", "ad_click"))


class Oracle:
    """Witnesses a generator's run, and derives the expected tables.

    >>> from marketplace.generator import Generator
    >>> oracle = Oracle()
    >>> entries = list(Generator(seed=7, orders=20).entries(oracle))
    >>> orders = oracle.rows("fact_order")
    >>> len(orders), orders[0]["created_cents"] >= orders[0]["final_cents"]
    (20, True)

    It sees objects of the world and never parses an event. `outbox=False` gives the answers for a
    pipeline that was not given the outbox. With `spill`, tables with a row per event, order or line
    go to Parquet files below that directory as they grow.
    """

    def __init__(self, *, outbox: bool = True, spill: str | Path | None = None) -> None:
        place = None if spill is None else Path(spill)
        self._rows = {name: Rows(name, place) for name in TABLES}
        rows = self._rows
        self._log = LogTables(rows["events"], rows["events_quarantine"], outbox=outbox)
        self._ads = AdTables(rows["ad_touches"], rows["fact_ad_event"])
        self._marts = Marts()
        self._open: dict[str, Order] = {}
        self._is_complete = False

    # --- as a witness -----------------------------------------------------------------------

    def happened(self, type: str, subject: Any, at: int, detail: Any, event_id: str) -> None:
        if type in _OF_ORDERS:
            if subject.note is None:
                subject.note = Note()
                self._open[subject.id] = subject
            subject.note.take(type, at, detail, event_id)
        elif type in _TELEMETRY:
            self._ads.touch(detail, at, event_id)
        elif type.startswith("ad_"):
            self._ads.take(type, subject, at, detail, event_id)

    def seen(self, seen: Seen) -> None:
        if self._is_complete:
            raise ConfigError("an oracle witnesses one run; make a new one for the next")
        self._log.see(seen)
        if seen.first.is_telemetry:
            self._ads.see(seen)

    def finished(self, order: Any) -> None:
        if self._open.pop(order.id, None) is not None:
            self._conclude(order)

    # --- the answers ------------------------------------------------------------------------

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table, sorted by its key; times are aware, in UTC."""
        self._complete()
        return self._found(name).dicts()

    def arrow(self, name: str) -> Any:
        """Return the rows as a pyarrow Table with the types of the contract, in no order."""
        self._complete()
        return self._found(name).arrow()

    def differences(self, name: str, found: Iterable[Mapping[str, Any]]) -> list[str]:
        """Compare rows of a table with the expected ones; return a line per difference."""
        return list(differences(name, self.rows(name), found))

    def count(self, name: str) -> int:
        self._complete()
        return self._found(name).count

    def _found(self, name: str) -> Rows:
        table(name)
        return self._rows[name]

    def _conclude(self, order: Order) -> None:
        note: Note = order.note
        if not note.is_created:
            ids = sorted(note.all_ids)
            nothing = (None, None, None, None)
            self._rows["recon_money"].add((order.id, "no_order_created", *nothing, ids))
            return
        found = known(order)
        self._rows["fact_order"].add(order_row(found))
        for line in order.lines:
            self._rows["fact_order_line"].add(line_row(found, line))
        self._marts.take(found)
        for winner in attribute(found, self._rows["fact_attribution"]):
            if found.revenue_day is not None:
                self._ads.credit(found.revenue_day, winner)
        for problem in mismatches(found):
            cents = (found.created, found.final, found.collected, found.paid)
            ids = sorted(note.money_ids)
            self._rows["recon_money"].add((order.id, problem, *cents, ids))

    def _complete(self) -> None:
        """Conclude unfinished orders and touches, and write the sums."""
        if self._is_complete:
            return
        self._is_complete = True
        for order in self._open.values():
            self._conclude(order)
        self._open.clear()
        rows, marts = self._rows, self._marts
        marts.stores.write(rows["store_daily"])
        marts.products.write(rows["product_daily"])
        marts.categories.write(rows["category_daily"])
        marts.zips.write(rows["zip_daily"])
        self._ads.conclude()
        self._ads.write_days(rows["ad_daily"])
        marts.write_buyers(rows["buyer_first_purchase"])
        marts.write_weeks(rows["admin_weekly"])
        self._log.completeness(rows["recon_completeness"])
        self._log.delivery(rows["outbox_delivery"])
