"""Order the middlewares of a chain; the router refuses a wrong order when it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, TypeAlias

from conquiet.errors import ConfigError
from conquiet.handler import Process

Middleware: TypeAlias = Callable[[Process], Process]
"""Takes the rest of the chain and returns a chain around it.

If it blocks its thread while it waits, it declares `blocks = True`: an async worker then runs its
chain in threads."""


class Stage(IntEnum):
    """Orders middlewares, outermost first. A middleware without a stage may be anywhere.

    Retry is outside the transaction: a retry needs a new transaction. So is publishing: outputs of
    a rolled back transaction must not be published. So is a claim: an inbox that cannot commit with
    the effects. Inbox and outbox are inside: they commit with the handler's effects. Middlewares
    that change outputs are inside the outbox, which removes them.
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
    """Insert a middleware just inside the last one that must be outside it."""
    stage = stage_of(item)
    assert stage is not None, "a middleware without a stage has no place"
    outer = [i for i, other in enumerate(middlewares) if (stage_of(other) or stage) < stage]
    place = outer[-1] + 1 if outer else 0
    return [*middlewares[:place], item, *middlewares[place:]]


def check_order(middlewares: Sequence[Middleware]) -> None:
    """Refuse an order that would lose or repeat effects; the error shows the right order."""
    staged = [(stage, item) for item in middlewares if (stage := stage_of(item)) is not None]
    for (before, outer), (after, inner) in pairwise(staged):
        if before > after:
            right = sorted(middlewares, key=_sort_key(middlewares))
            raise ConfigError(
                f"{_name(outer)} is outside {_name(inner)}; it must be inside."
                f" Use this order: router.use({', '.join(_name(item) for item in right)})"
            )
    transactions = [item for stage, item in staged if stage is Stage.TRANSACTION]
    if len(transactions) > 1:
        raise ConfigError(
            f"{len(transactions)} transactions in one chain: the inner one would be committed"
            " although the outer one may fail. Use one database per chain, with its inbox and"
            " outbox; for a second database, return an event, and let a worker with a transaction"
            " there handle it"
        )
    stages = {stage for stage, _ in staged}
    for stage, item in staged:
        if stage in (Stage.INBOX, Stage.OUTBOX) and Stage.TRANSACTION not in stages:
            raise ConfigError(
                f"{_name(item)} works inside a transaction and the chain has none;"
                f" use this order: router.use(Transaction, {_name(item)})"
            )


def _sort_key(middlewares: Sequence[Middleware]) -> Callable[[Middleware], float]:
    """Sort by stage; a middleware without one stays behind its neighbour."""
    places: dict[int, float] = {}
    last = 0.0
    for index, item in enumerate(middlewares):
        stage = stage_of(item)
        last = float(stage) if stage is not None else last
        places[id(item)] = last + index / 1000
    return lambda item: places[id(item)]


def _name(middleware: Middleware) -> str:
    return getattr(middleware, "__name__", None) or type(middleware).__name__
