"""Writers of entries: files, the streams of a Redis log, rows of `outbox_events`."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import JSON, URL, Connection, DateTime, Engine, TableClause, column, insert
from sqlalchemy import table as table_clause

from conquiet import sql
from conquiet.errors import ConfigError, ConquietError
from conquiet.redis import Topic
from marketplace.generator.clock import moment_text
from marketplace.generator.entry import Entry, Numbers

_ROWS_PER_FILE = 100_000
_JSON = "application/json"


class _Streams:
    """Assigns the stream and the id of each entry, as the log would."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._topics: dict[str, Topic] = {}
        self._numbers = Numbers()

    def place(self, entry: Entry) -> tuple[str, str]:
        stream = entry.topic
        if self._partitions > 1:
            topic = self._topics.get(stream)
            if topic is None:
                topic = self._topics[stream] = Topic(stream, self._partitions)
            stream = topic.stream(entry.aggregate_id)
        return stream, self._numbers.next(stream, entry.ms)


def write_parquet(
    entries: Iterable[Entry],
    directory: str | Path,
    *,
    partitions: int = 1,
    rows_per_file: int = _ROWS_PER_FILE,
) -> int:
    """Write `part-00000.parquet` and so on; return the number of entries."""
    import pyarrow.parquet

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.parquet")):  # a reader would read those rows, too
        raise ConfigError(f"{target} holds Parquet files; write into a new directory")
    streams = _Streams(partitions)
    count = 0
    for number, chunk in enumerate(_chunks(entries, rows_per_file)):
        # Dictionaries for columns of few values alone: they cost as much as the rest.
        pyarrow.parquet.write_table(
            _table(chunk, streams),
            target / f"part-{number:05}.parquet",
            use_dictionary=["stream", "type", "source", "content_type"],
        )
        count += len(chunk)
    return count


def write_jsonlines(entries: Iterable[Entry], path: str | Path, *, partitions: int = 1) -> int:
    """Write an object per line; `data` in base64, as Spark reads binary from JSON."""
    streams = _Streams(partitions)
    count = 0
    with Path(path).open("wb") as file:
        for chunk in _chunks(entries, 1_000):
            file.write("".join([_line(entry, streams) for entry in chunk]).encode())
            count += len(chunk)
    return count


