"""The state of a group that reads an outbox as a log: its rows, and what a member holds of them.

    partition of a group:   free ──take──▶ leased ──close──▶ free
                                             │ another member asks for it: hand it over when drained
                                             └ lease over: another member takes it

A row of `outbox_positions` says how far a partition was read, who holds it until when, and has a
version that each write changes: a member that lost the partition knows an old one, and cannot
move the position any more. A row of `outbox_retries` is a message that failed; the position passes
it.
"""

from __future__ import annotations

import json
import math
import random
import re
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, NamedTuple, Protocol, Self

from sqlalchemy import Connection, Engine, TextClause, text

from conquiet import attempts
from conquiet.acking import Error
from conquiet.errors import ConfigError
from conquiet.sql import dialect
from conquiet.sql.claim import error_text
from conquiet.sql.log import Position
from conquiet.sql.schema import outbox_table, positions_table, retries_table

Start = Literal["beginning", "now"]
Range = tuple[Position, Position]
LAST = Position(2**62, 0)
"""A position behind all others."""
KAFKA_PREFIX = "kafka:"
"""Distinguishes a topic of Kafka, whose offsets are kept here, from one of an outbox."""
_MAX_TRACEBACK_CHARS = 4_000


class LogRow(NamedTuple):
    """Holds a row of the log."""

    xid: int
    id: int
    partition: int
    event_type: str
    event_id: str
    key: str | None
    content_type: str
    data: bytes
    attributes: str


@dataclass(eq=False, slots=True)
class Delivery:
    """Holds a row that was delivered; the token of its message's acking."""

    tenure: Tenure
    row: LogRow
    position: Position
    attempts: int = 1
    errors: str | None = None
    """Those of earlier attempts, as the table has them."""
    is_retry: bool = False
    is_out: bool = False
    """Whether a worker has it."""
    is_settled: bool = False
    is_counted: bool = False
    """Whether the version that its tenure knows counts it as settled, also before the commit."""
    is_tried: bool = False
    """Whether a transaction moved the position past it; it may have been committed or not."""
    is_moved: bool = False
    """Whether the last transaction with it did."""

    @property
    def key(self) -> str | None:
        return self.row.key


@dataclass(eq=False, slots=True)
class Tenure:
    """Holds the state of a partition for as long as this member holds it without a break."""

    partition: int
    version: int
    cursor: Position
    """Up to which rows were read."""
    written: Position
    """The position, as far as it is known to be in the table."""
    settled: Sequence[Range]
    """Ranges behind the position that an earlier member had settled."""
    crashes: int = 0
    """1 if a member died with the partition; more if the message at the position was delivered
    alone since then, and its members died with it."""
    is_blamed: bool = False
    """Whether such a delivery is under way, and counted already."""
    careful: int = 0
    """How many messages are still to be read one by one."""
    is_lost: bool = False
    is_leaving: bool = False
    order: deque[Delivery] = field(default_factory=deque)
    """The deliveries behind the position, in the order of the log."""
    retries: dict[int, Delivery] = field(default_factory=dict)
    """The retries that a worker has, by the id of their row."""

    def progress(self, also: Collection[Delivery] = ()) -> tuple[Position, list[Range]]:
        """Return position and settled ranges behind it, as if `also` were settled too.

        What other transactions have counted is part of it: the version that they write is the one
        that this move expects, so that it fails if they are rolled back.
        """
        position: Position | None = None
        ranges: list[Range] = []
        last: Position | None = None
        first: Position | None = None
        for delivery in self.order:
            if delivery.is_settled or delivery.is_counted or delivery in also:
                first = first or delivery.position
                last = delivery.position
                continue
            if position is None:
                position = last or self.written
            elif first is not None and last is not None:
                ranges.append((first, last))
            first = last = None
        if position is None:  # all are settled
            position = self.cursor
        elif first is not None and last is not None:
            ranges.append((first, last))
        # What an earlier member had settled and this one has not read yet.
        return position, ranges + [found for found in self.settled if found[1] > self.cursor]

    @property
    def is_at_position(self) -> bool:
        """Return whether the next row read is the first that is not settled."""
        return all(delivery.is_settled for delivery in self.order)

    def trim(self) -> None:
        """Forget the settled deliveries that the position has passed."""
        while self.order and self.order[0].is_settled:
            self.written = self.order.popleft().position

    def count(self, also: Collection[Delivery]) -> None:
        for delivery in also:
            delivery.is_counted = True

    def recount(self, row: PartitionRow) -> None:
        for delivery in self.order:
            delivery.is_counted = is_covered(row, delivery.position)

    @property
    def has_caught_up(self) -> bool:
        """Return whether all was read that an earlier member had read; retries come after that."""
        return not self.settled or self.cursor >= self.settled[-1][1]

    def is_drained(self) -> bool:
        return not self.retries and not any(item.is_out for item in self.order)


