"""Writing entries as rows of `outbox_events`, as if the services had emitted them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, insert

from conquiet.events.table import EVENTS_TABLE, events_table
from conquiet.sql import dialect
from marketplace.catalog import CATALOG
from marketplace.generator.entry import Entry

_BATCH = 5_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = (
    *("id", "event_type", "aggregate_type", "aggregate_id", "payload_json", "created_at"),
    *("published_at", "attempt_count"),
)


def rows_of(entries: Iterable[Entry], *, published: bool) -> Iterator[Entry]:
    """What of a log has a row: the first publication of each event that an outbox would take."""
    for entry in entries:
        if entry.delivery == 1 and not entry.is_foreign and not entry.is_telemetry:
            yield entry if published else msgspec.structs.replace(entry, failures=0)


def write_outbox(
    engine: Engine | str | URL,
    entries: Iterable[Entry],
    *,
    published: bool = False,
    table: str = EVENTS_TABLE,
) -> int:
    """Insert the rows of a log, by COPY on PostgreSQL; how many they were.

    Not published, they wait for a relay. `published=True` is how the relay left them that wrote
    the log: with `published_at`, and with the failures before it in `attempt_count`.
    """
    database = dialect.as_engine(engine)
    is_own = database is not engine
    copies = database.dialect.name == "postgresql"
    rows = rows_of(entries, published=published)
    count = 0
    try:
        with database.begin() as connection:
            while chunk := list(islice(rows, _BATCH)):
                (_copy if copies else _insert)(connection, chunk, published, table)
                count += len(chunk)
    finally:
        if is_own:
            database.dispose()
    return count


def _copy(connection: Connection, chunk: list[Entry], published: bool, table: str) -> None:
    raw: Any = connection.connection.driver_connection
    name = ".".join(f'"{part}"' for part in table.split("."))
    with (
        raw.cursor() as cursor,
        cursor.copy(f"COPY {name} ({', '.join(_COLUMNS)}) FROM STDIN") as copy,
    ):
        for entry in chunk:
            at = _moment(entry.ms).isoformat() if published else None
            copy.write_row(
                (
                    *(entry.event_id, entry.type, entry.aggregate_type, entry.aggregate_id),
                    *(entry.data.decode(), entry.time, at, entry.failures),
                )
            )


def _insert(connection: Connection, chunk: list[Entry], published: bool, table: str) -> None:
    values = [
        {
            "id": entry.event_id,
            "event_type": entry.type,
            "aggregate_type": entry.aggregate_type,
            "aggregate_id": entry.aggregate_id,
            "payload_json": msgspec.json.decode(entry.data),
            "created_at": datetime.fromisoformat(entry.time),
            "published_at": _moment(entry.ms) if published else None,
            "attempt_count": entry.failures,
        }
        for entry in chunk
    ]
    connection.execute(insert(events_table(CATALOG, table)), values)


def _moment(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)
