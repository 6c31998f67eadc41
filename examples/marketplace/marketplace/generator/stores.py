"""What stores do besides ordering: licenses and media."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING

from marketplace.generator.clock import DAY, HOUR
from marketplace.generator.population import Store, uuid_stem

if TYPE_CHECKING:
    from marketplace.generator.world import World

_TYPES = ("dispensary", "food_handler", "liquor", "reseller")


class Stores:
    """A license per store, and now and then a picture of a vendor's goods."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tell = world.telling.tell
        self._text = world.telling.text
        self._plan = world.plan
        self._random = Random(f"{world.seed}/stores")
        self._chance = self._random.random

    def begin(self, start: int, end: int) -> None:
        span = end - start
        for store in (*self._world.population.vendors, *self._world.population.buyers):
            self._plan(start + int(self._chance() * min(span, DAY)), self._submit, store)
        for vendor in self._world.population.vendors:
            for _ in range(int(self._chance() * 4)):
                self._plan(start + int(self._chance() * span), self._upload, vendor)

    def _submit(self, at: int, store: Store) -> None:
        self._license(at, store, None, "pending_review")
        self._plan(at + HOUR + int(self._chance() * DAY), self._review, store)

    def _review(self, at: int, store: Store) -> None:
        if self._chance() < 0.9:
            self._license(at, store, "pending_review", "verified")
            if self._chance() < 0.1:
                self._plan(at + 5 * DAY + int(self._chance() * 5 * DAY), self._lapse, store)
        else:
            self._license(at, store, "pending_review", "rejected", "unreadable")

    def _lapse(self, at: int, store: Store) -> None:
        self._license(at, store, "verified", "expired", "not_renewed")

    def _license(
        self, at: int, store: Store, old: str | None, new: str, reason: str | None = None
    ) -> None:
        id_ = f"{store.stem}000501"
        expiry = ""
        if new == "verified":
            expiry = f'"expires_on":"{self._world.first_day + timedelta(days=365)}",'
        was = f'"from_status":"{old}",' if old else ""
        because = f'"reason":"{reason}",' if reason else ""
        kind = _TYPES[int(store.stem[0], 16) % len(_TYPES)]
        data = (
            f'{{{expiry}{was}"license_id":"{id_}","license_type":"{kind}",{because}'
            f'"status":"{new}","store_id":"{store.id}"}}'
        )
        self._tell(at, "license_status_changed", "license", id_, data, store)

    def _upload(self, at: int, vendor: Store) -> None:
        id_ = f"{uuid_stem(self._random)}000000"
        size = 10_000 + int(self._chance() * 5_000_000)
        data = (
            f'{{"kind":"product_photo","media_id":"{id_}","mime_type":"image/jpeg",'
            f'"size_bytes":{size},"store_id":"{vendor.id}","uploaded_at":"{self._text(at)}"}}'
        )
        self._tell(at, "media_uploaded", "media", id_, data, vendor)
