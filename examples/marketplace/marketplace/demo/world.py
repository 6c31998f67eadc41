"""The world of one run: the messages that are sent, and the results that are expected.

The generator makes commands, telemetry and bad events; the oracle derives the expected results from
the generator's own state. Nothing here reads a server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from conquiet import Message
from marketplace.generator import DOMAIN_TOPIC, Entry, Generator, commands, messages
from marketplace.oracle import Oracle

BUSINESS_FAULTS = ("partial_acceptance", "rollup_revisions", "click_without_impression")
"""Faults of the business: they are visible in commands and in telemetry."""
PRODUCER_FAULTS = (
    *("unknown_type", "unknown_version", "null_data", "invalid_data", "broken_json"),
    "wrong_amounts",
)
"""Faults of a broken producer, which writes into the log past the outbox."""
_BROKEN_ORDERS = 5
"""The broken events are those of another world, which has one order for so many of this one."""
_OTHER_SEED = 1_000_003


@dataclass(frozen=True)
class World:
    """Holds the messages that are sent and the results that are expected."""

    oracle: Oracle
    commands: list[Message[bytes]]
    telemetry: list[Message[bytes]]
    bad: list[Message[bytes]]
    reasons: Counter[str]
    """How many of the bad events must be refused, by reason."""
    events: Counter[str]
    """How many events of each type the services must emit."""
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    @property
    def bad_ids(self) -> set[str]:
        """The ids of bad events in the domain's topic: they are in no outbox."""
        return {message.id for message in self.bad if message.topic == DOMAIN_TOPIC}

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows that a table must have; they are derived once."""
        if table not in self._rows:
            self._rows[table] = self.oracle.rows(table)
        return self._rows[table]

    @property
    def revenue_cents(self) -> int:
        return sum(row["revenue_cents"] for row in self.rows("fact_order"))


def make_world(orders: int, seed: int) -> World:
    """Generate thirty business days with so many orders, each carried through to its end."""
    oracle = Oracle()
    entries = list(Generator(seed=seed, orders=orders, faults=BUSINESS_FAULTS).entries(oracle))
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
    """Take the broken events of another world, and nothing else of it."""
    oracle = Oracle()
    count = max(200, orders // _BROKEN_ORDERS)
    other = Generator(seed=seed + _OTHER_SEED, orders=count, faults=PRODUCER_FAULTS)
    entries = list(other.entries(oracle))
    why = {row["event_id"]: row["reason"] for row in oracle.rows("events_quarantine")}
    return [entry for entry in entries if entry.event_id in why], Counter(why.values())
