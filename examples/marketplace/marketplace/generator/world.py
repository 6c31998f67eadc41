"""World: the generated marketplace, step by step in time's order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from random import Random
from typing import Any

from marketplace.generator.ads import Ads
from marketplace.generator.clock import HOUR, MINUTE, midnight
from marketplace.generator.order import Order
from marketplace.generator.orders import Orders
from marketplace.generator.population import Population
from marketplace.generator.publication import Publication
from marketplace.generator.stores import Stores
from marketplace.generator.telling import Telling
from marketplace.generator.witness import Witness

Step = Callable[[int, Any], None]

_BUSY = (1, 1, 1, 1, 1, 2, 3, 5, 7, 8, 8, 8, 7, 6, 6, 6, 7, 7, 8, 7, 5, 4, 2, 1)
"""How busy each hour of a day is; night is quiet and never dead."""
_HOURS = [hour for hour, weight in enumerate(_BUSY) for _ in range(weight)]
_FIRST = [_HOURS.index(hour) for hour in range(24)]


class World:
    """Plans what is to happen and lets it happen; its parts tell of it."""

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
        self.telling = Telling(seed, faults, self.publication, witness)
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
        """Let everything happen, up to a moment or to the end; pauses when so much is out."""
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
        """A buyer comes: looks around, then orders; and another one only looks."""
        order = self._orders.draw(number)
        self._ads.browse(at, order)
        self._ads.visit(at)
        self.plan(at + MINUTE + int(self._chance() * 30 * MINUTE), self._orders.create, order)

    def _arrivals(self) -> Iterator[int]:
        """When buyers come, in order: evenly over the days, by the business of their hours."""
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
