"""The tables of docs/marketplace.md once more, by parsing the log, the slow and obvious way.

The oracle never parses an event, and this never looks at the generator's state. Where they agree
on every row, the contract can be kept by somebody who has nothing but the log.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from math import ceil

from tests.unit.marketplace.second_facts import LINE, LOST, ORDER, Facts, day_of, moment

from marketplace.generator import DOMAIN_TOPIC
from marketplace.oracle import TABLES


def hour_of(at):
    return at.replace(minute=0, second=0, microsecond=0)


def millis(delta):
    return delta // timedelta(milliseconds=1)


def rank(values, percent):
    ordered = sorted(values)
    return ordered[ceil(len(ordered) * percent / 100) - 1] if ordered else None


class Opinion(Facts):
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
                *(silver, len(events) - silver, [], foreign[:100], [], not foreign),
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
