"""Silver and gold of docs/marketplace.md once more, by parsing the log, the slow way."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from conquiet.errors import InvalidMessage
from marketplace.catalog import CATALOG
from marketplace.generator import DOMAIN_TOPIC

CHICAGO = ZoneInfo("America/Chicago")
LOST = ("canceled", "expired", "rejected")
COLLECTIONS = ("cash_collected", "payment_settled")
MONEY = ("order_created", *COLLECTIONS, "vendor_payout_recorded")
MOMENTS = (
    *("changed_at", "canceled_at", "expired_at", "released_at"),
    *("collected_at", "settled_at", "paid_out_at", "uploaded_at"),
)


def moment(text):
    return datetime.fromisoformat(text)


def day_of(at):
    return at.astimezone(CHICAGO).date()


def reason_of(entry):
    try:
        envelope = json.loads(entry.data)
    except json.JSONDecodeError:
        return "broken_json", None
    version, data = envelope["version"], envelope["data"]
    if entry.is_telemetry:
        known, is_known_type = version == 1, entry.type in ("ad_impression", "ad_click")
    else:
        known = CATALOG.declaration(entry.type, version) is not None
        is_known_type = entry.type in CATALOG.event_types
    if not is_known_type:
        return "unknown_type", version
    if not known:
        return "unknown_version", version
    if data is None:
        return "null_data", version
    try:
        if entry.is_telemetry:
            data["token_id"]
        else:
            CATALOG.open(entry.type, entry.data)
    except (InvalidMessage, KeyError):
        return "invalid_data", version
    if entry.type == "order_created" and not adds_up(data):
        return "wrong_amounts", version
    return None, version


def adds_up(data):
    gross = sum(line["qty"] * line["unit_price_cents"] for line in data["lines"])
    discounts = sum(line["discount_cents"] for line in data["lines"])
    fees = data["tax_cents"] + data["transport_fee_cents"]
    return (data["subtotal_cents"], data["discounts_cents"], data["total_cents"]) == (
        *(gross, discounts),
        gross - discounts + fees,
    )


class Facts:
    def __init__(self, entries):
        self.deliveries = defaultdict(list)
        for entry in entries:
            self.deliveries[entry.event_id].append(entry)
        self.events, self.quarantine, self.touches = [], [], {}
        self.good = []
        for found in self.deliveries.values():
            self._sort_out(found)
        self.orders, self.lines, self.money = [], [], []
        self.attribution = []
        of_orders = defaultdict(list)
        for kind, at, event_id, data, _ in sorted(self.good, key=lambda e: (e[1], e[2])):
            if "order_id" in data:
                of_orders[data["order_id"]].append((kind, at, event_id, data))
        for order_id, events in of_orders.items():
            self._order(order_id, events)

    # --- silver ---------------------------------------------------------------------------------

    def _sort_out(self, found):
        first, count = found[0], len(found)
        seen = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=first.ms)
        reason, version = reason_of(first)
        created = moment(first.time)
        if reason is not None:
            row = (first.event_id, first.topic, first.type, version, reason, created, first.data)
            self.quarantine.append((*row, seen, count))
            return
        envelope = json.loads(first.data)
        occurred = moment(envelope["occurredAt"])
        data = envelope["data"]
        if first.topic != DOMAIN_TOPIC:
            self._touch(first, data, occurred, seen, count)
            return
        actor = envelope.get("actor") or {}
        by = (actor.get("type"), actor.get("id"), actor.get("storeId"))
        self.events.append(
            (
                first.event_id,
                first.type,
                version,
                first.aggregate_type,
                first.aggregate_id,
                occurred,
                created,
                *by,
                first.data.decode(),
                seen,
                count,
            )
        )
        named = [moment(data[name]) for name in MOMENTS if name in data]
        at = named[0] if named else occurred
        self.good.append((first.type, at, first.event_id, data, occurred))

    def _touch(self, entry, data, occurred, seen, count):
        token = data["token_id"]
        this = (occurred, entry.event_id, entry.type[3:], data, seen, count)
        other = self.touches.get(token)
        if other is not None:
            one, two = sorted((this, other), key=lambda touch: touch[:2])
            this = (*one[:4], min(one[4], two[4]), one[5] + two[5])
        self.touches[token] = this

    def ad_touches(self):
        for token, (at, event_id, kind, data, seen, count) in self.touches.items():
            names = ("ad_id", "vendor_store_id", "buyer_store_id", "placement", "target_type")
            yield (
                token,
                kind,
                *(data[name] for name in names),
                data["target_id"],
                *(data.get("impression_token_id"), at, day_of(at), event_id, seen, count),
            )

    # --- facts ----------------------------------------------------------------------------------

    def _order(self, order_id, events):
        def first(*kinds, to=None):
            return next(
                (
                    (at, data)
                    for kind, at, _, data in events
                    if kind in kinds and (to is None or data["to_status"] in to)
                ),
                (None, {}),
            )

        created_at, created = first("order_created")
        if not created:
            ids = sorted(event_id for _, _, event_id, _ in events)
            self.money.append((order_id, "no_order_created", None, None, None, None, ids))
            return
        decided_at, decided = first(
            "order_state_changed", to=("accepted", "partially_accepted", "rejected")
        )
        decision = decided.get("to_status")
        times = {
            to: first("order_state_changed", to=(to,))[0]
            for to in ("ready_for_dispatch", "in_transit", "delivered", "closed")
        }
        canceled, expired = first("order_canceled")[0], first("order_expired")[0]
        released = [at for kind, at, _, _ in events if kind == "reservation_released"]
        collected_at, collection = first(*COLLECTIONS)
        paid_at, payout = first("vendor_payout_recorded")
        collected, paid = collection.get("amount_cents", 0), payout.get("amount_cents", 0)
        state = decision or "created_pending"
        if decision != "rejected":
            for to, at in times.items():
                state = to if at else state
        state = "canceled" if canceled else "expired" if expired else state
        lost = state in LOST
        status = {line["line_item_id"]: (line["status"], None) for line in created["lines"]}
        for kind, at, _, data in events:
            if kind == "line_item_state_changed":
                status[data["line_item_id"]] = (data["to_status"], at)
        kept = [
            line["line_total_cents"]
            for line in created["lines"]
            if status[line["line_item_id"]][0] != "rejected"
        ]
        fees = created["tax_cents"] + created["transport_fee_cents"]
        final = sum(kept) + fees if kept and not lost else 0
        day = day_of(created_at)
        revenue_day = day_of(collected_at) if collected_at and not lost else None
        self.orders.append(
            (
                order_id,
                created["checkout_group_id"],
                created["buyer_store_id"],
                created["vendor_store_id"],
                created["order_number"],
                created["currency"],
                created["payment_method"],
                created["ship_to"]["postal_code"],
                len(created["lines"]),
                created_at,
                decided_at,
                decision,
                *times.values(),
                canceled,
                expired,
                max(released, default=None),
                collected_at,
                paid_at,
                created["subtotal_cents"],
                created["discounts_cents"],
                created["tax_cents"],
                created["transport_fee_cents"],
                created["total_cents"],
                final,
                collected,
                paid,
                state,
                0 if lost else collected,
                day,
                revenue_day,
            )
        )
        for line in created["lines"]:
            became, at = status[line["line_item_id"]]
            cents = 0 if lost or became == "rejected" else line["line_total_cents"]
            self.lines.append(
                (
                    line["line_item_id"],
                    order_id,
                    created["buyer_store_id"],
                    created["vendor_store_id"],
                    line["product_id"],
                    line["title"].replace("\x00", "�"),
                    line["category"],
                    line["unit"],
                    line["qty"],
                    line["unit_price_cents"],
                    line["discount_cents"],
                    line["line_total_cents"],
                    became,
                    at,
                    state,
                    created_at,
                    cents,
                    cents if revenue_day else 0,
                    day,
                    revenue_day,
                )
            )
        self._attribute(self.orders[-1], created)
        self._check(self.orders[-1], events)

    def _attribute(self, row, created):
        order = dict(zip(ORDER, row, strict=True))
        tokens = (created.get("attribution") or {}).get("token_ids", [])
        touches = [
            (touch[2] == "click", touch[0], token, touch)
            for token in tokens
            if (touch := self.touches.get(token)) and touch[0] <= order["created_at"]
        ]
        goals = [("store", None, order["vendor_store_id"], order["revenue_cents"])]
        for line in self.lines[-len(created["lines"]) :]:
            named = dict(zip(LINE, line, strict=True))
            goals.append(
                ("line", named["line_item_id"], named["product_id"], named["revenue_cents"])
            )
        for scope, line_id, target, cents in goals:
            fitting = [touch for touch in touches if touch[3][3]["target_id"] == target]
            best = max(fitting, default=None, key=lambda touch: touch[:3])
            for ad in {touch[3][3]["ad_id"] for touch in fitting}:
                own = [touch for touch in fitting if touch[3][3]["ad_id"] == ad]
                top = max(own, key=lambda touch: touch[:3])
                won = top is best
                self.attribution.append(
                    (
                        scope,
                        order["order_id"],
                        line_id,
                        ad,
                        top[2],
                        top[3][2],
                        top[1],
                        len(own),
                        won,
                        order["vendor_store_id"],
                        order["buyer_store_id"],
                        order["business_day"],
                        order["revenue_day"],
                        cents if won else 0,
                    )
                )

    def _check(self, row, events):
        order = dict(zip(ORDER, row, strict=True))
        names = ("created_cents", "final_cents", "collected_cents", "paid_cents")
        created, final, collected, paid = cents = [order[name] for name in names]
        amounts = {data["amount_cents"] for kind, _, _, data in events if kind in COLLECTIONS}
        ids = sorted(event_id for kind, _, event_id, _ in events if kind in MONEY)
        currencies = {data["currency"] for kind, _, _, data in events if kind in MONEY}
        has_paid, has_collected = order["paid_out_at"], order["collected_at"]
        is_closed = order["state"] == "closed"
        for problem, is_so in (
            ("final_over_created", final > created),
            ("collected_not_final", has_collected and collected != final),
            ("collections_differ", len(amounts) > 1),
            ("paid_without_collection", has_paid and not has_collected),
            ("paid_not_collected", has_paid and has_collected and paid != collected),
            ("closed_without_collection", is_closed and final and not (has_collected or has_paid)),
            ("closed_without_payout", is_closed and collected and not has_paid),
            ("currencies_differ", len(currencies) > 1),
        ):
            if is_so:
                self.money.append((order["order_id"], problem, *cents, ids))

    def fact_ad_event(self):
        to = {"ad_paused": "paused", "ad_activated": "active", "ad_expired": "expired"}
        for kind, at, event_id, data, _ in self.good:
            if kind.startswith("ad_"):
                terms = ("placement", "target_type", "target_id", "bid_cents_cpm")
                day = date.fromisoformat(data["day"]) if "day" in data else None
                yield (
                    event_id,
                    kind,
                    data["ad_id"],
                    data["vendor_store_id"],
                    at,
                    day_of(at),
                    *(data.get("status") or to.get(kind), data.get("from_status")),
                    *(data.get("cause"), *(data.get(name) for name in terms)),
                    *(data.get("daily_budget_cents"), day, data.get("impressions")),
                    *(data.get("clicks"), data.get("spend_micros"), data.get("rollup_revision")),
                )


ORDER = (
    *("order_id", "checkout_group_id", "buyer_store_id", "vendor_store_id", "order_number"),
    *("currency", "payment_method", "postal_code", "lines", "created_at", "decided_at", "decision"),
    *("ready_at", "in_transit_at", "delivered_at", "closed_at", "canceled_at", "expired_at"),
    *("released_at", "collected_at", "paid_out_at", "subtotal_cents", "discounts_cents"),
    *("tax_cents", "transport_fee_cents", "created_cents", "final_cents", "collected_cents"),
    *("paid_cents", "state", "revenue_cents", "business_day", "revenue_day"),
)
LINE = (
    *("line_item_id", "order_id", "buyer_store_id", "vendor_store_id", "product_id", "title"),
    *("category", "unit", "qty", "unit_price_cents", "discount_cents", "line_total_cents"),
    *("status", "decided_at", "order_state", "created_at", "final_cents", "revenue_cents"),
    *("business_day", "revenue_day"),
)
