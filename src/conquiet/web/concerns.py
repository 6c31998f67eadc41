"""Concerns: what somebody should look at, the worst first, and what mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from conquiet.web import words
from conquiet.web.advice import advice
from conquiet.web.place import link
from conquiet.web.pulse import Sample

LONG_SECONDS = 60.0
"""What waits for longer than this is worth a word."""


@dataclass(frozen=True)
class Concern:
    """Something that is not as it should be."""

    text: str
    fix: str
    href: str = ""


def concerns(request: HTTPConnection, sample: Sample) -> list[Concern]:
    return [
        *_of_stores(sample),
        *_of_outbox(request, sample),
        *_of_groups(request, sample),
        *_of_letters(request, sample),
    ]


def _of_stores(sample: Sample) -> Iterator[Concern]:
    for store, why in sample.troubles.items():
        yield Concern(f"{store} does not answer: {why}", advice(why))


def _of_outbox(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    figures = sample.outbox
    if figures is None:
        return
    if figures.parked:
        yield Concern(
            f"{words.plural(figures.parked, 'row')} of the outbox used up the attempts",
            "See the last error, mend its cause, then retry.",
            link(request, "/outbox", state="parked"),
        )
    if figures.oldest_seconds > LONG_SECONDS:
        yield Concern(
            f"A row of the outbox has waited for {words.age(figures.oldest_seconds)}",
            "Does a relay run? conquiet relay run publishes the outbox.",
            link(request, "/processes"),
        )


def _of_groups(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    for stream, group in sample.groups():
        left = [(group.lag or 0, "unread"), (group.pending, "in hand of nobody")]
        told = [f"{words.plural(n, 'entry', 'entries')} {what}" for n, what in left if n]
        if told and not group.alive:
            yield Concern(
                f"Nobody reads {stream.name} for group {group.name}: {', '.join(told)}",
                "Start a worker of this group, or remove the group.",
                link(request, "/group", stream=stream.name, name=group.name),
            )


def _of_letters(request: HTTPConnection, sample: Sample) -> Iterator[Concern]:
    for name, count in (sample.letters or {}).items():
        yield Concern(
            f"{words.plural(count, 'dead letter')} in {name}",
            "Look at the reasons, mend them, then replay.",
            link(request, "/dead-letters", stream=name),
        )
