"""Stores, their products and ads, and the events of stores alone: licenses and media."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING

import msgspec

from marketplace.generator.clock import DAY, HOUR

if TYPE_CHECKING:
    from marketplace.generator.generator import World

Chance = Callable[[], float]

CATEGORIES = ("bakery", "beverages", "cleaning", "dairy", "frozen", "grocery", "meat", "produce")
UNITS = ("case", "each", "kg", "pallet")
PLACEMENTS = ("category_top", "home_banner", "search_top")
ODD_WORDS = ("Crème brûlée", "日本茶 ☕", "Ñandú 🥚", "Жаркое", "لبن", "a\u0000b", "𝔊ut")
"""Words in titles when the fault `text` is on."""


def uuid_stem(random: Random) -> str:
    """Return all of a UUIDv4 but its last six digits, which number related ids."""
    digits = f"{random.getrandbits(96):024x}"
    return f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:18]}-{digits[18:]}"


def json_text(text: str) -> str:
    return msgspec.json.encode(text).decode()


class Product:
    __slots__ = ("category", "head", "id", "price", "title", "unit")

    def __init__(self, number: int, random: Random) -> None:
        chance = random.random
        self.id = f"{uuid_stem(random)}0000b0"
        self.category = CATEGORIES[int(chance() * len(CATEGORIES))]
        self.unit = UNITS[int(chance() * len(UNITS))]
        self.price = 99 + int(chance() * 12_000)
        self.title = f"{self.category.title()} no. {number}"
        self.head = f'{{"category":"{self.category}","discount_cents":'


class Store:
    """Holds a buyer's or a vendor's store; a vendor's has products and ads."""

    __slots__ = ("ads", "id", "postal_code", "products", "stem", "user")

    def __init__(self, random: Random) -> None:
        self.stem = uuid_stem(random)
        self.id = f"{self.stem}000000"
        self.user = f"u-{self.stem[:8]}"
        self.postal_code = f"60{int(random.random() * 60) + 600}"
        self.products: list[Product] = []
        self.ads: list[Ad] = []


class Ad:
    """Holds an ad: its target is the vendor's store, or one of its products."""

    __slots__ = (
        *("bid", "budget", "clicks", "id", "impressions", "placement"),
        *("status", "stem", "target_id", "target_type", "vendor"),
    )

    def __init__(self, vendor: Store, random: Random) -> None:
        chance = random.random
        self.stem = uuid_stem(random)
        self.id = f"{self.stem}000000"
        self.vendor = vendor
        self.placement = PLACEMENTS[int(chance() * len(PLACEMENTS))]
        if chance() < 0.5:
            self.target_type, self.target_id = "store", vendor.id
        else:
            product = vendor.products[int(chance() * len(vendor.products))]
            self.target_type, self.target_id = "product", product.id
        self.bid = 100 + int(chance() * 900)
        self.budget = 1_000 + int(chance() * 50_000)
        self.status = ""
        self.impressions = 0
        self.clicks = 0


class Population:
    """Creates as many stores, products and ads as the number of orders needs."""

    def __init__(self, seed: str, orders: int) -> None:
        random = Random(f"{seed}/population")
        self.buyers = [Store(random) for _ in range(min(max(orders // 12, 6), 50_000))]
        self.vendors = [Store(random) for _ in range(min(max(orders // 60, 3), 2_000))]
        number = 0
        for vendor in self.vendors:
            for _ in range(15):
                number += 1
                vendor.products.append(Product(number, random))
            vendor.ads = [Ad(vendor, random) for _ in range(int(random.random() * 4))]
        if not any(vendor.ads for vendor in self.vendors):
            self.vendors[0].ads = [Ad(self.vendors[0], random)]
        self.ads = [ad for vendor in self.vendors for ad in vendor.ads]


_TYPES = ("dispensary", "food_handler", "liquor", "reseller")


class Stores:
    """Plans a license per store, and some pictures of a vendor's goods."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._record = world.recorder.record
        self._text = world.recorder.text
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
        self._record(at, "license_status_changed", "license", id_, data, store)

    def _upload(self, at: int, vendor: Store) -> None:
        id_ = f"{uuid_stem(self._random)}000000"
        size = 10_000 + int(self._chance() * 5_000_000)
        data = (
            f'{{"kind":"product_photo","media_id":"{id_}","mime_type":"image/jpeg",'
            f'"size_bytes":{size},"store_id":"{vendor.id}","uploaded_at":"{self._text(at)}"}}'
        )
        self._record(at, "media_uploaded", "media", id_, data, vendor)
