"""Generator: a log of the marketplace, the same for the same seed, on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from conquiet.errors import ConfigError
from marketplace.generator.clock import midnight
from marketplace.generator.entry import Entry
from marketplace.generator.faults import faults_of
from marketplace.generator.witness import Witness
from marketplace.generator.world import World

PROFILES = {"documented": 5_000, "scaled": 5_000_000}
"""Orders in a month of 30 days."""

_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class Generator:
    """Settings of a world; every run of it is the same to the byte.

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
        """Entries in the order of their publication, some thousand at a time."""
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
        """Entries in the order of their publication; a witness, as the oracle, is told of all."""
        for batch in self.batches(witness):
            yield from batch
