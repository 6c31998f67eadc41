"""Groups that read an outbox as a log: how far behind they are, their dead letters, their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from conquiet import attempts
from conquiet.errors import ConfigError, ConquietError, NotFound
from conquiet.operations.dead_letters import Filter, Letter
from conquiet.operations.text import as_text
from conquiet.sql import dialect
from conquiet.sql.log import Position
from conquiet.sql.log_group import KAFKA_PREFIX, GroupTables
from conquiet.sql.log_source import MAX_PARTITIONS, open_log
from conquiet.sql.outbox_source import stored_message
from conquiet.sql.schema import OUTBOX_TABLE, positions_table, retries_table

_PAGE = 200


@dataclass(frozen=True, slots=True)
class LogGroup:
    """Describes a group of a topic."""

    topic: str
    name: str
    partitions: int
    members: int
    lag: int
    """How many events it has not passed yet, without those that wait for a retry."""
    behind_seconds: float
    """The age of the oldest of them."""
    retries: int
    dead: int


def survey(engine: Engine, pattern: str = "*", table: str = OUTBOX_TABLE) -> list[LogGroup]:
    """Return the groups whose topics match a pattern; offsets of Kafka are not of an outbox."""
    with _reading(engine) as connection:
        if not dialect.has_table(connection, positions_table(table).fullname):
            return []
        name = engine.dialect.identifier_preparer.format_table(positions_table(table))
        found = connection.execute(
            text(
                f"SELECT DISTINCT topic, consumer_group FROM {name} ORDER BY topic, consumer_group"
            )
        ).all()
        return [
            _describe(connection, GroupTables(engine, table, topic, group), topic, group)
            for topic, group in found
            if fnmatchcase(topic, pattern) and not topic.startswith(KAFKA_PREFIX)
        ]


def describe(url: str) -> LogGroup:
    """Return the group of a source's URL, `postgresql://HOST/NAME?topic=…&group=…`."""
    engine, settings = open_log(url, poolclass=NullPool)
    topic, group = settings["topic"], settings["group"]
    tables = GroupTables(engine, settings.get("table", OUTBOX_TABLE), topic, group)
    with _reading(engine) as connection:
        if not tables.survey(connection):
            raise _no_group(topic, group)
        return _describe(connection, tables, topic, group)


def _no_group(topic: str, group: str) -> NotFound:
    return NotFound(
        f"no group {group!r:.100} of topic {topic!r:.100}; conquiet streams lag --database …"
        " shows them"
    )


def _describe(connection: Connection, tables: GroupTables, topic: str, group: str) -> LogGroup:
    rows = tables.survey(connection)
    owners = {row.owner for row in rows if row.owner is not None and row.seconds_left > 0}
    lag, seconds = tables.lag(connection, len(rows))
    retries, dead = tables.count_retries(connection)
    return LogGroup(topic, group, len(rows), len(owners), lag, seconds, retries, dead)


def remove(engine: Engine, topic: str, group: str, table: str = OUTBOX_TABLE) -> None:
    """Remove a group with its positions and dead letters, unless a member holds a lease.

    A member would create it again, and handle all events again from the beginning.
    """
    tables = GroupTables(engine, table, topic, group)
    with _reading(engine) as connection, connection.begin():
        rows = tables.lock(connection, range(MAX_PARTITIONS)).values()
        left = max((row.seconds_left for row in rows if row.owner is not None), default=0.0)
        if left > 0:
            raise ConquietError(
                f"workers of group {group!r:.100} read topic {topic!r:.100}, and would begin again"
                f" with its first event; stop them first (the last lease ends in {left:.0f} s)"
            )
        removed = tables.remove(connection)
    if not removed:
        raise _no_group(topic, group)


def count_dead(engine: Engine, table: str = OUTBOX_TABLE) -> dict[tuple[str, str], int]:
    """Return how many dead letters each group has, by topic and group."""
    with _reading(engine) as connection:
        retries = retries_table(table)
        if not dialect.has_table(connection, retries.fullname):
            return {}
        places = (retries.c.topic, retries.c.consumer_group)
        found = select(*places, func.count()).where(retries.c.dead_at.is_not(None))
        rows = connection.execute(found.group_by(*places).order_by(*places))
        return {(topic, group): count for topic, group, count in rows}


def open_log_letters(url: str) -> LogLetters:
    """Open the dead letters of the group in a source's URL."""
    engine, settings = open_log(url, poolclass=NullPool)
    table = settings.get("table", OUTBOX_TABLE)
    return LogLetters(engine, settings["topic"], settings["group"], table)


class LogLetters:
    """The dead letters of one group; a replay lets the group, and no other, try again."""

    def __init__(self, engine: Engine, topic: str, group: str, table: str = OUTBOX_TABLE) -> None:
        self._engine = engine
        self._topic = topic
        self.name = f"group {group!r} of topic {topic!r}"
        self._tables = GroupTables(engine, table, topic, group)

    def exists(self) -> bool:
        with _reading(self._engine) as connection:
            return bool(self._tables.survey(connection))

    def scan(self, filter_: Filter, *, brief: bool = False) -> Iterator[tuple[Letter, Any]]:
        after = Position()
        if filter_.after:
            with suppress(ConfigError):  # an id of another kind of place selects nothing away
                after = Position.parse(filter_.after)
        while True:
            with _reading(self._engine) as connection:
                page = self._tables.dead_letters(connection, after, _PAGE)
            for row in page:
                yield self._letter(row), row.id
            if len(page) < _PAGE:
                return
            after = Position(page[-1].xid, page[-1].id)

    def _letter(self, row: Any) -> Letter:
        message = stored_message(row, None, row.attempts)
        attributes = {name: str(value) for name, value in message.attributes.items()}
        data, is_base64 = as_text(bytes(row.data))
        return Letter(
            f"{row.xid}-{row.id}",
            message.id,
            message.type,
            attributes.get("source", ""),
            row.last_error or "",
            row.traceback or "",
            row.attempts,
            _moment(row.dead_at),
            "",
            self._topic,
            "",
            "",
            attributes,
            data,
            is_base64,
            attempts.read(row.errors),
        )

    def send(self, letter: Letter, raw: Any, to: str | None) -> bool:
        if to is not None:
            raise ConquietError(
                f"letter {letter.id}: a message of the log stays in the log; replay it without a"
                " destination, and its group tries again"
            )
        with _reading(self._engine) as connection, connection.begin():
            return self._tables.revive(connection, raw)

    def remove(self, letter: Letter, raw: Any) -> bool:
        with _reading(self._engine) as connection, connection.begin():
            return self._tables.remove_retries(connection, [raw]) > 0


def _moment(value: Any) -> str:
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(f"{value}+00:00")
    return moment.isoformat().replace("+00:00", "Z")


@contextmanager
def _reading(engine: Engine) -> Iterator[Connection]:
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise dialect.store_error(engine, error) from error
