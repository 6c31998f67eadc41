"""Where a middleware belongs in the chain; a wrong order is refused when the router starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, TypeAlias

from conquiet.errors import ConfigError
from conquiet.handler import Process

Middleware: TypeAlias = Callable[[Process], Process]
"""Takes the rest of the chain and gives a chain with something around it."""


class Stage(IntEnum):
    """The places that have an order, outermost first. A middleware without a stage fits anywhere.

    Retry outside the transaction: a new try needs a new transaction. Publishing outside it too:
    what is rolled back must not go out. A claim outside it as well: it is an inbox that cannot
    commit with the effects. Inbox and outbox inside it: they commit with the handler's effects.
    What marks outputs, inside the outbox: the outbox swallows them.
    """

    DEAD_LETTER = 10
    RETRY = 20
    PUBLISH = 22
    CLAIM = 25
    TRANSACTION = 30
    INBOX = 40
    OUTBOX = 50
    OUTPUT = 60


def stage_of(middleware: Middleware) -> Stage | None:
    stage: Any = getattr(middleware, "stage", None)
    return stage if isinstance(stage, Stage) else None


def insert(middlewares: Sequence[Middleware], item: Middleware) -> list[Middleware]:
    """The chain with one more, just inside the last that must stand outside it."""
    stage = stage_of(item)
    assert stage is not None, "only what has a stage has a place"
    outer = [i for i, other in enumerate(middlewares) if (stage_of(other) or stage) < stage]
    place = outer[-1] + 1 if outer else 0
    return [*middlewares[:place], item, *middlewares[place:]]


def check_order(middlewares: Sequence[Middleware]) -> None:
    """Refuse a chain that would lose or repeat effects, and show the one that would not."""
    staged = [(stage, item) for item in middlewares if (stage := stage_of(item)) is not None]
    for (before, outer), (after, inner) in pairwise(staged):
        if before > after:
            right = sorted(middlewares, key=_sort_key(middlewares))
            raise ConfigError(
                f"{_name(outer)} stands outside {_name(inner)}; it must stand inside."
                f" Use this order: router.use({', '.join(_name(item) for item in right)})"
            )
    stages = {stage for stage, _ in staged}
    for stage, item in staged:
        if stage in (Stage.INBOX, Stage.OUTBOX) and Stage.TRANSACTION not in stages:
            raise ConfigError(
                f"{_name(item)} works inside a transaction and the chain has none;"
                f" use this order: router.use(Transaction, {_name(item)})"
            )


def _sort_key(middlewares: Sequence[Middleware]) -> Callable[[Middleware], float]:
    """By stage; what has none keeps its place behind its neighbour."""
    places: dict[int, float] = {}
    last = 0.0
    for index, item in enumerate(middlewares):
        stage = stage_of(item)
        last = float(stage) if stage is not None else last
        places[id(item)] = last + index / 1000
    return lambda item: places[id(item)]


def _name(middleware: Middleware) -> str:
    return getattr(middleware, "__name__", None) or type(middleware).__name__
