"""The story of one run: its stages, the kill, what was found; the report is made from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from marketplace.demo.settings import Settings
from marketplace.demo.verdict import Books, Lake, Log, Silver, Verdict
from marketplace.demo.world import World


class Stage(NamedTuple):
    """Names a part of the run, with its seconds since the beginning."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class Kill:
    """Records when a worker was killed and when another process took over, in clock seconds."""

    worker: int
    pid: int
    at: float
    replaced_by: int = 0
    replaced_at: float = 0.0

    @property
    def outage_seconds(self) -> float:
        return self.replaced_at - self.at


@dataclass(frozen=True)
class Business:
    """Holds dollars by business day and by product, and how many orders reached each step."""

    source: str
    revenue: list[tuple[str, float]]
    products: list[tuple[str, float]]
    funnel: list[tuple[str, float]]


@dataclass
class Story:
    """Collects what happened while the run goes on."""

    settings: Settings
    stages: list[Stage] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    duplicates: int = 0
    """Commands that were sent twice."""
    world: World = field(init=False)
    books: Books = field(init=False)
    log: Log = field(init=False)
    first_sent: float = 0.0
    last_published: float = 0.0
    """Clock seconds of the first command and of the last publication."""
    kill: Kill | None = None
    lake: Lake | None = None
    silver: Silver | None = None
    business: Business = field(init=False)
    began: float = field(default_factory=monotonic)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        at = monotonic() - self.began
        yield
        self.stages.append(Stage(name, at, monotonic() - self.began))

    @property
    def seconds(self) -> float:
        return max((stage.ended for stage in self.stages), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict, the stages and the kill for scripts."""
        kill = None
        if self.kill is not None:
            after = round(self.kill.outage_seconds, 2)
            kill = {"pid": self.kill.pid, "replaced_by": self.kill.replaced_by, "after": after}
        return {
            **self.verdict.as_json(),
            "orders": self.settings.orders,
            "seed": self.settings.seed,
            "spark": self.settings.spark,
            "seconds": round(self.seconds, 1),
            "stages": {stage.name: round(stage.ended - stage.began, 2) for stage in self.stages},
            "kill": kill,
        }
