"""What a scenario is: stores that are prepared, a path that runs over them, facts to be judged."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
from tests.faults import invariants
from tests.faults.invariants import Facts
from tests.faults.seam import Seam

from conquiet import App, Message
from conquiet.errors import PermanentError
from conquiet.schedule import Schedule, Schedules, State
from conquiet.source import EndOfSource

LEASE = 1.5
"""Seconds; longer than a scenario takes, and what a restart has to wait after a kill."""
READ_SECONDS = 0.02
COMMANDS, GROUP, DEAD = "commands", "billing", "dead"
HOPELESS = frozenset(("c-2",))
SENT = {"c-1": "a", "c-2": "b", "c-3": "a"}
"""Commands, with the keys of their events. Of the batches of two the first has a hopeless one."""


@dataclass(frozen=True)
class Place:
    """The stores of one run, which nobody else uses."""

    redis: str
    postgres: str
    folder: Path

    @property
    def sqlite(self) -> Path:
        return self.folder / "shop.sqlite"

    def client(self) -> redis.Redis:
        """For preparing and judging; conquiet has clients of its own."""
        return redis.Redis.from_url(self.redis)


class Scenario(ABC):
    """One path; it runs in a child until nothing is left to do."""

    name: str
    needs_postgres = False
    lease = 0.0
    """What to wait between a kill and the restart."""
    warms_up = False
    """Whether a first run leaves something on the server that later ones find, as scripts."""
    is_audited = True
    """Whether all its I/O passes through the seam."""

    def serve(self) -> AbstractContextManager[None]:
        """Start servers that all runs share, other than Redis and PostgreSQL."""
        return nullcontext()

    @abstractmethod
    def prepare(self, place: Place) -> None:
        """Fill fresh stores, by raw drivers."""

    @abstractmethod
    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        """The path; the first attempt may be killed, the second must come to its end."""

    @abstractmethod
    def facts(self, place: Place) -> Facts:
        """What the stores hold after the restart."""


def send_commands(client: redis.Redis) -> None:
    client.xgroup_create(COMMANDS, GROUP, id="0", mkstream=True)
    for number, (command, key) in enumerate(SENT.items()):
        data = json.dumps({"command": command, "key": key, "number": number})
        about = {"specversion": "1.0", "id": command, "type": "place.order", "source": "/web"}
        client.xadd(COMMANDS, {**about, "data": data})


def answer(order: dict[str, Any]) -> Message[Any]:
    """What a handler returns, or raises, for a command."""
    if order["command"] in HOPELESS:
        raise PermanentError("it never works")
    return Message(order, {"type": "order.placed", "subject": order["key"]})


def until(
    kind: type, drained: Callable[[], bool], seam: Seam, seconds: float = READ_SECONDS
) -> Any:
    """A source class that ends when nothing came and nothing is left."""

    class UntilDrained(kind):  # type: ignore[misc]
        def read(self, limit: int, timeout: float) -> Any:
            found = super().read(limit, seconds)
            if not found:
                with seam.aside():
                    if drained():
                        raise EndOfSource
            return found

    return UntilDrained


def commands_settled(place: Place) -> Callable[[], bool]:
    return lambda: not invariants.unsettled_entries(place.client(), COMMANDS, GROUP)


def fail_at_first(message: Message[Any]) -> None:
    if message.deliveries == 1:
        raise ValueError("not yet")


# --- ticks of a schedule ------------------------------------------------------------------------

HOUR = 3_600


JOB = Schedule("job", seconds=HOUR, missed="all")


def _hourly(url: str) -> tuple[App, Schedules]:
    app = App("shop", url)
    states = app.store.schedules()
    return app, Schedules({"job": JOB}, states, "shop", "/shop", app.store.publish)


def prepare_schedule(url: str, place: Place) -> None:
    """Let a schedule have three ticks that are due."""
    app, _ = _hourly(url)
    states = app.store.schedules()
    first = states.read()[0] // HOUR * HOUR - 2 * HOUR
    assert states.replace(None, State("job", JOB.definition, first))
    (place.folder / "first").write_text(str(first))
    app.close()


def write_ticks(url: str) -> None:
    app, schedules = _hourly(url)
    schedules.register()
    schedules.beat()
    app.close()


def judge_ticks(place: Place, ids: list[str]) -> list[str]:
    """Return what is wrong: each hour since the first has one tick, in order."""
    first = float((place.folder / "first").read_text())
    count = max(3, len(ids))
    hours = [datetime.fromtimestamp(first + HOUR * n, UTC) for n in range(count)]
    expected = [f"job@{hour:%Y-%m-%dT%H:%M:%SZ}" for hour in hours]
    return [] if ids == expected and count <= 4 else [f"ticks {ids}, not each of {expected} once,"]
