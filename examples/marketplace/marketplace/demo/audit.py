"""Audit: what is there in the end, counted by plain SQL, XRANGE and Parquet, without conquiet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from marketplace.demo.servers import STREAMS, Servers
from marketplace.demo.settings import DEAD_LETTERS
from marketplace.generator.entry import DOMAIN_TOPIC, TELEMETRY_TOPIC

_PAGE = 2_000
_LOST_STATES = ("canceled", "expired", "rejected")


@dataclass
class Books:
    """What PostgreSQL holds: the effects, and the events that tell of them."""

    effects: dict[str, float] = field(default_factory=dict)
    """Commands that took effect, by id, with the time in seconds of their transaction."""
    orders: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """State, collected and paid cents of each order."""
    events: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    unpublished: int = 0

    @property
    def revenue_cents(self) -> int:
        orders = self.orders.values()
        return sum(collected for state, collected, _ in orders if state not in _LOST_STATES)


@dataclass
class Log:
    """What Redis holds: commands as they were sent, and events as they were published."""

    commands: int = 0
    dead_letters: int = 0
    entries: int = 0
    first_seen: dict[str, int] = field(default_factory=dict)
    """Events of the domain by id, with the milliseconds of their first entry."""
    created: dict[str, float] = field(default_factory=dict)
    """When the transactions of those events began, in seconds."""
    touches: int = 0

    @property
    def repeated(self) -> int:
        return self.entries - len(self.first_seen)


def read_books(servers: Servers) -> Books:
    books = Books()
    with servers.connect() as connection:
        for message, at in connection.execute(
            "SELECT message_id, created_at FROM processed_messages"
        ):
            books.effects[str(message).rpartition(" ")[2]] = at.timestamp()
        for id_, *state in connection.execute(
            "SELECT id, status, collected_cents, paid_cents FROM market_orders"
        ):
            books.orders[str(id_)] = (str(state[0]), int(state[1]), int(state[2]))
        for id_, kind, published in connection.execute(
            "SELECT id, event_type::text, published_at FROM outbox_events"
        ):
            books.ids.add(str(id_))
            books.events[kind] += 1
            books.unpublished += published is None
    return books


def read_log(servers: Servers) -> Log:
    log, client = Log(), servers.client
    log.commands = sum(client.xlen(stream) for stream in STREAMS)
    log.dead_letters = client.xlen(DEAD_LETTERS)
    log.touches = client.xlen(TELEMETRY_TOPIC)
    for entry_id, fields in _entries(client, DOMAIN_TOPIC):
        log.entries += 1
        event = fields[b"id"].decode()
        if event not in log.first_seen:
            log.first_seen[event] = int(entry_id.partition(b"-")[0])
            log.created[event] = datetime.fromisoformat(fields[b"time"].decode()).timestamp()
    client.close()
    return log


def _entries(client: Any, stream: str) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    start = "-"
    while page := client.xrange(stream, start, count=_PAGE):
        yield from page
        start = f"({page[-1][0].decode()}"
