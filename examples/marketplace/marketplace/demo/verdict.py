"""The verdict: the results that the generator expects beside the results that were found.

Found is counted by plain SQL, by XRANGE and from the files of the lake, without the code that wrote
them. Every line must be equal, to the cent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from marketplace.demo.servers import STREAMS, Servers
from marketplace.demo.settings import DEAD_LETTERS
from marketplace.demo.world import World
from marketplace.generator import DOMAIN_TOPIC, TELEMETRY_TOPIC
from marketplace.oracle.tables import differences

_PAGE = 2_000
_MAX_DIFFERENCES = 20
_LOST_STATES = ("canceled", "expired", "rejected")

COMPARED = {
    "fact_order": (),
    "fact_order_line": (),
    "fact_attribution": (),
    "ad_touches": ("first_seen_at",),
    "store_daily": (),
    "product_daily": (),
    "category_daily": (),
    "zip_daily": (),
    "ad_daily": (),
    "buyer_first_purchase": (),
    "admin_weekly": (),
}
"""Tables that are compared cell by cell, with the columns that depend on when the demo ran."""


# --- the stores ------------------------------------------------------------------------------


@dataclass
class Books:
    """Holds what PostgreSQL has: the effects of commands, and the events in the outbox."""

    effects: dict[str, float] = field(default_factory=dict)
    """Ids of commands that took effect, with the start of their transaction in seconds."""
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
    """Holds what Redis has: commands as they were sent, events as they were published."""

    commands: int = 0
    dead_letters: int = 0
    entries: int = 0
    first_seen: dict[str, int] = field(default_factory=dict)
    """Ids of the events of the domain, with the milliseconds of their first entry."""
    created: dict[str, float] = field(default_factory=dict)
    """The start of the transactions of those events, in seconds."""
    touches: int = 0

    @property
    def repeated(self) -> int:
        return self.entries - len(self.first_seen)


def read_books(servers: Servers) -> Books:
    """Read the business tables, the inbox and the outbox by plain SQL."""
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
    """Read the streams by XRANGE."""
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


class Lake:
    """Reads the tables that Spark wrote, from their files, without Spark."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rows(self, name: str, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a table."""
        from deltalake import DeltaTable

        place = str(self._folder / name)
        if not DeltaTable.is_deltatable(place):
            return []
        rows: list[dict[str, Any]] = (
            DeltaTable(place).to_pyarrow_dataset().to_table(columns=columns).to_pylist()
        )
        return rows

    def silver(self) -> Silver:
        return Silver(self)


class Silver:
    """Sorts the events of the log by what the pipeline did with them."""

    def __init__(self, lake: Lake) -> None:
        counted = ["event_id", "delivery_count"]
        events = lake.rows("events", counted)
        touches = [*lake.rows("ad_impression", counted), *lake.rows("ad_click", counted)]
        refused = lake.rows("events_quarantine", ["reason", "delivery_count"])
        self.events = {row["event_id"] for row in events}
        self.touches = len(touches)
        self.reasons = Counter(row["reason"] for row in refused)
        self.dropped = sum(row["delivery_count"] - 1 for row in [*events, *touches, *refused])
        self.dropped += sum(row["entries"] for row in lake.rows("redeliveries", ["entries"]))


# --- the verdict -----------------------------------------------------------------------------


class Line(NamedTuple):
    """Compares one number: the generator's, and the one that was found."""

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
    """Collects the lines, and the differences in detail."""

    lines: list[Line] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return bool(self.lines) and all(line.is_right for line in self.lines)

    def add(self, name: str, expected: int, found: int, *, is_money: bool = False) -> None:
        self.lines.append(Line(name, expected, found, is_money))

    def differ(self, name: str, differences: list[str]) -> None:
        """Add a line that expects no difference, and keep the first differences."""
        self.add(name, 0, len(differences))
        self.differences += differences[:_MAX_DIFFERENCES]

    def as_json(self) -> dict[str, Any]:
        lines = [{**line._asdict(), "ok": line.is_right} for line in self.lines]
        return {"ok": self.is_right, "lines": lines, "differences": self.differences}


def judge_services(verdict: Verdict, world: World, books: Books, log: Log, duplicates: int) -> None:
    """Compare commands, effects, events and their publication on PostgreSQL and Redis."""
    asked = len(world.commands)
    asked_ids = {message.id for message in world.commands}
    verdict.add("commands sent, with duplicates", asked + duplicates, log.commands)
    verdict.add("commands that took effect", asked, len(asked_ids & books.effects.keys()))
    dropped = log.commands - log.dead_letters - len(books.effects)  # sent, and without effect
    verdict.add("duplicates dropped by the workers", duplicates, dropped)
    verdict.add("commands refused", 0, log.dead_letters)
    verdict.differ("orders unlike the generator's", _orders(world, books))
    verdict.add("events in the outbox", world.events.total(), books.events.total())
    verdict.differ("event types with a wrong count", _counts(world.events, books.events))
    published = books.ids & log.first_seen.keys()
    verdict.add("events published", world.events.total(), len(published))
    verdict.add("bad events in the log", len(world.bad_ids), len(log.first_seen.keys() - books.ids))
    verdict.add("events lost", 0, len(books.ids - published) + books.unpublished)
    verdict.add(
        "revenue, generator = books", world.revenue_cents, books.revenue_cents, is_money=True
    )


def prepare_tables(world: World) -> None:
    """Do what `judge_tables` does before it reads a table: there is time while Spark works."""
    import deltalake  # noqa: F401 - half a second
    import pyarrow.dataset  # noqa: F401

    for name in COMPARED:
        world.rows(name)


def judge_tables(verdict: Verdict, world: World, books: Books, log: Log, lake: Lake) -> Silver:
    """Compare the tables that Spark made of the log."""
    silver = lake.silver()
    verdict.add("events in silver", world.events.total(), len(silver.events & books.ids))
    verdict.add("views and clicks of ads in silver", len(world.telemetry), silver.touches)
    verdict.add("duplicates dropped by Spark", log.repeated, silver.dropped)
    verdict.add("events in quarantine", world.reasons.total(), silver.reasons.total())
    verdict.differ("quarantine reasons with a wrong count", _counts(world.reasons, silver.reasons))
    verdict.add("events lost on the way to silver", 0, len(books.ids - silver.events))
    hours = lake.rows("recon_completeness")
    verdict.add(
        "events in no outbox, by Spark", len(world.bad_ids), _count_ids(hours, "foreign_ids")
    )
    lost = _count_ids(hours, "missing_ids") + _count_ids(hours, "lost_ids")
    verdict.add("events missing or lost, by Spark", 0, lost)
    unlike = [text for name in COMPARED for text in _rows(world, lake, name)]
    verdict.differ(f"rows unlike the generator's, {len(COMPARED)} tables", unlike)
    verdict.add("contradictions in money", 0, len(lake.rows("recon_money")))
    revenue = sum(row["revenue_cents"] for row in lake.rows("store_daily", ["revenue_cents"]))
    verdict.add("revenue, generator = Spark", world.revenue_cents, revenue, is_money=True)
    return silver


def _count_ids(hours: list[dict[str, Any]], column: str) -> int:
    return sum(len(row[column]) for row in hours)


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
