"""The generator: makes a world of orders and ads, the same for the same seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from conquiet.errors import ConfigError
from marketplace.generator.ads import Ads
from marketplace.generator.clock import HOUR, MINUTE, midnight
from marketplace.generator.entry import Entry
from marketplace.generator.faults import faults_of
from marketplace.generator.orders import Order, Orders
from marketplace.generator.population import Population, Stores
from marketplace.generator.publication import Publication, Recorder, Witness

Step = Callable[[int, Any], None]

_BUSY = (1, 1, 1, 1, 1, 2, 3, 5, 7, 8, 8, 8, 7, 6, 6, 6, 7, 7, 8, 7, 5, 4, 2, 1)
"""The weight of each hour of a day."""
_HOURS = [hour for hour, weight in enumerate(_BUSY) for _ in range(weight)]
_FIRST = [_HOURS.index(hour) for hour in range(24)]


class World:
    """Plans the steps of orders, ads and stores, and runs them in order of time."""

    def __init__(
        self,
        seed: str,
        orders: int,
        first_day: date,
        days: int,
        faults: frozenset[str],
        witness: Witness | None,
    ) -> None:
        self.seed = seed
        self.faults = faults
        self.first_day = first_day
        self.start = midnight(first_day)
        self.end = midnight(first_day + timedelta(days=days))
        self.population = Population(seed, orders)
        self.publication = Publication(seed, faults, witness)
        self.recorder = Recorder(seed, faults, self.publication, witness)
        self._order_count = orders
        self._days = days
        self._witness = witness
        self._chance = Random(f"{seed}/world").random
        self._planned: list[tuple[int, int, Step, Any]] = []
        self._count = 0
        self._orders = Orders(self)
        self._ads = Ads(self)
        self._stores = Stores(self)

    def plan(self, at: int, step: Step, subject: Any) -> None:
        self._count += 1
        heapq.heappush(self._planned, (at, self._count, step, subject))

    def finished(self, order: Order) -> None:
        if self._witness is not None:
            self._witness.finished(order)

    def run(self, until: int | None, pause: int) -> Iterator[None]:
        """Run the steps up to a moment or to the end; pause after so many entries."""
        self._ads.begin(self.start, self.end, self.first_day)
        self._stores.begin(self.start, self.end)
        arrivals = self._arrivals()
        arrival = next(arrivals, None)
        planned, pop, out = self._planned, heapq.heappop, self.publication.out
        number = 0
        while planned or arrival is not None:
            if arrival is not None and (not planned or arrival <= planned[0][0]):
                at = arrival
                if until is not None and at >= until:
                    break
                self._arrive(at, number)
                number += 1
                arrival = next(arrivals, None)
            else:
                at, _, step, subject = pop(planned)
                if until is not None and at >= until:
                    break
                step(at, subject)
            if len(out) >= pause:
                yield
        self.publication.finish()
        yield

    def _arrive(self, at: int, number: int) -> None:
        """Let a buyer see ads and order, and another one only see ads."""
        order = self._orders.draw(number)
        self._ads.browse(at, order)
        self._ads.visit(at)
        self.plan(at + MINUTE + int(self._chance() * 30 * MINUTE), self._orders.create, order)

    def _arrivals(self) -> Iterator[int]:
        """Draw the arrivals of buyers: evenly over the days, weighted by hour."""
        count, chance = self._order_count, self._chance
        total = len(_HOURS)
        begin, length = self.start, (self.end - self.start) // self._days
        for number in range(count):
            place = (number + chance()) * self._days / count
            day = int(place)
            weight = (place - day) * total
            hour = _HOURS[int(weight)]
            into = (weight - _FIRST[hour]) / _BUSY[hour]
            yield begin + day * length + hour * HOUR + int(into * HOUR)


PROFILES = {"documented": 5_000, "scaled": 5_000_000}
"""Orders in a month of 30 days."""

_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class Generator:
    """Holds the settings of a world; every run of it is the same to the byte.

    >>> generator = Generator(seed=7, orders=20, faults=["duplicates", "late"])
    >>> first = next(iter(generator.entries()))
    >>> first.topic, first.type, first.time[:10]
    ('pf-domain-events', 'ad_created', '2026-03-01')
    >>> list(generator.entries()) == list(generator.entries())
    True

    `orders` are placed in `days` business days from `first_day` on; without it, as many as the
    `profile` has in that time. What they lead to comes after, up to three weeks later;
    `cut=True` ends the world with its last day instead, whatever is under way. `faults` are names
    from `FAULTS`, or `"all"`.
    """

    seed: int = 0
    profile: str = "documented"
    faults: frozenset[str] | str | Iterable[str] = frozenset()
    orders: int | None = None
    first_day: date = date(2026, 3, 1)
    days: int = 30
    cut: bool = False

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ConfigError(f"profile={self.profile!r}: choose one of {', '.join(PROFILES)}")
        if self.orders is not None and self.orders < 1:
            raise ConfigError(f"orders={self.orders}: generate at least 1")
        if self.days < 1:
            raise ConfigError(f"days={self.days}: at least 1")
        object.__setattr__(self, "faults", faults_of(self.faults))

    def batches(self, witness: Witness | None = None) -> Iterator[list[Entry]]:
        """Yield entries in the order of their publication, some thousand at a time."""
        orders = self.orders or max(1, PROFILES[self.profile] * self.days // 30)
        faults = faults_of(self.faults)
        seed = str(self.seed)
        world = World(seed, orders, self.first_day, self.days, faults, witness)
        last_day = self.first_day + timedelta(days=self.days)
        out = world.publication.out
        for _ in world.run(midnight(last_day) if self.cut else None, _BATCH):
            yield out[:]
            out.clear()

    def entries(self, witness: Witness | None = None) -> Iterator[Entry]:
        """Yield entries in the order of their publication; a witness, as the oracle, sees all."""
        for batch in self.batches(witness):
            yield from batch
