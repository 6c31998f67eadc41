"""Story: what one run did and found, from which the report and the summary are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Protocol

from marketplace.demo.audit import Books, Log
from marketplace.demo.business import Business
from marketplace.demo.lake import Lake, Silver
from marketplace.demo.settings import Settings
from marketplace.demo.timeline import Kill, Timeline
from marketplace.demo.verdict import Verdict
from marketplace.demo.world import World


class Teller(Protocol):
    """Whoever is told how the demo goes."""

    def begin(self, what: str, word: str) -> None:
        """A stage begins; the word stands beside its progress."""

    def progress(self, done: int, total: int) -> None:
        """How far it has come."""

    def end(self, what: str) -> None:
        """What has happened."""


class Stage(NamedTuple):
    """A part of the run, in seconds since its beginning."""

    name: str
    began: float
    ended: float


@dataclass
class Story:
    """Filled in as the run goes on."""

    settings: Settings
    stages: list[Stage] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    commands_repeated: int = 0
    world: World = field(init=False)
    books: Books = field(init=False)
    log: Log = field(init=False)
    line: Timeline = field(init=False)
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
        """What a script would read."""
        kill = None
        if self.kill is not None:
            after = round(self.kill.replaced_at - self.kill.at, 2)
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
