"""StoredOffsets: keeps the offsets of a Kafka group in a database, beside the effects.

    partition:   assigned ──take──▶ version of ours ──confirm──▶ next version, in the transaction
                    ▲                     │                      of the effects
                    └─────────────────────┴ another member has taken it: `Lost`, roll back

Kafka decides whose a partition is. The version of its row decides whose transactions commit: a
member that was replaced knows an old one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain

from sqlalchemy import URL, Connection, Engine

from conquiet.errors import ConfigError, StoreError
from conquiet.message import new_id
from conquiet.registry import open_database
from conquiet.sources.broker import Delivery, logger
from conquiet.sources.kafka import REPEATED, Partition, Place, find_runs
from conquiet.sql import dialect
from conquiet.sql.log import Position
from conquiet.sql.log_group import (
    KAFKA_PREFIX,
    GroupTables,
    Lost,
    PartitionRow,
    Range,
    is_covered,
)
from conquiet.sql.schema import OUTBOX_TABLE, positions_table

_NOWHERE = -1
"""The offset of a partition of which nothing was done yet."""
_NO_LEASE = -60.0


class StoredPartition(Partition):
    """A partition, and the version of its row."""

    __slots__ = ("_counted", "version")

    def __init__(self, place: Place, row: PartitionRow, acked: Iterable[int]) -> None:
        self.version = row.version
        self._counted: set[int] = set()
        """Offsets that the version counts as done, also before the commit."""
        if row.id > _NOWHERE:
            ranges = (range(first.id, last.id + 1) for first, last in row.ranges)
            acked = chain.from_iterable(ranges)
        super().__init__(place, acked)
        self.start = None if row.id == _NOWHERE else row.id + 1

    def ack(self, offsets: Collection[int]) -> int:
        self._counted.difference_update(offsets)
        return super().ack(offsets)

    def progress(self, also: Collection[int]) -> tuple[Position, list[Range]]:
        """Return the last offset of what is done, and ranges behind it, with `also` done too."""
        done = {*self._counted, *also}
        first = next((offset for offset in self.unacked if offset not in done), self.next or 0)
        runs = find_runs(sorted(offset for offset in {*self.acked, *done} if offset > first))
        return Position(0, first - 1), [(Position(0, one), Position(0, end)) for one, end in runs]

    def count(self, also: Collection[int]) -> None:
        self._counted.update(also)

    def recount(self, row: PartitionRow) -> None:
        self._counted = {each for each in self.unacked if is_covered(row, Position(0, each))}


class StoredOffsets:
    """Reads and writes the rows of one group, as one member of it."""

    def __init__(
        self,
        engine: Engine | str | URL,
        group: str,
        memory: AbstractContextManager[object],
    ) -> None:
        given = open_database(engine, "positions") if isinstance(engine, str) else engine
        self.engine = dialect.as_engine(given)
        if self.engine.dialect.is_async:
            raise ConfigError("positions=… takes a sync Engine; make one from the same URL")
        self.table = positions_table(OUTBOX_TABLE).fullname
        self._member = f"{socket.gethostname()}-{os.getpid()}-{new_id()[-12:]}"
        self._owns_engine = self.engine is not engine
        self._group = group
        self._memory = memory  # guards the partitions
        self._tables: dict[str, GroupTables] = {}

    def _of(self, topic: str) -> GroupTables:
        if topic not in self._tables:
            self._tables[topic] = GroupTables(
                self.engine, OUTBOX_TABLE, f"{KAFKA_PREFIX}{topic}", self._group
            )
        return self._tables[topic]

    def take(self, places: Collection[Place]) -> dict[Place, PartitionRow]:
        """Change the versions of rows, so that former owners cannot write them; return the rows."""
        found: dict[Place, PartitionRow] = {}
        numbers = _by_topic(places)
        with dialect.raise_store_errors(self.engine), self._begin() as connection:
            for topic, chosen in numbers.items():
                tables = self._of(topic)
                tables.add(connection, chosen, Position(0, _NOWHERE))
                for row in tables.take(connection, self._member, _NO_LEASE, chosen):
                    found[topic, row.partition] = row
        if len(found) < len(places):
            raise StoreError(f"{dialect.display_url(self.engine.url)}: its clock was set back")
        return found

    def find_done(self, connection: Connection, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Return which deliveries a transaction has committed whose end is not known here."""
        for item in deliveries:
            item.is_moved = False
            if item.receipt[0].is_lost:
                raise Lost([item.receipt[0]])
        done: set[Delivery] = set()
        tried = [item for item in deliveries if item.is_tried]
        numbers = _by_topic(item.receipt[0].place for item in tried)
        # By a lock, which waits for a commit that the server is still at.
        rows = {
            (topic, number): row
            for topic, chosen in numbers.items()
            for number, row in self._of(topic).lock(connection, chosen).items()
        }
        for item in tried:
            partition, offset = item.receipt
            if is_covered(rows[partition.place], Position(0, offset)):
                done.add(item)
        return done

    def confirm(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """Move the offsets past deliveries; raise `Lost` if another member has a partition."""
        by_topic: dict[str, dict[Partition, set[int]]] = {}
        for item in deliveries:
            item.is_tried = True
            partition, offset = item.receipt
            by_topic.setdefault(partition.place[0], {}).setdefault(partition, set()).add(offset)
        for topic, partitions in sorted(by_topic.items()):  # in one order: they are locked
            try:
                self._of(topic).advance(connection, self._member, partitions, self._memory)
            except Lost as lost:
                for partition in lost.tenures:
                    partition.is_lost = True  # the thread that polls takes it again if it is ours
                raise
        for item in deliveries:
            item.is_moved = True

    def store(self, deliveries: Sequence[Delivery]) -> None:
        """Move the offsets past messages without effects, such as dead letters."""
        if not deliveries:
            return
        try:
            with dialect.raise_store_errors(self.engine), self._begin() as connection:
                self.confirm(connection, deliveries)
        except (StoreError, Lost) as error:
            logger.warning("offsets could not be stored: %s; %s", error, REPEATED)
            for item in deliveries:
                item.receipt[0].is_lost = True

    def _begin(self) -> AbstractContextManager[Connection]:
        return dialect.begin_to_write(self.engine)

    def close(self) -> None:
        if self._owns_engine:
            self.engine.dispose()


def _by_topic(places: Iterable[Place]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for topic, number in sorted(set(places)):
        numbers.setdefault(topic, []).append(number)
    return numbers
