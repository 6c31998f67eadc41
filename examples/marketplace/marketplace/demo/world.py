"""World: what the generator wants to happen, and what must have happened in the end.

Commands, telemetry and bad events are what is sent; the oracle, which saw the generator at work,
knows the result. Nothing here looks at a server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from conquiet.message import Message
from marketplace.generator import DOMAIN_TOPIC, Entry, Generator, commands, messages
from marketplace.oracle import Oracle

WORLDLY = ("partial_acceptance", "rollup_revisions", "click_without_impression")
"""What goes wrong among people; their commands and the telemetry tell of it."""
BROKEN = (
    *("unknown_type", "unknown_version", "null_data", "invalid_data", "broken_json"),
    "wrong_amounts",
)
"""What a broken producer writes into the log."""
_BROKEN_ORDERS = 5
"""One in so many orders of another world, of which only what is broken is taken."""
_OTHER_SEED = 1_000_003


@dataclass(frozen=True)
class World:
    """What is sent, and what is expected of it."""

    oracle: Oracle
    commands: list[Message[bytes]]
    telemetry: list[Message[bytes]]
    bad: list[Message[bytes]]
    reasons: Counter[str]
    """Why each of the bad events must be refused."""
    events: Counter[str]
    """How many events of each type the services must emit."""

    @property
    def bad_ids(self) -> set[str]:
        """Those of the domain's topic: they are in no outbox."""
        return {message.id for message in self.bad if message.topic == DOMAIN_TOPIC}

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.oracle.rows(table)

    @property
    def revenue_cents(self) -> int:
        return sum(row["revenue_cents"] for row in self.rows("fact_order"))


def make_world(orders: int, seed: int) -> World:
    """Thirty business days of so many orders, each carried through to its end."""
    oracle = Oracle()
    entries = list(Generator(seed=seed, orders=orders, faults=WORLDLY).entries(oracle))
    domain = [entry for entry in entries if not entry.is_telemetry]
    bad, reasons = _broken(orders, seed)
    return World(
        oracle,
        list(commands(domain)),
        list(messages(entry for entry in entries if entry.is_telemetry)),
        list(messages(bad)),
        reasons,
        Counter(entry.type for entry in domain),
    )


def _broken(orders: int, seed: int) -> tuple[list[Entry], Counter[str]]:
    """The broken events of another world: nothing else is known of its orders."""
    oracle = Oracle()
    count = max(200, orders // _BROKEN_ORDERS)
    other = Generator(seed=seed + _OTHER_SEED, orders=count, faults=BROKEN)
    entries = list(other.entries(oracle))
    why = {row["event_id"]: row["reason"] for row in oracle.rows("events_quarantine")}
    return [entry for entry in entries if entry.event_id in why], Counter(why.values())
