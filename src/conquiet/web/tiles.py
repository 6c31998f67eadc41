"""Tiles: the numbers of the overview, each with what it counts and where more is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from conquiet.web import words
from conquiet.web.concerns import LONG_SECONDS
from conquiet.web.place import link
from conquiet.web.pulse import POINTS, Point, Sample
from conquiet.web.sparkline import line


@dataclass(frozen=True)
class Tile:
    """One number."""

    label: str
    value: str
    unit: str
    href: str
    note: str = ""
    path: str = ""
    """Of its sparkline; empty if there is none."""
    is_bad: bool = False


def flow(request: HTTPConnection, sample: Sample, history: Sequence[Point]) -> list[Tile]:
    """What moves and what waits, with the last two minutes of each."""
    now, groups = history[-1], sample.groups()
    oldest = sample.outbox.oldest_seconds if sample.outbox else 0.0
    behind = max((group.behind_seconds for _, group in groups), default=0.0)
    at_least = "" if all(group.lag_is_exact for _, group in groups) else "≥ "
    by = f"by {len(groups)} groups" if len(groups) > 1 else ""
    lag = f"{at_least}{words.number(now.lag)}"
    rows = "row" if now.waiting == 1 else "rows"
    streams = link(request, "/streams")

    def tile(
        label: str, value: str, unit: str, of: str, note: str = "", waited: float = 0.0
    ) -> Tile:
        path = line([getattr(point, of) for point in history], POINTS)
        href = link(request, "/outbox") if of == "waiting" else streams
        note = f"oldest {words.age(waited)}" if waited else note
        return Tile(label, value, unit, href, note, path, waited > LONG_SECONDS)

    return [
        tile("Outbox waiting", words.number(now.waiting), rows, "waiting", waited=oldest),
        tile("Into the log", words.rate(now.coming), "events/s", "coming"),
        tile("Handled", words.rate(now.handled), "events/s", "handled", by),
        tile("Lag", lag, "unread", "lag", waited=behind),
        tile("In hand", words.number(now.pending), "unacked", "pending"),
    ]


def failures(request: HTTPConnection, sample: Sample) -> list[Tile]:
    """What was given up, and who is there."""
    parked = sample.outbox.parked if sample.outbox else None
    letters = sum(sample.letters.values()) if sample.letters is not None else None
    consumers = [one for _, group in sample.groups() for one in group.consumers]
    gone = sum(not one.alive and one.pending > 0 for one in consumers)
    known = sample.streams is not None
    alive = sum(one.alive for one in consumers) if known else None
    return [
        Tile(
            "Parked in the outbox",
            words.number(parked),
            "row" if parked == 1 else "rows",
            link(request, "/outbox", state="parked"),
            "attempts used up",
            is_bad=bool(parked),
        ),
        Tile(
            "Dead letters",
            words.number(letters),
            "message" if letters == 1 else "messages",
            link(request, "/dead-letters"),
            "given up by consumers",
            is_bad=bool(letters),
        ),
        Tile(
            "Workers alive",
            words.number(alive),
            f"of {len(consumers)}" if known else "",
            link(request, "/processes"),
            f"{words.plural(gone, 'silent one')} with entries in hand" if gone else "",
            is_bad=gone > 0,
        ),
    ]
