"""Files in the columns of the log (`conquiet.spark.columns`): Parquet, or JSON lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from conquiet.marketplace.generator.clock import moment_text
from conquiet.marketplace.generator.entry import Entry, Numbers
from conquiet.redis.topic import Topic

_ROWS_PER_FILE = 100_000
_JSON = "application/json"
_TELEMETRY = {"specversion": "1.0"}


class _Streams:
    """The stream and the number of each entry, as the log would have them."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._topics: dict[str, Topic] = {}
        self._numbers = Numbers()

    def place(self, entry: Entry) -> tuple[str, str]:
        topic = self._topics.get(entry.topic)
        if topic is None:
            topic = self._topics[entry.topic] = Topic(entry.topic, self._partitions)
        stream = topic.name if self._partitions == 1 else topic.stream(entry.aggregate_id)
        return stream, self._numbers.next(stream, entry.ms)


def write_parquet(
    entries: Iterable[Entry],
    directory: str | Path,
    *,
    partitions: int = 1,
    rows_per_file: int = _ROWS_PER_FILE,
) -> int:
    """Write `part-00000.parquet` and so on; how many entries that were."""
    import pyarrow.parquet

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    streams = _Streams(partitions)
    count = 0
    for number, chunk in enumerate(_chunks(entries, rows_per_file)):
        table = _table(chunk, streams)
        pyarrow.parquet.write_table(table, target / f"part-{number:05}.parquet")
        count += len(chunk)
    return count


def write_jsonlines(entries: Iterable[Entry], path: str | Path, *, partitions: int = 1) -> int:
    """One object per line; `data` in base64, which is how Spark reads binary from JSON."""
    encode = msgspec.json.Encoder().encode
    streams = _Streams(partitions)
    count = 0
    with Path(path).open("wb") as file:
        for chunk in _chunks(entries, 1_000):
            file.write(b"".join([encode(_object(entry, streams)) + b"\n" for entry in chunk]))
            count += len(chunk)
    return count


def _chunks(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    iterator = iter(entries)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _rest(entry: Entry) -> dict[str, str]:
    if not entry.aggregate_type:
        return _TELEMETRY
    return {"specversion": "1.0", "aggregatetype": entry.aggregate_type}


def _object(entry: Entry, streams: _Streams) -> dict[str, Any]:
    stream, entry_id = streams.place(entry)
    return {
        "stream": stream,
        "entry_id": entry_id,
        "entry_time": moment_text(entry.ms),
        "key": entry.aggregate_id,
        "event_id": entry.event_id,
        "type": entry.type,
        "source": entry.source,
        "subject": entry.aggregate_id,
        "time": entry.time,
        "content_type": _JSON,
        "attributes": _rest(entry),
        "data": entry.data,
    }


def _table(entries: list[Entry], streams: _Streams) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    from conquiet.spark.columns import ARROW_SCHEMA

    places = [streams.place(entry) for entry in entries]
    subjects = pa.array([entry.aggregate_id for entry in entries], pa.string())
    kinds = [tuple(_rest(entry).items()) for entry in entries]
    times = pa.array([entry.time for entry in entries], pa.string())
    columns = {
        "stream": [stream for stream, _ in places],
        "entry_id": [entry_id for _, entry_id in places],
        "entry_time": pa.array([entry.ms * 1_000 for entry in entries], pa.int64()),
        "key": subjects,
        "event_id": [entry.event_id for entry in entries],
        "type": [entry.type for entry in entries],
        "source": [entry.source for entry in entries],
        "subject": subjects,
        "time": pc.cast(times, pa.timestamp("us", tz="UTC")),
        "content_type": [_JSON] * len(entries),
        "attributes": kinds,
        "data": [entry.data for entry in entries],
        "_malformed": pa.nulls(len(entries), pa.string()),
    }
    arrays = [_array(columns[field.name], field.type) for field in ARROW_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=ARROW_SCHEMA)


def _array(values: Any, kind: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, kind) if isinstance(values, list) else values.cast(kind)
