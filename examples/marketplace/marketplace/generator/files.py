"""Files in the columns of the log (`conquiet.spark.columns`): Parquet, or JSON lines."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from conquiet.errors import ConfigError
from conquiet.redis.topic import Topic
from marketplace.generator.clock import moment_text
from marketplace.generator.entry import Entry, Numbers

_ROWS_PER_FILE = 100_000
_JSON = "application/json"


class _Streams:
    """The stream and the number of each entry, as the log would have them."""

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
    """Write `part-00000.parquet` and so on; how many entries that were."""
    import pyarrow.parquet

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.parquet")):  # a reader would take its rows for those of this log
        raise ConfigError(f"{target} holds Parquet files; write into a new directory")
    streams = _Streams(partitions)
    count = 0
    for number, chunk in enumerate(_chunks(entries, rows_per_file)):
        # Dictionaries for what repeats itself, and for nothing else: they cost as much as the rest.
        pyarrow.parquet.write_table(
            _table(chunk, streams),
            target / f"part-{number:05}.parquet",
            use_dictionary=["stream", "type", "source", "content_type"],
        )
        count += len(chunk)
    return count


def write_jsonlines(entries: Iterable[Entry], path: str | Path, *, partitions: int = 1) -> int:
    """One object per line; `data` in base64, which is how Spark reads binary from JSON."""
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
    # By hand, which is twice as fast: nothing that a generator writes here needs an escape.
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

    from conquiet.spark.columns import ARROW_SCHEMA

    places = [streams.place(entry) for entry in entries]
    subjects = pa.array([entry.aggregate_id for entry in entries], pa.string())
    moment = ARROW_SCHEMA.field("time").type
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
    return pa.Table.from_arrays([columns[name] for name in ARROW_SCHEMA.names], schema=ARROW_SCHEMA)


def _attributes(entries: list[Entry]) -> Any:
    """A map per entry, from flat lists: pyarrow is slow with a list of maps."""
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