class Lost(Exception):
    """Another member has taken these partitions."""

    def __init__(self, tenures: Collection[Any]) -> None:
        super().__init__(f"{len(tenures)} partitions were taken by other members")
        self.tenures = tenures


@dataclass(frozen=True, slots=True)
class Park:
    """Describes a delivery that waits for a retry, or is dead."""

    delivery: Delivery
    attempts: int
    seconds: float
    """Until the retry."""
    error: Error
    is_dead: bool = False
    holds_key: bool = True
    """Whether later messages of its key wait for it."""

    @property
    def key(self) -> str | None:
        return self.delivery.key if self.holds_key else None

    @property
    def reason(self) -> str | None:
        return None if self.attempts == 0 else error_text(self.error)

    @property
    def errors(self) -> tuple[str, str] | tuple[None, None]:
        """Return the errors of all attempts, up to the time of the last one, and behind it."""
        if self.attempts == 0:
            return None, None
        return attempts.append(self.delivery.errors, self.attempts, self.error)

    @property
    def traceback(self) -> str | None:
        if self.error is None:
            return None
        lines = "".join(traceback.format_exception(self.error)).replace("\0", "\ufffd")
        return lines[-_MAX_TRACEBACK_CHARS:].encode(errors="replace").decode()


class Holding(Protocol):
    """Holds what a member knows of a partition, and moves its position by versions."""

    version: int
    is_lost: bool

    @property
    def partition(self) -> int: ...

    def progress(self, also: Collection[Any]) -> tuple[Position, Sequence[Range]]:
        """Return position and settled ranges behind it, as if `also` were settled too."""

    def count(self, also: Collection[Any]) -> None:
        """Let the next moves include deliveries, whose transaction may still roll back."""

    def recount(self, row: PartitionRow) -> None:
        """Let the next moves include what a row of positions says, and nothing else."""


class Move(NamedTuple):
    """Describes a move of a position."""

    tenure: Any
    """A `Holding`."""
    position: Position
    settled: Sequence[Range]
    seen: int
    version: int

    @classmethod
    def of(cls, tenure: Holding, also: Collection[Any]) -> Self:
        position, settled = tenure.progress(also)
        tenure.count(also)
        seen, tenure.version = tenure.version, new_version()
        return cls(tenure, position, settled, seen, tenure.version)


def is_covered(row: PartitionRow, position: Position) -> bool:
    """Return whether a position is settled by what a row of positions says."""
    if position <= Position(row.xid, row.id):
        return True
    return any(first <= position <= last for first, last in row.ranges)


def new_version() -> int:
    return random.getrandbits(62)


class PartitionRow(NamedTuple):
    """Holds a row of positions."""

    partition: int
    xid: int
    id: int
    settled: str
    version: int
    owner: str | None
    claimant: str | None
    crashes: int
    seconds_left: float

    @property
    def ranges(self) -> list[Range]:
        return [(Position(a, b), Position(c, d)) for a, b, c, d in json.loads(self.settled)]


