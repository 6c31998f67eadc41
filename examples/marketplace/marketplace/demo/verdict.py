"""Verdict: what the generator expects beside what was found; all must be the same, to the cent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marketplace.demo.audit import Books, Log
from marketplace.demo.lake import COMPARED, Lake, Silver
from marketplace.demo.world import World
from marketplace.oracle.differences import differences

_MOST_TOLD = 20


class Line(NamedTuple):
    """One thing that was counted twice: by the generator, and afterwards."""

    name: str
    expected: int
    found: int
    is_money: bool = False

    @property
    def is_right(self) -> bool:
        return self.expected == self.found

    def text(self, value: int) -> str:
        return f"${value / 100:,.2f}" if self.is_money else f"{value:,}"


@dataclass
class Verdict:
    """All lines, and what differs in detail."""

    lines: list[Line] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return bool(self.lines) and all(line.is_right for line in self.lines)

    def add(self, name: str, expected: int, found: int, *, is_money: bool = False) -> None:
        self.lines.append(Line(name, expected, found, is_money))

    def differ(self, name: str, differences: list[str]) -> None:
        """Nothing may differ; the first that does are told."""
        self.add(name, 0, len(differences))
        self.differences += differences[:_MOST_TOLD]

    def as_json(self) -> dict[str, Any]:
        lines = [{**line._asdict(), "ok": line.is_right} for line in self.lines]
        return {"ok": self.is_right, "lines": lines, "differences": self.differences}


def judge_services(
    verdict: Verdict, world: World, books: Books, log: Log, commands_repeated: int
) -> None:
    """Commands, effects, events and their publication, on PostgreSQL and Redis."""
    asked = len(world.commands)
    asked_ids = {message.id for message in world.commands}
    verdict.add("commands sent, with duplicates", asked + commands_repeated, log.commands)
    verdict.add("commands that took effect", asked, len(asked_ids & books.effects.keys()))
    dropped = log.commands - log.dead_letters - len(books.effects)  # sent, and without effect
    verdict.add("duplicates dropped by the workers", commands_repeated, dropped)
    verdict.add("commands refused", 0, log.dead_letters)
    verdict.differ("orders unlike the generator's", _orders(world, books))
    verdict.add("events in the outbox", world.events.total(), books.events.total())
    verdict.differ("types of events in another number", _counts(world.events, books.events))
    published = books.ids & log.first_seen.keys()
    verdict.add("events published", world.events.total(), len(published))
    verdict.add("bad events in the log", len(world.bad_ids), len(log.first_seen.keys() - books.ids))
    verdict.add("events lost", 0, len(books.ids - published) + books.unpublished)
    verdict.add(
        "revenue, generator = books", world.revenue_cents, books.revenue_cents, is_money=True
    )


def judge_tables(verdict: Verdict, world: World, books: Books, log: Log, lake: Lake) -> Silver:
    """What Spark made of the log."""
    silver = lake.silver()
    verdict.add("events in silver", world.events.total(), len(silver.events & books.ids))
    verdict.add("duplicates dropped by Spark", log.repeated, silver.dropped)
    verdict.add("events in quarantine", world.reasons.total(), silver.reasons.total())
    verdict.differ("reasons of it in another number", _counts(world.reasons, silver.reasons))
    verdict.add("events lost on the way to silver", 0, len(books.ids - silver.events))
    unlike = [text for name in COMPARED for text in _rows(world, lake, name)]
    verdict.differ(f"rows unlike the generator's, {len(COMPARED)} tables", unlike)
    verdict.add("contradictions in money", 0, len(lake.rows("recon_money")))
    revenue = sum(row["revenue_cents"] for row in lake.rows("store_daily", ["revenue_cents"]))
    verdict.add("revenue, generator = Spark", world.revenue_cents, revenue, is_money=True)
    return silver


def _orders(world: World, books: Books) -> list[str]:
    expected = {
        row["order_id"]: (row["state"], row["collected_cents"], row["paid_cents"])
        for row in world.rows("fact_order")
    }
    return [
        f"order {id_}: {books.orders.get(id_)}, should be {expected.get(id_)}"
        for id_ in sorted(expected.keys() | books.orders.keys())
        if expected.get(id_) != books.orders.get(id_)
    ]


def _counts(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    return [
        f"{name}: {found.get(name, 0)}, should be {expected.get(name, 0)}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name, 0) != found.get(name, 0)
    ]


def _rows(world: World, lake: Lake, name: str) -> list[str]:
    left_out = COMPARED[name]
    expected = [
        {column: value for column, value in row.items() if column not in left_out}
        for row in world.rows(name)
    ]
    return list(differences(name, expected, lake.rows(name)))