def _chunks(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    iterator = iter(entries)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _line(entry: Entry, streams: _Streams) -> str:
    # Formatted by hand, which is twice as fast: no generated value needs an escape.
    stream, entry_id = streams.place(entry)
    kind = f',"aggregatetype":"{entry.aggregate_type}"' if entry.aggregate_type else ""
    subject = entry.aggregate_id
    return (
        f'{{"stream":"{stream}","entry_id":"{entry_id}","entry_time":"{moment_text(entry.ms)}",'
        f'"key":"{subject}","event_id":"{entry.event_id}","type":"{entry.type}",'
        f'"source":"{entry.source}","subject":"{subject}","time":"{entry.time}",'
        f'"content_type":"{_JSON}","attributes":{{"specversion":"1.0"{kind}}},'
        f'"data":"{b2a_base64(entry.data, newline=False).decode()}"}}\n'
    )


def _table(entries: list[Entry], streams: _Streams) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    places = [streams.place(entry) for entry in entries]
    subjects = pa.array([entry.aggregate_id for entry in entries], pa.string())
    moment = pa.timestamp("us", "UTC")
    columns = {
        "stream": pa.array([stream for stream, _ in places], pa.string()),
        "entry_id": pa.array([entry_id for _, entry_id in places], pa.string()),
        "entry_time": pa.array([entry.ms * 1_000 for entry in entries], pa.int64()).cast(moment),
        "key": subjects,
        "event_id": pa.array([entry.event_id for entry in entries], pa.string()),
        "type": pa.array([entry.type for entry in entries], pa.string()),
        "source": pa.array([entry.source for entry in entries], pa.string()),
        "subject": subjects,
        "time": pc.cast(pa.array([entry.time for entry in entries], pa.string()), moment),
        "content_type": pa.repeat(_JSON, len(entries)),
        "attributes": _attributes(entries),
        "data": pa.array([entry.data for entry in entries], pa.binary()),
        "_malformed": pa.nulls(len(entries), pa.string()),
    }
    table = pa.table(columns)
    required = ("stream", "entry_id")
    fields = [field.with_nullable(field.name not in required) for field in table.schema]
    return table.cast(pa.schema(fields))


def _attributes(entries: list[Entry]) -> Any:
    """Build a map per entry from flat lists: pyarrow is slow with a list of maps."""
    import pyarrow as pa

    offsets, names, values = [0], [], []
    for entry in entries:
        names.append("specversion")
        values.append("1.0")
        if entry.aggregate_type:
            names.append("aggregatetype")
            values.append(entry.aggregate_type)
        offsets.append(len(names))
    kinds = (
        pa.array(offsets, pa.int32()),
        pa.array(names, pa.string()),
        pa.array(values, pa.string()),
    )
    return pa.MapArray.from_arrays(*kinds)


_LOG_BATCH = 500


class LogRefused(ConquietError):
    """The log holds later entries than those to be written, or is not a stream."""


def write_log(client: Any, entries: Iterable[Entry], *, partitions: int = 1) -> int:
    """Add entries to the streams of their topics, many in one round trip; return their number.

    >>> from marketplace.generator import Generator
    >>> count = write_log(client, Generator(orders=3).entries())
    >>> client.xlen("pf-domain-events") + client.xlen("pf-ad-telemetry") == count
    True

    Entry ids are the times of publication, so the streams must be empty or older.
    """
    numbers = Numbers()
    topics: dict[str, Topic] = {}
    iterator = iter(entries)
    count = 0
    while chunk := list(islice(iterator, _LOG_BATCH)):
        pipe = client.pipeline(transaction=False)
        for entry in chunk:
            topic = topics.get(entry.topic)
            if topic is None:
                topic = topics[entry.topic] = Topic(entry.topic, partitions)
            stream = topic.stream(entry.aggregate_id)
            fields = {**entry.attributes(), "data": entry.data}
            pipe.xadd(stream, fields, id=numbers.next(stream, entry.ms))
        for entry, reply in zip(chunk, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(reply, Exception):
                raise LogRefused(
                    f"{entry.type} {entry.event_id}: Redis refused it: {reply}; write into"
                    f" an empty log: DEL {entry.topic}"
                )
        count += len(chunk)
    return count


_ROW_BATCH = 5_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
OUTBOX = "outbox_events"
_COLUMNS = (
    *("id", "event_type", "aggregate_type", "aggregate_id", "payload_json", "created_at"),
    *("published_at", "attempt_count"),
)


def rows_of(entries: Iterable[Entry], *, published: bool) -> Iterator[Entry]:
    """Yield the entries that have a row: first publications of events that an outbox accepts."""
    for entry in entries:
        if entry.delivery == 1 and not entry.is_foreign and not entry.is_telemetry:
            yield entry if published else msgspec.structs.replace(entry, failures=0)


def write_outbox(
    engine: Engine | str | URL,
    entries: Iterable[Entry],
    *,
    published: bool = False,
    table: str = OUTBOX,
) -> int:
    """Insert the rows of a log, by COPY on PostgreSQL; return their number.

    A relay publishes them, unless `published=True`: then they are as the relay of the log left
    them, with `published_at`, and with the failed attempts in `attempt_count`.
    """
    database = engine if isinstance(engine, Engine) else sql.engine(engine)
    is_own = database is not engine
    copies = database.dialect.name == "postgresql"
    rows = rows_of(entries, published=published)
    count = 0
    try:
        with database.begin() as connection:
            while chunk := list(islice(rows, _ROW_BATCH)):
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
    connection.execute(insert(_outbox(table)), values)


def _outbox(name: str) -> TableClause:
    kinds: dict[str, Any] = {
        "payload_json": JSON,
        "created_at": DateTime,
        "published_at": DateTime,
    }
    return table_clause(name, *(column(each, kinds.get(each)) for each in _COLUMNS))


def _moment(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)