class GroupTables:
    """Reads and writes the rows of one group, in transactions of its callers."""

    def __init__(self, engine: Engine, outbox: str, topic: str, group: str) -> None:
        self._is_postgresql = dialect.is_postgresql(engine.dialect)
        self._uses_psycopg = dialect.uses_psycopg(engine.dialect)
        self._now = dialect.write_epoch(engine.dialect)
        quote = engine.dialect.identifier_preparer.format_table
        self.positions = positions_table(outbox).fullname
        self._names = {
            "outbox": quote(outbox_table(outbox)),
            "positions": quote(positions_table(outbox)),
            "retries": quote(retries_table(outbox)),
        }
        self._retries = retries_table(outbox).fullname
        self._keeps_errors = False
        self._group = {"topic": topic, "group": group}
        self._statements: dict[str, TextClause] = {}
        self._drivers: dict[str, str] = {}

    def _run(self, connection: Connection, template: str, given: Any = None) -> Any:
        statement = self._statements.get(template)
        if statement is None:
            statement = self._statements[template] = text(self._fill(template))
        if isinstance(given, list):
            return connection.execute(statement, [self._group | each for each in given])
        return connection.execute(statement, self._group | (given or {}))

    def _fill(self, template: str) -> str:
        """Write a statement for this database: `now`, and `any(name)` for one of a list."""
        words = self._names | {"now": self._now}
        if self._is_postgresql:
            words["of"] = "= ANY(CAST(:{} AS bigint[]))"
            # An index can be searched by it, unlike by a clock that moves within a statement.
            words["start"] = "extract(epoch FROM statement_timestamp())::float8"
            words["keys"] = "unnest(CAST(:keys AS text[])) AS k (value)"
        else:
            words["of"] = "IN (SELECT value FROM json_each(:{}))"
            words["start"] = self._now
            words["keys"] = "json_each(:keys) AS k"
        for name, word in words.items():
            template = template.replace(f"<{name}>", word)
        for name in ("partitions", "ids", "out"):
            template = template.replace(f"<in {name}>", words["of"].format(name))
        return template

    def _list(self, values: Sequence[int]) -> Any:
        return list(values) if self._is_postgresql else json.dumps(list(values))

    # --- the log ----------------------------------------------------------------------------

    def horizon(self, connection: Connection, after: Position) -> Position:
        """Return up to where the log can be read now."""
        if self._is_postgresql:
            oldest, following = map(int, connection.exec_driver_sql(_HORIZON).one())
            if after.xid > following:
                raise ConfigError(
                    f"the position {after} of group {self._group['group']!r} lies beyond the end of"
                    " the log: the database was restored into another cluster, whose transactions"
                    ' are numbered from the start; see "Another cluster" in'
                    " docs/how-to/no-broker.md"
                )
            return max(Position(oldest, 0), after)
        found = self._run(connection, "SELECT max(id) FROM <outbox>").scalar_one()
        return max(Position(0, found or 0), after)

    def rows(
        self,
        connection: Connection,
        after: Position,
        until: Position,
        chosen: Sequence[int] | None,
        partitions: int,
        limit: int,
    ) -> Sequence[LogRow]:
        """Return up to `limit` rows behind `after`, up to `until`, of the chosen partitions."""
        template = _ROWS_POSTGRESQL if self._is_postgresql else _ROWS_SQLITE
        only = "" if chosen is None else "AND (<partition>) <in partitions>"
        template = template.replace("<chosen>", only)
        template = template.replace("<partition>", self._partition(connection, partitions))
        given = {
            "after_xid": str(after.xid) if self._is_postgresql else after.xid,
            "after_id": after.id,
            "until_xid": str(until.xid) if self._is_postgresql else until.xid,
            "until_id": until.id,
            "count": partitions,
            "limit": limit,
        }
        if chosen is not None:
            given["partitions"] = self._list(chosen)
        if not self._uses_psycopg:
            return [LogRow._make(row) for row in self._run(connection, template, given)]
        # By the driver, which is several times as fast.
        statement = self._drivers.get(template)
        if statement is None:
            statement = _name.sub(r"%(\1)s", self._fill(template).replace("%", "%%"))
            self._drivers[template] = statement
        with (
            dialect.translate_errors(connection),
            dialect.driver_connection(connection).cursor(binary=True) as cursor,
        ):
            return [LogRow._make(row) for row in cursor.execute(statement, self._group | given)]

    def rows_by_id(
        self, connection: Connection, ids: Sequence[int], partitions: int
    ) -> Sequence[LogRow]:
        template = _BY_ID_POSTGRESQL if self._is_postgresql else _BY_ID_SQLITE
        template = template.replace("<partition>", self._partition(connection, partitions))
        given = {"ids": self._list(ids), "count": partitions}
        return [LogRow._make(row) for row in self._run(connection, template, given)]

    def _partition(self, connection: Connection, partitions: int) -> str:
        """Return the expression of a row's partition; the same function on both databases."""
        if self._is_postgresql:
            if partitions == 1:
                return "0 * CAST(:count AS integer)"
            key = "convert_to(coalesce(o.key, o.id::text), 'UTF8')"
            return f"get_byte(sha256({key}), 0) % CAST(:count AS integer)"
        if partitions == 1:
            return "0 * :count"
        dialect.driver_connection(connection).create_function(
            "conquiet_partition", 3, partition_of, deterministic=True
        )
        return "conquiet_partition(o.key, o.id, :count)"

    # --- positions --------------------------------------------------------------------------

    def survey(self, connection: Connection) -> Sequence[PartitionRow]:
        return [PartitionRow._make(row) for row in self._run(connection, _SURVEY)]

    def lock(self, connection: Connection, partitions: Sequence[int]) -> dict[int, PartitionRow]:
        """Lock rows of positions until the transaction ends, and return them."""
        suffix = " FOR UPDATE" if self._is_postgresql else ""
        template = _SURVEY.replace("ORDER", "AND partition <in partitions> ORDER") + suffix
        found = self._run(connection, template, {"partitions": self._list(partitions)})
        return {row.partition: PartitionRow._make(row) for row in found}

    def create(self, connection: Connection, partitions: int, start: Start) -> None:
        position = Position() if start == "beginning" else self.horizon(connection, Position())
        self.add(connection, range(partitions), position)

    def add(self, connection: Connection, partitions: Iterable[int], position: Position) -> None:
        """Add rows of partitions, unless they exist."""
        where = {"xid": position.xid, "id": position.id}
        self._run(connection, _CREATE, [{"partition": number, **where} for number in partitions])

    def take(
        self, connection: Connection, member: str, lease: float, partitions: Sequence[int]
    ) -> Sequence[PartitionRow]:
        given = {
            "member": member,
            "lease": lease,
            "version": new_version(),
            "partitions": self._list(partitions),
        }
        return [PartitionRow._make(row) for row in self._run(connection, _TAKE, given)]

    def renew(self, connection: Connection, member: str, lease: float) -> set[int]:
        found = self._run(connection, _RENEW, {"member": member, "lease": lease})
        return set(found.scalars())

    def move(
        self, connection: Connection, member: str, moves: Sequence[Move], *, durably: bool = True
    ) -> Collection[int]:
        """Move positions whose versions are still known; return their partitions."""
        rows = [
            (
                move.tenure.partition,
                move.position.xid,
                move.position.id,
                json.dumps([[*first, *last] for first, last in move.settled]),
                move.seen,
                move.version,
            )
            for move in moves
        ]
        given: dict[str, Any] = {"member": member}
        if not self._is_postgresql:
            given["rows"] = json.dumps(rows)
            found = self._run(connection, _MOVE_SQLITE, given)
        else:
            columns = zip(*rows, strict=True)
            names = ("partitions", "xids", "ids", "settled", "seen", "versions")
            given |= {name: list(column) for name, column in zip(names, columns, strict=True)}
            template = _MOVE_POSTGRESQL.replace("<off>", "" if durably else _NO_WAIT)
            found = self._run(connection, template, given)
        return set(found.scalars())

    def advance(
        self,
        connection: Connection,
        member: str,
        deliveries: Mapping[Any, Collection[Any]],
        memory: AbstractContextManager[object],
        *,
        durably: bool = True,
    ) -> None:
        """Move positions past deliveries, by tenure; raise `Lost` if one is no longer ours.

        `memory` guards the tenures.
        """
        with memory:
            # In one order, so that two transactions do not wait for each other.
            ordered = sorted(deliveries, key=lambda tenure: tenure.partition)
            moves = [Move.of(tenure, deliveries[tenure]) for tenure in ordered]
        moved = self.move(connection, member, moves, durably=durably)
        if len(moved) == len(moves):
            return
        # Another transaction of this member has moved it, or another member has taken it.
        found = self.lock(connection, [move.tenure.partition for move in moves])
        # A member takes a partition again only after it has dropped its former tenure.
        lost = [
            tenure
            for tenure in deliveries
            if tenure.is_lost
            or tenure.partition not in found
            or found[tenure.partition].owner != member
        ]
        if lost:
            raise Lost(lost)
        with memory:
            again = []
            for tenure, also in deliveries.items():
                if tenure.partition not in moved:
                    row = found[tenure.partition]
                    tenure.recount(row)
                    tenure.version = row.version
                    again.append(Move.of(tenure, also))
        if len(self.move(connection, member, again)) != len(again):
            raise Lost([move.tenure for move in again])

    def blame(self, connection: Connection, member: str, partition: int) -> None:
        """Count a crash of the message at the position before it is delivered."""
        self._run(connection, _BLAME, {"member": member, "partition": partition})

    def clear(self, connection: Connection, member: str, partitions: Sequence[int]) -> None:
        """Take back what `blame` has counted: there was no crash."""
        given = {"member": member, "partitions": self._list(partitions)}
        self._run(connection, _CLEAR, given)

    def hand_over(
        self, connection: Connection, member: str, claimant: str, lease: float, move: Move
    ) -> None:
        if self.move(connection, member, [move]):
            given = {
                "member": member,
                "claimant": claimant,
                "lease": lease,
                "version": new_version(),
                "partition": move.tenure.partition,
            }
            self._run(connection, _HAND_OVER, given)

    def ask(self, connection: Connection, member: str, partitions: Sequence[int]) -> None:
        self._run(connection, _ASK, {"member": member, "partitions": self._list(partitions)})

    def release(self, connection: Connection, member: str) -> None:
        self._run(connection, _RELEASE, {"member": member, "version": new_version()})

    # --- retries ----------------------------------------------------------------------------

    def _with_errors(self, connection: Connection, template: str) -> str:
        """Leave out the column `errors` where the table is of an older conquiet."""
        if not self._keeps_errors:
            self._keeps_errors = dialect.has_column(connection, self._retries, "errors")
        for marker, there, missing in _ERRORS:
            template = template.replace(marker, there if self._keeps_errors else missing)
        return template

    def park(self, connection: Connection, parks: Sequence[Park]) -> None:
        if parks:
            template = self._with_errors(connection, _PARK)
            self._run(connection, template, [self._parameters(park) for park in parks])

    def fail(self, connection: Connection, parks: Sequence[Park]) -> None:
        if parks:
            template = self._with_errors(connection, _FAIL)
            self._run(connection, template, [self._parameters(park) for park in parks])

    def _parameters(self, park: Park) -> Mapping[str, Any]:
        row = park.delivery.row
        before, behind = park.errors
        return {
            "errors_before": before,
            "errors_behind": behind,
            "id": row.id,
            "xid": row.xid,
            "partition": row.partition,
            "key": park.key,
            "attempts": park.attempts,
            "seconds": park.seconds,
            "reason": park.reason,
            "traceback": park.traceback,
            "is_dead": int(park.is_dead),
        }

    def claim_retries(
        self,
        connection: Connection,
        partitions: Sequence[int],
        out: Sequence[int],
        until: Position,
        limit: int,
    ) -> dict[int, Any]:
        """Count an attempt of retries up to `until` that are due.

        Return their rows by id, with `attempts` and `errors`.
        """
        given = {
            "partitions": self._list(partitions),
            "out": self._list(out),
            "until_xid": until.xid,
            "until_id": until.id,
            "limit": limit,
        }
        template = self._with_errors(connection, _CLAIM)
        return {row.id: row for row in self._run(connection, template, given)}

    def find_waiting_keys(self, connection: Connection, keys: Iterable[str]) -> set[str]:
        """Return those of the keys with a message that waits for a retry, or is tried."""
        given = list(keys) if self._is_postgresql else json.dumps(list(keys))
        return set(self._run(connection, _WAITING_KEYS, {"keys": given}).scalars())

    def seconds_to_retry(
        self, connection: Connection, partitions: Sequence[int], out: Sequence[int]
    ) -> float:
        """Return the seconds until the next retry is due; infinite if none waits."""
        given = {"partitions": self._list(partitions), "out": self._list(out)}
        seconds = self._run(connection, _NEXT, given).scalar_one_or_none()
        return math.inf if seconds is None else float(seconds)

    def find_retries(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        if not ids:
            return set()
        return set(self._run(connection, _FIND_RETRIES, {"ids": self._list(ids)}).scalars())

    def remove_retries(self, connection: Connection, ids: Sequence[int]) -> int:
        if not ids:
            return 0
        return len(self._run(connection, _REMOVE, {"ids": self._list(ids)}).all())

    def give_back(self, connection: Connection, ids: Sequence[int]) -> None:
        if ids:
            self._run(connection, _GIVE_BACK, {"ids": self._list(ids)})

    # --- operations -------------------------------------------------------------------------

    def lag(self, connection: Connection, partitions: int) -> tuple[int, float]:
        """Return how many rows the group has not passed, and the age of the oldest in seconds."""
        template = _LAG_POSTGRESQL if self._is_postgresql else _LAG_SQLITE
        template = template.replace("<partition>", self._partition(connection, partitions))
        row = self._run(connection, template, {"count": partitions}).one()
        return int(row[0]), max(0.0, float(row[1] or 0.0))

    def count_retries(self, connection: Connection) -> tuple[int, int]:
        """Return how many messages wait for a retry, and how many are dead."""
        row = self._run(connection, _COUNT_RETRIES).one()
        return int(row[0]) - int(row[1]), int(row[1])

    def dead_letters(self, connection: Connection, after: Position, limit: int) -> Sequence[Any]:
        """Return dead letters behind `after`, in the order of the log."""
        text_of = "o.attributes::text" if self._is_postgresql else "o.attributes"
        template = self._with_errors(connection, _DEAD_LETTERS).replace("<attributes>", text_of)
        return list(self._run(connection, template, {**after._asdict(), "limit": limit}))

    def list_waiting(self, connection: Connection, limit: int) -> Sequence[Any]:
        """Return messages that wait for a retry, the next one first."""
        template = self._with_errors(connection, _WAITING)
        return list(self._run(connection, template, {"limit": limit}))

    def hurry(self, connection: Connection, ids: Sequence[int] | None = None) -> set[int]:
        """Make messages due that wait for a retry, by default all; return their ids.

        Of given ones not those that were not tried yet: they follow the others of their key.
        """
        return self._change(connection, _HURRY, ids, "AND attempts > 0")

    def give_up(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        """Make dead letters of messages that wait for a retry; return their ids."""
        return self._change(connection, _GIVE_UP, ids)

    def _change(
        self, connection: Connection, template: str, ids: Sequence[int] | None, only: str = ""
    ) -> set[int]:
        if ids is None:
            return set(self._run(connection, template.replace("<only>", "")).scalars())
        template = template.replace("<only>", f"AND id <in ids> {only}")
        changed = set(self._run(connection, template, {"ids": self._list(ids)}).scalars())
        if changed:
            self._run(connection, _FREE, {"ids": self._list(sorted(changed))})
        return changed

    def revive(self, connection: Connection, id_: int) -> bool:
        """Let a dead letter be tried again; return False if it is gone."""
        template = self._with_errors(connection, _REVIVE)
        return bool(self._run(connection, template, {"id": id_}).rowcount)

    def remove(self, connection: Connection) -> int:
        """Remove the group; return how many partitions it had."""
        self._run(connection, _REMOVE_RETRIES)
        return int(self._run(connection, _REMOVE_POSITIONS).rowcount)


def partition_of(key: str | None, id_: int, partitions: int) -> int:
    """Return the partition of an event; PostgreSQL computes the same.

    >>> partition_of("customer-7", 1, 8)
    4
    """
    return sha256((key or str(id_)).encode()).digest()[0] % partitions


_name = re.compile(r"(?<!:):([a-z_]+)")
_OURS = "consumer_group = :group AND topic = :topic"
_ROW = "partition, xid, id, settled, version, owner, claimant, crashes, lease_until - <now>"
_HORIZON = """
SELECT pg_snapshot_xmin(now.snapshot)::text, pg_snapshot_xmax(now.snapshot)::text
  FROM (SELECT pg_current_snapshot() AS snapshot) AS now
"""
# The comparisons are row-wise, so that the index on (xid, id) is entered at the position.
_COLUMNS_POSTGRESQL = """o.xid::text::bigint AS xid, o.id, <partition> AS partition, o.event_type,
       o.event_id, o.key, o.content_type, o.data, o.attributes::text AS attributes"""
_ROWS_POSTGRESQL = f"""
SELECT {_COLUMNS_POSTGRESQL} FROM <outbox> AS o
 WHERE (o.xid, o.id) > (CAST(:after_xid AS xid8), :after_id)
   AND (o.xid, o.id) <= (CAST(:until_xid AS xid8), :until_id) AND o.topic = :topic <chosen>
 ORDER BY o.xid, o.id LIMIT :limit
"""
_BY_ID_POSTGRESQL = f"""
SELECT {_COLUMNS_POSTGRESQL} FROM <outbox> AS o WHERE o.id <in ids> ORDER BY o.xid, o.id
"""
_COLUMNS_SQLITE = """0 AS xid, o.id, <partition> AS partition, o.event_type, o.event_id, o.key,
       o.content_type, o.data, o.attributes"""
_ROWS_SQLITE = f"""
SELECT {_COLUMNS_SQLITE} FROM <outbox> AS o
 WHERE :after_xid = :until_xid AND o.id > :after_id AND o.id <= :until_id AND o.topic = :topic
   <chosen>
 ORDER BY o.id LIMIT :limit
"""
_BY_ID_SQLITE = f"SELECT {_COLUMNS_SQLITE} FROM <outbox> AS o WHERE o.id <in ids> ORDER BY o.id"
_SURVEY = f"SELECT {_ROW} FROM <positions> WHERE {_OURS} ORDER BY partition"
_CREATE = """
INSERT INTO <positions> (consumer_group, topic, partition, xid, id)
VALUES (:group, :topic, :partition, :xid, :id) ON CONFLICT DO NOTHING
"""
# A lease that ended without a release is a crash. Which message caused it is not known yet, nor in
# which partition: further crashes are counted by _BLAME, until the position moves.
_TAKE = f"""
UPDATE <positions> SET owner = :member, claimant = NULL, version = :version,
       lease_until = <now> + :lease,
       crashes = CASE WHEN owner IS NULL OR owner = :member OR crashes > 0 THEN crashes ELSE 1 END
 WHERE {_OURS} AND partition <in partitions>
   AND (owner IS NULL OR owner = :member OR lease_until <= <now>)
RETURNING {_ROW}
"""
_BLAME = f"""
UPDATE <positions> SET crashes = crashes + 1
 WHERE {_OURS} AND partition = :partition AND owner = :member
"""
_CLEAR = f"""
UPDATE <positions> SET crashes = crashes - 1
 WHERE {_OURS} AND partition <in partitions> AND owner = :member AND crashes > 1
"""
_RENEW = f"""
UPDATE <positions> SET lease_until = <now> + :lease WHERE {_OURS} AND owner = :member
RETURNING partition
"""
_MOVE_POSTGRESQL = """
UPDATE <positions> AS p SET xid = m.to_xid, id = m.to_id, settled = m.ranges, version = m.next,
       crashes = CASE WHEN (p.xid, p.id) = (m.to_xid, m.to_id) THEN p.crashes ELSE 0 END
  FROM unnest(CAST(:partitions AS integer[]), CAST(:xids AS bigint[]), CAST(:ids AS bigint[]),
              CAST(:settled AS text[]), CAST(:seen AS bigint[]), CAST(:versions AS bigint[]))
       AS m (number, to_xid, to_id, ranges, seen, next) <off>
 WHERE p.consumer_group = :group AND p.topic = :topic AND p.partition = m.number
   AND p.owner = :member AND p.version = m.seen
RETURNING p.partition
"""
# After a crash of the server an earlier position is a redelivery: no commit waits for the disk. A
# later commit that does, such as that of effects, makes this one durable too.
_NO_WAIT = ", (SELECT set_config('synchronous_commit', 'off', true)) AS off"
_MOVE_SQLITE = """
UPDATE <positions> AS p SET xid = m.value ->> 1, id = m.value ->> 2, settled = m.value ->> 3,
       version = m.value ->> 5,
       crashes = CASE WHEN (p.xid, p.id) = (m.value ->> 1, m.value ->> 2) THEN p.crashes ELSE 0 END
  FROM json_each(:rows) AS m
 WHERE p.consumer_group = :group AND p.topic = :topic AND p.partition = m.value ->> 0
   AND p.owner = :member AND p.version = m.value ->> 4
RETURNING partition
"""
_HAND_OVER = f"""
UPDATE <positions> SET owner = :claimant, claimant = NULL, version = :version,
       lease_until = <now> + :lease
 WHERE {_OURS} AND partition = :partition AND owner = :member
"""
_ASK = f"""
UPDATE <positions> SET claimant = :member
 WHERE {_OURS} AND partition <in partitions> AND claimant IS NULL AND owner IS NOT NULL
"""
_RELEASE = f"""
UPDATE <positions> SET owner = NULL, claimant = NULL, version = :version, lease_until = 0
 WHERE {_OURS} AND owner = :member
"""
_ALL_ERRORS = """CAST(:errors_before AS text) || CAST(<now> AS text)
        || CAST(:errors_behind AS text)"""
# What a template says, what it means, and where the table has no such column.
_ERRORS = (
    ("<errors name>", ", errors", ""),
    ("<errors value>", f", {_ALL_ERRORS}", ""),
    ("<errors set>", f", errors = {_ALL_ERRORS}", ""),
    ("<errors forget>", ", errors = NULL", ""),
    ("<errors of>", "r.errors", "NULL AS errors"),
    ("<errors>", "errors", "NULL AS errors"),
)
# One that was not tried waits for others of its key, and is not due before them: what waits behind
# a message for an hour is not looked at for an hour.
_PARK = """
INSERT INTO <retries> (id, consumer_group, topic, partition, xid, key, attempts, next_try,
                       last_error, traceback, dead_at<errors name>)
VALUES (:id, :group, :topic, :partition, :xid, :key, :attempts, CASE WHEN :attempts = 0
            THEN coalesce((SELECT e.next_try FROM <retries> AS e WHERE e.consumer_group = :group
                              AND e.key >= :key AND e.key <= :key
                              AND CAST(e.topic AS text) = :topic AND e.dead_at IS NULL
                            ORDER BY e.key DESC, e.next_try DESC LIMIT 1), <now>)
            ELSE <now> + :seconds END,
        :reason, :traceback, CASE WHEN :is_dead = 1 THEN CURRENT_TIMESTAMP END<errors value>)
ON CONFLICT DO NOTHING
"""
_FAIL = """
UPDATE <retries> SET attempts = :attempts, next_try = <now> + :seconds, last_error = :reason,
       traceback = :traceback, key = :key<errors set>,
       dead_at = CASE WHEN :is_dead = 1 THEN CURRENT_TIMESTAMP END
 WHERE id = :id AND consumer_group = :group
"""
_ALIVE = f"{_OURS} AND dead_at IS NULL AND partition <in partitions>"
# Whether an earlier message of its key waits: a step in the index of keys, however many wait. A
# join could visit them all, hence the subquery. For one key and its order PostgreSQL takes that
# index whatever its statistics say; SQLite would take that of what is due but for the cast.
_BLOCKED = """(
       SELECT 1 FROM <retries> AS e WHERE e.consumer_group = r.consumer_group
          AND e.key >= r.key AND e.key <= r.key AND CAST(e.topic AS text) = r.topic
          AND e.dead_at IS NULL AND e.next_try > <start> AND (e.xid, e.id) < (r.xid, r.id)
        ORDER BY e.key LIMIT 1) IS NOT NULL"""
_CLAIM = f"""
UPDATE <retries> SET attempts = attempts + 1 WHERE consumer_group = :group AND id IN (
    SELECT r.id FROM <retries> AS r
     WHERE {_ALIVE} AND r.next_try <= <start> AND NOT r.id <in out> AND NOT {_BLOCKED}
       AND (r.xid, r.id) <= (:until_xid, :until_id)
     ORDER BY r.xid, r.id LIMIT :limit)
RETURNING id, attempts, <errors>
"""
_WAITING_KEYS = """
SELECT k.value FROM <keys> WHERE (
    SELECT 1 FROM <retries> AS r WHERE r.consumer_group = :group
       AND r.key >= k.value AND r.key <= k.value AND CAST(r.topic AS text) = :topic
       AND r.dead_at IS NULL ORDER BY r.key LIMIT 1) IS NOT NULL
"""
# By the index of what is due, from its beginning; SQLite does not take it for a minimum.
_NEXT = f"""
SELECT r.next_try - <now> FROM <retries> AS r
 WHERE {_ALIVE} AND NOT r.id <in out> AND (r.next_try > <start> OR NOT {_BLOCKED})
 ORDER BY r.next_try LIMIT 1
"""
_FIND_RETRIES = "SELECT id FROM <retries> WHERE consumer_group = :group AND id <in ids>"
_REMOVE = "DELETE FROM <retries> WHERE consumer_group = :group AND id <in ids> RETURNING id"
_GIVE_BACK = """
UPDATE <retries> SET attempts = attempts - 1 WHERE consumer_group = :group AND id <in ids>
"""
_LAG_POSTGRESQL = """
SELECT count(*), extract(epoch FROM now() - min(o.created_at))
  FROM <outbox> AS o JOIN <positions> AS p
    ON p.consumer_group = :group AND p.topic = o.topic AND p.partition = <partition>
   AND (o.xid, o.id) > (p.xid::text::xid8, p.id)
 WHERE o.topic = :topic
"""
_LAG_SQLITE = """
SELECT count(*), (julianday('now') - julianday(min(o.created_at))) * 86400.0
  FROM <outbox> AS o JOIN <positions> AS p
    ON p.consumer_group = :group AND p.topic = o.topic AND p.partition = <partition>
   AND o.id > p.id
 WHERE o.topic = :topic
"""
_COUNT_RETRIES = f"SELECT count(*), count(dead_at) FROM <retries> WHERE {_OURS}"
_DEAD_LETTERS = """
SELECT r.xid, r.id, r.attempts, r.last_error, r.traceback, r.dead_at, <errors of>, o.event_type,
       o.event_id, o.key, o.content_type, o.data, <attributes> AS attributes
  FROM <retries> AS r JOIN <outbox> AS o ON o.id = r.id
 WHERE r.consumer_group = :group AND r.topic = :topic AND r.dead_at IS NOT NULL
   AND (r.xid, r.id) > (:xid, :id)
 ORDER BY r.xid, r.id LIMIT :limit
"""
_WAITING = """
SELECT r.xid, r.id, r.attempts, r.next_try, r.last_error, <errors of>, o.event_type, o.event_id,
       o.key
  FROM <retries> AS r JOIN <outbox> AS o ON o.id = r.id
 WHERE r.consumer_group = :group AND r.topic = :topic AND r.dead_at IS NULL
 ORDER BY r.next_try, r.id LIMIT :limit
"""
# Not those that a member has: their time is over already.
_HURRY = f"""
UPDATE <retries> SET next_try = <start>
 WHERE {_OURS} AND dead_at IS NULL AND next_try > <start> <only> RETURNING id
"""
_GIVE_UP = f"""
UPDATE <retries> SET dead_at = CURRENT_TIMESTAMP
 WHERE {_OURS} AND dead_at IS NULL AND next_try > <start> <only> RETURNING id
"""
# Lets what was not tried follow messages of its key whose time has changed, unless others wait.
_FREE = f"""
UPDATE <retries> AS r SET next_try = <start>
 WHERE {_OURS} AND dead_at IS NULL AND attempts = 0 AND next_try > <start> AND key IN (
    SELECT c.key FROM <retries> AS c WHERE c.consumer_group = :group AND c.id <in ids>)
   AND NOT EXISTS (
    SELECT 1 FROM <retries> AS e WHERE e.consumer_group = r.consumer_group AND e.key = r.key
       AND e.topic = r.topic AND e.dead_at IS NULL AND e.next_try > <start> AND e.attempts > 0
       AND (e.xid, e.id) < (r.xid, r.id))
"""
_REVIVE = f"""
UPDATE <retries> SET dead_at = NULL, attempts = 0, next_try = <start><errors forget>
 WHERE {_OURS} AND id = :id AND dead_at IS NOT NULL
"""
_REMOVE_RETRIES = f"DELETE FROM <retries> WHERE {_OURS}"
_REMOVE_POSITIONS = f"DELETE FROM <positions> WHERE {_OURS}"
