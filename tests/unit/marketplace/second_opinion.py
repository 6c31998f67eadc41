"""The tables of docs/marketplace.md once more, by parsing the log, the slow and obvious way.

The oracle never parses an event, and this never looks at the generator's state. Where they agree
on every row, the contract can be kept by somebody who has nothing but the log.
"""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from math import ceil
from zoneinfo import ZoneInfo

from conquiet.errors import InvalidMessage
from conquiet.marketplace.catalog import CATALOG
from conquiet.marketplace.generator import DOMAIN_TOPIC
from conquiet.marketplace.oracle import TABLES

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


def hour_of(at):
    return at.replace(minute=0, second=0, microsecond=0)


def millis(delta):
    return delta // timedelta(milliseconds=1)


def rank(values, percent):
    ordered = sorted(values)
    return ordered[ceil(len(ordered) * percent / 100) - 1] if ordered else None


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


class Opinion:
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
        has_paid, has_collected = order["paid_out_at"], order["collected_at"]
        for problem, is_so in (
            ("final_over_created", final > created),
            ("collected_not_final", has_collected and collected != final),
            ("collections_differ", len(amounts) > 1),
            ("paid_without_collection", has_paid and not has_collected),
            ("paid_not_collected", has_paid and has_collected and paid != collected),
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

    # --- marts ----------------------------------------------------------------------------------

    def named_orders(self):
        return [dict(zip(ORDER, row, strict=True)) for row in self.orders]

    def named_lines(self):
        return [dict(zip(LINE, row, strict=True)) for row in self.lines]

    def store_daily(self):
        rows = Summed(11)
        for order in self.named_orders():
            lost, store = order["state"] in LOST, order["vendor_store_id"]
            rows[order["business_day"], store].add(
                *(1, int(lost), order["created_cents"], int(not lost), 0, 0, order["final_cents"])
            )
            if order["revenue_day"]:
                rows[order["revenue_day"], store].add(*[0] * 7, 1, order["revenue_cents"])
            if order["paid_out_at"]:
                rows[day_of(order["paid_out_at"]), store].add(*[0] * 9, 1, order["paid_cents"])
        for line in self.named_lines():
            if line["final_cents"]:
                key = line["business_day"], line["vendor_store_id"]
                rows[key].add(*[0] * 4, line["qty"], line["discount_cents"])
        return rows.tuples()

    def lines_daily(self, *names):
        rows = Summed(6)
        for line in self.named_lines():
            if line["final_cents"]:
                key = [line[name] for name in names]
                rows[line["business_day"], *key].add(
                    *(1, line["qty"], line["discount_cents"], line["final_cents"])
                )
                if line["revenue_day"]:
                    rows[line["revenue_day"], *key].add(0, 0, 0, 0, 1, line["revenue_cents"])
        return rows.tuples()

    def zip_daily(self):
        rows = Summed(6)
        for order in self.named_orders():
            lost, zip_ = order["state"] in LOST, order["postal_code"]
            rows[order["business_day"], zip_].add(
                1, int(lost), order["created_cents"], order["final_cents"]
            )
            if order["revenue_day"]:
                rows[order["revenue_day"], zip_].add(0, 0, 0, 0, 1, order["revenue_cents"])
        return rows.tuples()

    def ad_daily(self):
        rows, rollups, vendors = Summed(11), {}, {}
        for at, _, kind, data, _, _ in self.touches.values():
            vendors[data["ad_id"]] = data["vendor_store_id"]
            orphan = kind == "click" and data["impression_token_id"] not in self.touches
            rows[day_of(at), data["ad_id"]].add(
                int(kind == "impression"), int(kind == "click"), int(orphan)
            )
        for kind, at, event_id, data, _ in self.good:
            if kind == "ad_daily_rollup_ready":
                vendors[data["ad_id"]] = data["vendor_store_id"]
                key = date.fromisoformat(data["day"]), data["ad_id"]
                this = (data["rollup_revision"], at, event_id, data)
                rollups[key] = max(rollups.get(key, this), this, key=lambda r: r[:3])
        for key, (revision, _, _, data) in rollups.items():
            numbers = data["impressions"], data["clicks"], data["spend_micros"], revision
            rows[key].add(0, 0, 0, *numbers)
        live = {row[0] for row in self.lines if dict(zip(LINE, row, strict=True))["final_cents"]}
        for scope, _, line_id, ad, _, _, _, _, won, _, _, _, day, cents in self.attribution:
            if won and day and (scope == "store" or line_id in live):
                rows[day, ad].add(*[0] * (7 if scope == "store" else 9), 1, cents)
        return [(day, ad, vendors[ad], *values) for day, ad, *values in rows.tuples()]

    def buyers(self):
        found = defaultdict(list)
        for order in self.named_orders():
            if order["state"] not in LOST:
                this = order["created_at"], order["order_id"], order["vendor_store_id"]
                found[order["buyer_store_id"]].append(this)
        for buyer, purchases in found.items():
            at, order_id, vendor = min(purchases)
            yield (buyer, order_id, vendor, at, day_of(at), len(purchases), max(purchases)[0])

    def weeks(self):
        def week(day):
            return day - timedelta(days=day.weekday())

        first = {row[0]: week(row[4]) for row in self.buyers()}
        orders = self.named_orders()
        mondays = {week(o["business_day"]) for o in orders}
        mondays |= {week(o["revenue_day"]) for o in orders if o["revenue_day"]}
        stages = (
            *(("created_at", "decided_at"), ("decided_at", "in_transit_at")),
            *(("in_transit_at", "delivered_at"), ("delivered_at", "collected_at")),
            ("collected_at", "paid_out_at"),
        )
        for monday in mondays:
            own = [o for o in orders if week(o["business_day"]) == monday]
            buyers = {o["buyer_store_id"] for o in own if o["state"] not in LOST}
            new = sum(first[buyer] == monday for buyer in buyers)
            revenue = sum(
                o["revenue_cents"]
                for o in orders
                if o["revenue_day"] and week(o["revenue_day"]) == monday
            )
            durations = []
            for begin, end in stages:
                values = [millis(o[end] - o[begin]) for o in own if o[begin] and o[end]]
                durations += (rank(values, 50), rank(values, 95))
            lost = sum(o["state"] in LOST for o in own)
            gmv = sum(o["final_cents"] for o in own)
            yield (
                monday,
                len(own),
                lost,
                gmv,
                len(buyers),
                new,
                len(buyers) - new,
                revenue,
                *durations,
            )

    # --- reconciliation -------------------------------------------------------------------------

    def hours(self):
        found = defaultdict(list)
        for entries in self.deliveries.values():
            if entries[0].topic == DOMAIN_TOPIC:
                found[hour_of(moment(entries[0].time))].append(entries)
        return found

    def completeness(self):
        taken = {row[0] for row in self.events}
        for hour, events in self.hours().items():
            foreign = sorted(e[0].event_id for e in events if e[0].is_foreign)
            silver = sum(e[0].event_id in taken for e in events)
            yield (
                hour,
                len(events) - len(foreign),
                len(events),
                sum(map(len, events)),
                *(silver, len(events) - silver, [], foreign[:100], not foreign),
            )

    def delivery(self):
        for hour, events in self.hours().items():
            lags = [
                e[0].ms - millis(moment(e[0].time) - datetime.fromtimestamp(0, UTC)) for e in events
            ]
            entries = sum(map(len, events))
            failures = sum(e[0].failures for e in events if not e[0].is_foreign)
            yield (
                hour,
                len(events),
                entries,
                entries - len(events),
                failures,
                *(rank(lags, 50), rank(lags, 95), rank(lags, 99), max(lags)),
            )

    def rows(self, name):
        columns = TABLES[name].columns
        return [dict(zip(columns, row, strict=True)) for row in self.table(name)]

    def table(self, name):
        tables = {
            "events": lambda: self.events,
            "events_quarantine": lambda: self.quarantine,
            "ad_touches": self.ad_touches,
            "fact_order": lambda: self.orders,
            "fact_order_line": lambda: self.lines,
            "fact_ad_event": self.fact_ad_event,
            "fact_attribution": lambda: self.attribution,
            "store_daily": self.store_daily,
            "product_daily": lambda: self.lines_daily("product_id", "vendor_store_id"),
            "category_daily": lambda: self.lines_daily("category"),
            "zip_daily": self.zip_daily,
            "ad_daily": self.ad_daily,
            "buyer_first_purchase": self.buyers,
            "admin_weekly": self.weeks,
            "recon_completeness": self.completeness,
            "recon_money": lambda: self.money,
            "outbox_delivery": self.delivery,
        }
        return list(tables[name]())


class Summed:
    def __init__(self, width):
        self.rows = {}
        self.width = width

    def __getitem__(self, key):
        return self.rows.setdefault(key, Row([0] * self.width))

    def tuples(self):
        return [(*key, *row) for key, row in self.rows.items()]


class Row(list):
    def add(self, *values):
        for place, value in enumerate(values):
            self[place] += value


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
