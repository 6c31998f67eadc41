"""Timeline: how fast it went, second by second of the run. Business time is another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from conquiet.redis import Topic
from marketplace.charts import Mark, Point
from marketplace.demo.audit import Books, Log
from marketplace.demo.settings import COMMANDS, WORKERS
from marketplace.demo.world import World

_MOST_STEPS = 60


@dataclass(frozen=True)
class Kill:
    """When a worker was killed, and when its work was taken over; seconds of the clock."""

    worker: int
    pid: int
    at: float
    replaced_by: int = 0
    replaced_at: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The seconds from the first command on, in steps of the same length."""

    began: float
    step: float
    count: int
    kill: Kill | None

    def place(self, moment: float) -> float:
        return (moment - self.began) / self.step

    def name(self, place: int) -> str:
        return f"{place * self.step:g} s"

    def per_second(self, moments: Iterable[float]) -> list[Point]:
        found = Counter(int(self.place(moment)) for moment in moments)
        return [(self.name(place), found[place] / self.step) for place in range(self.count)]

    @property
    def marks(self) -> list[Mark]:
        if self.kill is None:
            return []
        text = f"worker {self.kill.worker} killed (SIGKILL)"
        return [Mark(min(self.place(self.kill.at), self.count - 1), text)]


def timeline(began: float, ended: float, kill: Kill | None) -> Timeline:
    """Steps of at least a quarter of a second, and not too many of them."""
    span = max(ended - began, 0.25)
    step = ceil(span / _MOST_STEPS * 4) / 4
    return Timeline(began, step, ceil(span / step) + 1, kill)


def handled(line: Timeline, world: World, books: Books) -> dict[str, list[Point]]:
    """Commands per second, by the worker whose partition they were in."""
    topic = Topic(COMMANDS, WORKERS)
    workers: list[list[float]] = [[] for _ in range(WORKERS)]
    for message in world.commands:
        if message.id in books.effects:
            workers[topic.partition(message.key or message.id)].append(books.effects[message.id])
    return {f"worker {slot + 1}": line.per_second(times) for slot, times in enumerate(workers)}


def published(line: Timeline, books: Books, log: Log) -> list[Point]:
    """Events per second that reached the log for the first time."""
    return line.per_second(ms / 1_000 for event, ms in log.first_seen.items() if event in books.ids)


def lags(books: Books, log: Log) -> dict[str, float]:
    """Milliseconds from the beginning of a transaction to the first entry of its events."""
    found = sorted(
        ms - log.created[event] * 1_000
        for event, ms in log.first_seen.items()
        if event in books.ids
    )
    if not found:
        return {}
    return {
        name: max(0.0, found[ceil(len(found) * part / 100) - 1])
        for name, part in (("p50", 50), ("p95", 95), ("p99", 99), ("longest", 100))
    }


def lag_by_step(line: Timeline, books: Books, log: Log) -> dict[str, list[Point]]:
    """The same over time: the median and the 95th percentile of what was published in a step."""
    steps: dict[int, list[float]] = {}
    for event, ms in log.first_seen.items():
        if event in books.ids:
            lag = max(0.0, ms - log.created[event] * 1_000)
            steps.setdefault(int(line.place(ms / 1_000)), []).append(lag)
    found: dict[str, list[Point]] = {"p50": [], "p95": []}
    for place in range(line.count):
        ordered = sorted(steps.get(place, [0.0]))
        for name, part in (("p50", 50), ("p95", 95)):
            value = ordered[ceil(len(ordered) * part / 100) - 1]
            found[name].append((line.name(place), value))
    return found
