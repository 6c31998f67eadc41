"""What must hold after any fault, read from the stores by raw drivers: no code of conquiet.

`Facts` is what the stores hold, `violations` what is wrong with it. Stores have these shapes:

- SQL: `orders(id, amount)`, where a command adds 1 to its row, and the table `outbox`;
- Redis: the hash `effects`, where a command adds 1 to its field; streams whose entries have `id`,
  `subject` and `data`, a JSON object with `command` and `number`; the inbox keys of consumers.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

PAGE = 10_000
STATEMENTS = {
    "effects": "SELECT id, amount FROM orders",
    "outbox": 'SELECT event_id, "key", data, published_at, parked_at FROM outbox ORDER BY id',
}


@dataclass(frozen=True, slots=True)
class Event:
    """An event, in an outbox or in a log."""

    id: str
    command: str
    key: str
    number: int
    published: bool = False
    parked: bool = False


@dataclass
class Facts:
    """What the stores hold when everything has come to rest."""

    accepted: frozenset[str] = frozenset()
    """Commands that were taken from their sender with a confirmation."""
    hopeless: frozenset[str] = frozenset()
    """Those of them whose handler always fails, after its effects: they are rolled back."""
    effects: Counter[str] | None = None
    """By command, how often it took effect; None where there are no commands."""
    rows: list[Event] = field(default_factory=list)
    """The outbox."""
    log: list[Event] | None = None
    """None where nothing publishes."""
    consumed: Counter[str] | None = None
    """By event, how often consumers with an inbox took it into effect."""
    unsettled: list[str] = field(default_factory=list)
    """Messages that were delivered and are not acked, or were never delivered."""
    locked: list[str] = field(default_factory=list)
    ordered: bool = False
    """Whether the order of each key was promised."""


# --- the invariants -----------------------------------------------------------------------------


def effects_happen_once(facts: Facts) -> Iterator[str]:
    """Every accepted command took effect exactly once, and nothing else did."""
    if facts.effects is None:
        return
    for command in sorted(facts.accepted - facts.hopeless):
        times = facts.effects.get(command, 0)
        if times != 1:
            yield f"command {command} took effect {times} times"
    for command in sorted(set(facts.effects) - facts.accepted):
        yield f"{command} took effect, and nobody sent it"


def committed_events_are_in_the_log(facts: Facts) -> Iterator[str]:
    """Every event of a committed transaction is in the log at least once, under one id."""
    if facts.log is None:
        return
    ids = {event.id for event in facts.log}
    for event in facts.rows:
        if event.id not in ids and not event.parked:
            yield f"event {event.id} of {event.command} is not in the log"
    if facts.effects is not None:
        commands = {event.command for event in facts.log}
        for command in sorted(set(facts.effects) - commands):
            yield f"{command} took effect, and its event is not in the log"
    names: dict[tuple[str, int], set[str]] = {}
    for event in facts.log:
        names.setdefault((event.command, event.number), set()).add(event.id)
    for (command, _), found in names.items():
        if len(found) > 1:
            yield f"the event of {command} has the ids {sorted(found)}"


def rolled_back_events_are_nowhere(facts: Facts) -> Iterator[str]:
    """No effect and no event of a transaction that was rolled back."""
    for command in sorted(facts.hopeless & set(facts.effects or ())):
        yield f"{command} was rolled back, and took effect"
    told = {event.command for event in (*facts.rows, *(facts.log or ()))}
    for command in sorted(facts.hopeless & told):
        yield f"{command} was rolled back, and its event was told"
    if facts.effects is not None:
        for command in sorted(told - set(facts.effects) - facts.hopeless):
            yield f"{command} took no effect, and its event was told"


def marks_mean_confirmed(facts: Facts) -> Iterator[str]:
    """published_at only where the log has the event."""
    if facts.log is None:
        return
    ids = {event.id for event in facts.log}
    for event in facts.rows:
        if event.published and event.id not in ids:
            yield f"event {event.id} is marked as published, and is not in the log"


def consumers_saw_each_event_once(facts: Facts) -> Iterator[str]:
    if facts.consumed is None:
        return
    ids = dict.fromkeys(event.id for event in facts.log or ())
    for event in ids:
        times = facts.consumed.get(event, 0)
        if times != 1:
            yield f"the consumer took event {event} into effect {times} times"
    for event in sorted(set(facts.consumed) - set(ids)):
        yield f"the consumer took event {event} into effect, and the log has no such event"


def keys_keep_their_order(facts: Facts) -> Iterator[str]:
    """What comes for the first time comes in order, within its key."""
    if not facts.ordered:
        return
    highest: dict[str, int] = {}
    seen: set[str] = set()
    for event in facts.log or ():
        if event.id in seen:
            continue
        seen.add(event.id)
        if event.number < highest.get(event.key, event.number):
            yield f"key {event.key}: {event.number} came after {highest[event.key]}"
        highest[event.key] = max(event.number, highest.get(event.key, event.number))


def nothing_waits_for_ever(facts: Facts) -> Iterator[str]:
    """Nothing pending, unpublished, parked or locked when all have had their time."""
    for name in facts.unsettled:
        yield f"{name} is not settled"
    for name in facts.locked:
        yield f"{name} is locked"
    for event in facts.rows:
        if event.parked:
            yield f"event {event.id} is parked"
        elif not event.published and facts.log is not None:
            yield f"event {event.id} is not published"


INVARIANTS: tuple[Callable[[Facts], Iterator[str]], ...] = (
    effects_happen_once,
    committed_events_are_in_the_log,
    rolled_back_events_are_nowhere,
    marks_mean_confirmed,
    consumers_saw_each_event_once,
    keys_keep_their_order,
    nothing_waits_for_ever,
)


def violations(facts: Facts) -> list[str]:
    """What is wrong, each with the invariant that says so."""
    return [f"{rule.__name__}: {what}" for rule in INVARIANTS for what in rule(facts)]


def is_flat(samples: Sequence[float], slack: float, least: float = 0.0) -> bool:
    """Whether a series does not grow: the median of its last third exceeds that of its second by
    no more than `slack`, a fraction, or by `least`. The first third is for warming up."""
    third = len(samples) // 3
    if third < 2:
        return True
    before = median(samples[third:-third])
    return median(samples[-third:]) - before <= max(before * slack, least)


# --- readers ------------------------------------------------------------------------------------


def read_sql(connection: Any, facts: Facts) -> None:
    """`connection` is psycopg's or sqlite3's."""
    if facts.effects is not None:
        facts.effects.update(dict(connection.execute(STATEMENTS["effects"]).fetchall()))
    for event_id, key, data, published, parked in connection.execute(STATEMENTS["outbox"]):
        known = json.loads(bytes(data))
        facts.rows.append(
            Event(
                event_id,
                known["command"],
                key or "",
                known["number"],
                published is not None,
                parked is not None,
            )
        )


def read_log(client: Any, stream: str) -> list[Event]:
    """The entries of a stream, in order."""
    found: list[Event] = []
    after = b"-"
    while page := client.xrange(stream, after, "+", PAGE):
        for entry, fields in page:
            if entry == after:  # the last of the page before
                continue
            known = json.loads(fields[b"data"])
            key = fields.get(b"subject", b"").decode()
            found.append(Event(fields[b"id"].decode(), known["command"], key, known["number"]))
        if len(page) < PAGE:
            break
        after = page[-1][0]
    return found


def read_counts(client: Any, key: str) -> Counter[str]:
    found = client.hscan_iter(key, count=PAGE)
    return Counter({name.decode(): int(count) for name, count in found})


def unsettled_entries(client: Any, stream: str, group: str) -> list[str]:
    """What a group has not acked, or not even read."""
    groups = {found["name"]: found for found in client.xinfo_groups(stream)}
    about = groups[group.encode()]
    held = client.xpending_range(stream, group, "-", "+", 100) if about["pending"] else []
    after = about["last-delivered-id"].decode()
    unread = [id_ for id_, _ in client.xrange(stream, after, "+", 100) if id_.decode() != after]
    names = [entry["message_id"] for entry in held] + unread
    return [f"{stream} {name.decode()}" for name in names]


def held_leases(client: Any) -> list[str]:
    """Inbox keys of messages that are said to be in progress, though nobody is at work."""
    keys = sorted(client.scan_iter("conquiet:inbox:*", count=PAGE))
    held = []
    for first in range(0, len(keys), PAGE):
        some = keys[first : first + PAGE]
        for key, value in zip(some, client.mget(some), strict=True):
            if value is not None and value != b"done":
                held.append(f"{key.decode()} ({value.decode()})")
    return held


def sessions_left(connection: Any) -> list[str]:
    """Transactions of others in this PostgreSQL database, though nobody is at work."""
    found = connection.execute(
        "SELECT pid, state, left(query, 80) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
    )
    return [f"PostgreSQL backend {pid} ({state}: {query})" for pid, state, query in found]


def locks_left(path: Path) -> list[str]:
    """Locks on a SQLite file, or on the file that says whose turn it is to publish."""
    found = []
    try:
        connection = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        connection.close()
    except sqlite3.OperationalError as error:
        found.append(f"{path.name} ({error})")
    for turn in path.parent.glob(f"{path.name}-*-relay"):
        with turn.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(turn.name)
    return found


def told(found: Iterable[str], limit: int = 10) -> str:
    """Some violations, and how many more there are."""
    listed = list(found)
    more = f"\n… and {len(listed) - limit} more" if len(listed) > limit else ""
    return "\n".join(listed[:limit]) + more
