"""Ads: their life, their rollups, and the telemetry of impressions and clicks."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random
from typing import TYPE_CHECKING

from marketplace.generator.clock import DAY, HOUR, MINUTE, SECOND, midnight
from marketplace.generator.faults import FAULTS
from marketplace.generator.orders import Order, Touch
from marketplace.generator.population import Ad, Store, uuid_stem

if TYPE_CHECKING:
    from marketplace.generator.generator import World


class Ads:
    """Plans the life of ads, and the impressions and clicks of buyers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._record = world.recorder.record
        self._text = world.recorder.text
        self._plan = world.plan
        self._random = Random(f"{world.seed}/ads")
        self._chance = self._random.random
        self._ads = world.population.ads
        self._buyers = world.population.buyers
        faults = world.faults
        self._lost = FAULTS["click_without_impression"] * ("click_without_impression" in faults)
        self._again = FAULTS["duplicates"] * ("duplicates" in faults)
        self._revised = FAULTS["rollup_revisions"] * ("rollup_revisions" in faults)

    def begin(self, start: int, end: int, day: date) -> None:
        """Plan the life of every ad, and the rollups of every day."""
        for ad in self._ads:
            self._plan(start + int(self._chance() * 2 * HOUR), self._create, ad)
            if self._chance() < 0.3:
                self._plan(start + 3 * DAY + int(self._chance() * DAY), self._update, ad)
            if self._chance() < 0.3:
                self._plan(start + 5 * DAY + int(self._chance() * DAY), self._pause, ad)
            self._plan(end - int(self._chance() * 3 * DAY), self._expire, ad)
        self._plan(midnight(day + timedelta(days=1)) + 30 * MINUTE, self._roll_up, day)

    # --- life -------------------------------------------------------------------------------

    def _terms(self, ad: Ad) -> tuple[str, str]:
        head = f'"ad_id":"{ad.id}","bid_cents_cpm":{ad.bid},'
        tail = (
            f'"target_id":"{ad.target_id}","target_type":"{ad.target_type}",'
            f'"vendor_store_id":"{ad.vendor.id}"}}'
        )
        return head, tail

    def _create(self, at: int, ad: Ad) -> None:
        ad.status = "draft"
        head, tail = self._terms(ad)
        data = (
            f'{{{head}"daily_budget_cents":{ad.budget},"placement":"{ad.placement}",'
            f'"status":"draft",{tail}'
        )
        actor = ("user", ad.vendor.user, ad.vendor.id)
        self._record(at, "ad_created", "ad", ad.id, data, ad, (ad.bid, ad.budget), actor)
        self._plan(at + MINUTE, self._activate, ad)

    def _update(self, at: int, ad: Ad) -> None:
        if ad.status not in ("active", "paused"):
            return
        old, ad.bid = ad.bid, ad.bid + 10 + int(self._chance() * 50)
        head, tail = self._terms(ad)
        data = (
            f'{{{head}"changes":[{{"field":"bid_cents_cpm","new":{ad.bid},"old":{old}}}],'
            f'"daily_budget_cents":{ad.budget},"placement":"{ad.placement}",{tail}'
        )
        self._record(at, "ad_updated", "ad", ad.id, data, ad, (ad.bid, ad.budget))

    def _activate(self, at: int, ad: Ad) -> None:
        if ad.status in ("draft", "paused"):
            cause = "launched" if ad.status == "draft" else "resumed"
            self._move(at, ad, "ad_activated", "active", cause)

    def _pause(self, at: int, ad: Ad) -> None:
        if ad.status == "active":
            self._move(at, ad, "ad_paused", "paused", "budget_spent")
            self._plan(at + HOUR + int(self._chance() * DAY), self._activate, ad)

    def _expire(self, at: int, ad: Ad) -> None:
        if ad.status in ("active", "paused"):
            self._move(at, ad, "ad_expired", "expired", "end_date")

    def _move(self, at: int, ad: Ad, kind: str, to: str, cause: str) -> None:
        data = (
            f'{{"ad_id":"{ad.id}","cause":"{cause}","changed_at":"{self._text(at)}",'
            f'"from_status":"{ad.status}","vendor_store_id":"{ad.vendor.id}"}}'
        )
        detail = (ad.status, to, cause)
        ad.status = to
        self._record(at, kind, "ad", ad.id, data, ad, detail)

    # --- rollups ----------------------------------------------------------------------------

    def _roll_up(self, at: int, day: date) -> None:
        """Roll up the day that has ended, half an hour after midnight in Chicago."""
        for ad in self._ads:
            if ad.impressions or ad.clicks:
                self._count(at, ad, day)
                ad.impressions = ad.clicks = 0
        if at < self._world.end:
            next_day = day + timedelta(days=1)
            due = midnight(next_day + timedelta(days=1)) + 30 * MINUTE
            self._plan(due, self._roll_up, next_day)

    def _count(self, at: int, ad: Ad, day: date) -> None:
        right = ad.impressions, ad.clicks
        draw = self._chance()
        if draw >= self._revised:
            self._rollup(at, (ad, day, *right, 1))
            return
        self._rollup(at, (ad, day, right[0] * 9 // 10, right[1] // 2, 1))
        revisions = 2 if draw < self._revised / 2 else 3
        for revision in range(2, revisions + 1):
            counted = right if revision == revisions else (right[0], right[1] // 2)
            due = at + (revision - 1) * DAY + int(self._chance() * HOUR)
            self._plan(due, self._rollup, (ad, day, *counted, revision))

    def _rollup(self, at: int, counted: tuple[Ad, date, int, int, int]) -> None:
        ad, day, impressions, clicks, revision = counted
        spend = impressions * ad.bid * 10  # a cent is 10,000 micros, and the bid is per thousand
        data = (
            f'{{"ad_id":"{ad.id}","clicks":{clicks},"day":"{day}","impressions":{impressions},'
            f'"rollup_revision":{revision},"spend_micros":{spend},"timezone":"America/Chicago",'
            f'"vendor_store_id":"{ad.vendor.id}"}}'
        )
        detail = (day, impressions, clicks, spend, revision)
        self._record(at, "ad_daily_rollup_ready", "ad", ad.id, data, ad, detail)

    # --- telemetry --------------------------------------------------------------------------

    def visit(self, at: int) -> None:
        """Let a visitor see ads and buy nothing."""
        buyer = self._buyers[int(self._chance() * len(self._buyers))]
        for _ in range(1 + int(self._chance() * 2)):
            self._show(at, self._any_ad(), buyer)

    def browse(self, at: int, order: Order) -> None:
        """Let a buyer see ads before an order; the checkout presents their tokens."""
        chance, own = self._chance, order.vendor.ads
        for _ in range(int(chance() * 4)):
            is_own = chance() < 0.7 and bool(own)
            ad = own[int(chance() * len(own))] if is_own else self._any_ad()
            order.touches += self._show(at, ad, order.buyer)

    def _any_ad(self) -> Ad:
        return self._ads[int(self._chance() * len(self._ads))]

    def _show(self, at: int, ad: Ad, buyer: Store) -> list[Touch]:
        chance = self._chance
        moment = (
            at + int(chance() * 5) * 7 * SECOND
        )  # coarse, so that some touches have the same time
        clicks, lost, again = chance() < 0.3, chance() < self._lost, chance() < self._again
        if ad.status != "active":
            return []
        stem = uuid_stem(self._random)
        touches = []
        seen = Touch(f"{stem}000001", "impression", ad, buyer, moment)
        if not (clicks and lost):
            ad.impressions += 1
            self._send(seen, again)
            touches.append(seen)
        if clicks:
            ad.clicks += 1
            click = Touch(f"{stem}000002", "click", ad, buyer, moment + 3 * SECOND)
            click.impression = seen
            self._send(click, again)
            touches.append(click)
        return touches

    def _send(self, touch: Touch, again: bool) -> None:
        """Send the token again, as a browser does that got no answer."""
        self._plan(touch.at, self._touch, touch)
        if again:
            touch.events = 2
            self._plan(touch.at + 4 * SECOND, self._touch, touch)

    def _touch(self, at: int, touch: Touch) -> None:
        ad = touch.ad
        of = touch.impression
        clicked = f'"impression_token_id":"{of.token}",' if of is not None else ""
        data = (
            f'{{"ad_id":"{ad.id}","buyer_store_id":"{touch.buyer.id}",{clicked}'
            f'"placement":"{ad.placement}","target_id":"{ad.target_id}",'
            f'"target_type":"{ad.target_type}","token_id":"{touch.token}",'
            f'"vendor_store_id":"{ad.vendor.id}"}}'
        )
        self._record(at, f"ad_{touch.kind}", "", ad.id, data, ad, touch)
