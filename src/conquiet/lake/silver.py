"""Silver: entries of a batch into `raw_events`, judged into `events`, typed tables,
`events_quarantine` and `redeliveries`.

    look    a task returns ids, days and times of entries: of files it reads these columns alone,
            what comes through Spark it writes as files of raw_events first
    plan    the driver finds redeliveries: in the batch, and of ids that silver has
    judge   a task reads entries, writes them as files of raw_events if they are not yet there,
            skips redeliveries, writes files of each table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from hashlib import blake2b
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from conquiet.lake.definition import Definition, table_of_type
from conquiet.lake.journal import FOLDER, Batch, Feed
from conquiet.lake.judge import ENTRIES, EVENTS, FEED, QUARANTINE, Judge, Judged, typed_schemas
from conquiet.lake.schema import TIME, arrange
from conquiet.lake.source import Split, read_splits
from conquiet.lake.tables import DataFile, Files, Store
from conquiet.lake.tasks import Tasks, collector_paused, judge_of

RAW = pa.schema(
    [
        ("stream", pa.string()),
        ("entry_id", pa.string()),
        ("entry_time", TIME),
        ("key", pa.string()),
        ("event_id", pa.string()),
        ("type", pa.string()),
        ("source", pa.string()),
        ("subject", pa.string()),
        ("time", TIME),
        ("content_type", pa.string()),
        ("attributes", pa.map_(pa.string(), pa.string())),
        ("data", pa.binary()),
        ("_malformed", pa.string()),
        ("ingest_date", pa.date32()),
    ]
)
"""The columns of the log (`conquiet.spark.columns`), and the day of the batch."""
REDELIVERIES = pa.schema(
    [
        ("event_id", pa.string()),
        ("event_type", pa.string()),
        ("stream", pa.string()),
        ("created_at", TIME),
        ("entries", pa.int64()),
        ("first_seen_at", TIME),
        ("_day", pa.int32()),
        ("_id_hash", pa.int64()),
    ]
)
EXPECTATIONS = pa.schema(
    [("rule", pa.string()), ("day", pa.date32()), ("checked", pa.int64()), ("failed", pa.int64())]
)
NO_DAY = -1
"""The day of an entry without the attribute `time`."""

_ROWS_PER_FILE = 64_000
_PARTS_PER_CORE = 16
"""Parts of a job, which are entered when it is done: a replay judges all files of a lake."""
_FEW_ROWS = 10_000
_BYTES_PER_FILE = 64 * 2**20
_MOST_IDS = 20_000_000
"""Beyond so many known ids, of 16 bytes each, days that the last batch had no event of are dropped
from memory."""
_DICTIONARY = (
    "stream",
    "type",
    "event_type",
    "source",
    "content_type",
    "aggregate_type",
    "version",
    "actor_type",
    "reason",
    "ingest_date",
    "_day",
    "delivery_count",
)
_NO_STATISTICS = ("data", "payload", "attributes", "_id_check", "actor_id", "actor_store_id")
_LOOKED_AT = ["stream", "entry_id", "entry_time", "event_id", "time"]
_MICROSECONDS_PER_DAY = 86_400_000_000
_LAST_DAY = 2_932_000
"""The first days of the year 9998, about; a later time is nonsense."""


class Part(Protocol):
    """Entries of a batch that one task looks at and judges."""

    def read(
        self, files: Files, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[pa.Table, DataFile | None]]:
        """Read entries, each table with the file of raw_events that has them, if there is one."""
        ...


@dataclass
class RawFile:
    """A file of raw_events."""

    file: DataFile

    def read(
        self, files: Files, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[pa.Table, DataFile | None]]:
        yield files.read([files.uri("raw_events", self.file.name)], columns), self.file


@dataclass
class SplitFiles:
    """Parts of other Parquet files in the columns of the log."""

    splits: list[Split]
    day: date

    def read(
        self, files: Files, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[pa.Table, DataFile | None]]:
        batches = read_splits(self.splits, _ROWS_PER_FILE, columns)
        for rows in _tables(batches, self.day, RAW if columns is None else _schema_of(columns)):
            yield rows, None


@dataclass
class Looked:
    """What the driver must know of the entries of a part."""

    part: Part
    hashes: np.ndarray
    checks: np.ndarray
    days: np.ndarray
    times: np.ndarray
    sequences: np.ndarray


def schemas(definition: Definition) -> dict[str, pa.Schema]:
    """Return the schemas of the tables that are made before facts."""
    if not definition.structs:
        return {"raw_events": RAW}
    return {
        "raw_events": RAW,
        "events": EVENTS,
        "events_quarantine": QUARANTINE,
        "redeliveries": REDELIVERIES,
        "expectations": EXPECTATIONS,
        **(typed_schemas(definition) if definition.typed else {}),
    }


def id_tables(definition: Definition) -> list[str]:
    """Return the tables that together have every event id once."""
    bound = map(table_of_type, definition.streams) if definition.typed else ()
    return ["events", "events_quarantine", *bound]


# --- look ---------------------------------------------------------------------------------------


class Take:
    """Writes the entries of a partition as files of raw_events; a picklable function."""

    def __init__(self, files: Files, day: date) -> None:
        self._files = files
        self._day = day

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Looked]:
        for rows in _tables(batches, self._day, RAW):
            part = RawFile(write_rows(self._files, "raw_events", rows))
            yield _looked(part, rows)


def _tables(batches: Iterable[pa.RecordBatch], day: date, schema: pa.Schema) -> Iterator[pa.Table]:
    """Join and cut batches into tables of the size of a file, with all columns of a schema."""
    parts: list[pa.Table] = []
    rows = size = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_PER_FILE):
            part = _conform(batch.slice(start, _ROWS_PER_FILE), day, schema)
            if parts and (rows + len(part) > _ROWS_PER_FILE or size > _BYTES_PER_FILE):
                yield pa.concat_tables(parts)
                parts, rows, size = [], 0, 0
            parts.append(part)
            rows += len(part)
            size += part.nbytes
    if parts:
        yield pa.concat_tables(parts)


def _conform(batch: pa.RecordBatch, day: date, schema: pa.Schema) -> pa.Table:
    columns = [
        pa.repeat(pa.scalar(day, one.type), batch.num_rows)
        if one.name == "ingest_date"
        else batch.column(one.name).cast(one.type)
        if one.name in batch.schema.names
        else pa.nulls(batch.num_rows, one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)


def _schema_of(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([RAW.field(one) for one in columns])


@dataclass
class LookTask:
    files: Files
    part: Part


def look(task: LookTask) -> Looked:
    """Read what the driver must know of the entries of a part."""
    found = [rows for rows, _ in task.part.read(task.files, _LOOKED_AT)]
    return _looked(task.part, pa.concat_tables(found or [_schema_of(_LOOKED_AT).empty_table()]))


def _looked(part: Part, rows: pa.Table) -> Looked:
    hashes, checks = hash_ids(delivery_ids(rows))
    times = _microseconds(rows["entry_time"])
    return Looked(part, hashes, checks, days_of(rows), times, _sequences(rows))


def write_rows(files: Files, table: str, rows: pa.Table) -> DataFile:
    """Write a file of a table of silver."""
    return files.write(table, rows, _DICTIONARY, _NO_STATISTICS)


def delivery_ids(rows: pa.Table) -> list[str]:
    """Return what the deliveries of an event share: its id; of an entry without one, its place."""
    ids: list[str | None] = rows["event_id"].to_pylist()
    if all(ids):
        return ids  # type: ignore[return-value]  # all() has shown that none is None
    places = zip(ids, rows["stream"].to_pylist(), rows["entry_id"].to_pylist(), strict=True)
    return [one or f"{stream}/{entry}" for one, stream, entry in places]


def hash_ids(ids: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return 128 bits of each id as two numbers."""
    joined = b"".join([blake2b(one.encode(), digest_size=16).digest() for one in ids])
    both = np.frombuffer(joined, np.int64).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


def days_of(rows: pa.Table) -> np.ndarray:
    """Return the UTC day of each entry's attribute `time`, which all its deliveries share."""
    times = _microseconds(rows["time"])
    days = times // _MICROSECONDS_PER_DAY
    return np.where((days < 0) | (days > _LAST_DAY), NO_DAY, days).astype(np.int32)


def _microseconds(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(pc.fill_null(column.cast(pa.int64()), -1).to_numpy())


def _sequences(rows: pa.Table) -> np.ndarray:
    """Return the second number of each entry's id; 0 where it has none."""
    found = pc.extract_regex(rows["entry_id"], r"-(?P<n>\d{1,18})$")
    return np.asarray(pc.fill_null(pc.struct_field(found, "n").cast(pa.int64()), 0).to_numpy())


# --- plan ---------------------------------------------------------------------------------------


class KnownIds:
    """The ids of events that silver or the quarantine has, by day, as hashes.

    A day is read from the tables when a batch has events of it, and kept as long as there is room.
    """

    def __init__(self, store: Store, tables: Sequence[str]) -> None:
        self._store = store
        self._tables = tables
        self._days: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def contains(self, hashes: np.ndarray, checks: np.ndarray, days: np.ndarray) -> np.ndarray:
        """Return of each id whether it is known on its day."""
        wanted = [int(day) for day in np.unique(days)]
        self._load([day for day in wanted if day not in self._days])
        self._make_room(wanted)
        found = np.zeros(len(hashes), bool)
        for day in wanted:
            rows = np.flatnonzero(days == day)
            for known, known_checks in self._days[day]:
                places = np.searchsorted(known, hashes[rows])
                places[places == len(known)] = 0
                if len(known):
                    found[rows] |= (known[places] == hashes[rows]) & (
                        known_checks[places] == checks[rows]
                    )
        return found

    def _load(self, days: list[int]) -> None:
        if not days:
            return
        columns = ["_day", "_id_hash", "_id_check"]
        parts = []
        low, high = min(days), max(days)
        for table in self._tables:
            uris = [
                uri
                for uri, least, most in self._store.ranges(table, "_day")
                if least is None or (least <= high and most >= low)
            ]
            if uris:
                found = self._store.files_of_lake.dataset(uris).to_table(
                    columns=columns, filter=pc.field("_day").isin(days)
                )
                parts.append(found)
        for day in days:
            self._days[day] = []
        if parts:
            rows = pa.concat_tables(parts)
            self.add(*(rows[name].to_numpy() for name in columns[1:] + columns[:1]))

    def _make_room(self, wanted: list[int]) -> None:
        """Drop days, those first that no batch has had for longest."""
        for day in wanted:
            self._days[day] = self._days.pop(day)
        sizes = {day: sum(len(one) for one, _ in parts) for day, parts in self._days.items()}
        total = sum(sizes.values())
        for day in [*self._days][: -len(wanted) or None]:
            if total <= _MOST_IDS:
                break
            total -= sizes[day]
            del self._days[day]

    def add(self, hashes: np.ndarray, checks: np.ndarray, days: np.ndarray) -> None:
        """Add ids of days that are kept."""
        if not len(hashes):
            return
        order = np.lexsort((hashes, days))
        hashes, checks, days = hashes[order], checks[order], days[order]
        starts = np.flatnonzero(np.diff(days, prepend=np.iinfo(np.int32).min))
        for start, end in zip(starts, [*starts[1:], len(days)], strict=True):
            parts = self._days.get(int(days[start]))
            if parts is not None:
                parts.append((hashes[start:end], checks[start:end]))
                _merge(parts)

    def forget(self) -> None:
        self._days.clear()


def _merge(parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Keep few parts: put the last two together while they are of a size."""
    while len(parts) > 1 and len(parts[-1][0]) * 2 >= len(parts[-2][0]):
        (hashes, checks), (more, more_checks) = parts.pop(), parts.pop()
        both, both_checks = np.concatenate((hashes, more)), np.concatenate((checks, more_checks))
        order = np.argsort(both, kind="stable")
        parts.append((both[order], both_checks[order]))


class RawIds:
    """The ids of raw_events, for a lake that has no silver that knows them."""

    def __init__(self, store: Store) -> None:
        columns = ["event_id", "stream", "entry_id"]
        rows = store.read("raw_events", columns) if store.exists("raw_events") else None
        ids = [] if rows is None else delivery_ids(rows)
        self._ids = set(zip(*(one.tolist() for one in hash_ids(ids)), strict=True))

    def contains(self, hashes: np.ndarray, checks: np.ndarray, days: np.ndarray) -> np.ndarray:
        pairs = zip(hashes.tolist(), checks.tolist(), strict=True)
        return np.fromiter((one in self._ids for one in pairs), bool, len(hashes))


def plan(
    looked: Sequence[Looked],
    known: KnownIds | RawIds | None,
    only: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Find first deliveries (lowest entry time, then entry id) in a batch.

    Return the deliveries of each entry of each part: how many its event has in the batch, at the
    first of them, and 0 at the others. If the event is known, their number is negative. `only`
    masks the entries of each part that are counted.
    """
    if not looked:
        return []
    hashes, checks, days, times, sequences = (
        np.concatenate([getattr(one, name) for one in looked])
        for name in ("hashes", "checks", "days", "times", "sequences")
    )
    order = _order_deliveries(hashes, checks, times, sequences)
    if only is not None:
        order = order[np.concatenate(only)[order]]
    same = np.zeros(len(order), bool)
    same[1:] = (np.diff(hashes[order]) == 0) & (np.diff(checks[order]) == 0)
    first = order[~same]
    counts = np.bincount(np.cumsum(~same) - 1) if len(order) else np.empty(0, np.int64)
    if known is not None:
        is_known = known.contains(hashes[first], checks[first], days[first])
        counts = np.where(is_known, -counts, counts)
    deliveries = np.zeros(len(hashes), np.int32)
    deliveries[first] = counts
    return np.split(deliveries, np.cumsum([len(one.hashes) for one in looked])[:-1])


def _order_deliveries(
    hashes: np.ndarray, checks: np.ndarray, times: np.ndarray, sequences: np.ndarray
) -> np.ndarray:
    """Sort rows by id, and those of one id by time; few ids have several rows."""
    order = np.argsort(hashes, kind="stable")
    is_same = np.diff(hashes[order]) == 0
    several = np.zeros(len(order), bool)
    several[1:] |= is_same
    several[:-1] |= is_same
    rows = order[several]
    inner = np.lexsort((sequences[rows], times[rows], checks[rows], hashes[rows]))
    order[several] = rows[inner]
    return order


# --- judge --------------------------------------------------------------------------------------


@dataclass
class JudgeTask:
    """Judge the entries of a part."""

    definition: bytes
    files: Files
    part: Part
    deliveries: np.ndarray
    """As `plan` returns them."""
    with_silver: bool = True
    """False for the feed of facts alone."""
    new_only: bool = False
    """Whether raw_events is to have first deliveries of unknown events alone."""


@dataclass
class JudgeResult:
    """What was written of the entries of a part."""

    files: dict[str, list[DataFile]] = field(default_factory=dict)
    feed: list[Feed] = field(default_factory=list)
    counts: list[tuple[str, date | None, int, int]] = field(default_factory=list)
    redeliveries: list[pa.Table] = field(default_factory=list)

    def add(self, table: str, file: DataFile) -> None:
        self.files.setdefault(table, []).append(file)


def judge_part(task: JudgeTask) -> JudgeResult:
    """Judge the first deliveries of a part, and write what they give."""
    result = JudgeResult()
    with collector_paused():
        judge = judge_of(task.definition)
        start = 0
        for rows, file in task.part.read(task.files):
            deliveries = task.deliveries[start : start + len(rows)]
            start += len(rows)
            if task.new_only:
                rows, file = rows.filter(pa.array(deliveries > 0)), None
                deliveries = np.ones(len(rows), np.int32)
            if not len(rows):
                continue
            if file is None:
                result.add("raw_events", write_rows(task.files, "raw_events", rows))
            if judge.kinds:
                entries = first_deliveries(rows, deliveries)
                write_judged(task.files, judge.judge(entries, task.with_silver), judge, result)
                again = _redeliveries(rows, deliveries)
                if len(again):
                    result.redeliveries.append(again)
    return result


def first_deliveries(raw: pa.Table, deliveries: np.ndarray) -> pa.Table:
    """Return first deliveries of events that are not known, in the columns that are judged."""
    raw = raw.select([one for one in RAW.names if one in ENTRIES.names or one == "attributes"])
    if not (deliveries > 0).all():
        raw = raw.filter(pa.array(deliveries > 0))
        deliveries = deliveries[deliveries > 0]
    hashes, checks = hash_ids(delivery_ids(raw))
    days = days_of(raw)
    made = {
        # A time of no possible day is nonsense that readers could not show.
        "time": pc.if_else(pa.array(days != NO_DAY), raw["time"], pa.scalar(None, TIME)),
        "aggregate_type": pc.map_lookup(
            raw["attributes"].combine_chunks(), "aggregatetype", "first"
        ),
        "delivery_count": pa.array(deliveries.astype(np.int64)),
        "_day": pa.array(days),
        "_id_hash": pa.array(hashes),
        "_id_check": pa.array(checks),
    }
    return arrange(raw, ENTRIES, made)


def _redeliveries(raw: pa.Table, deliveries: np.ndarray) -> pa.Table:
    """Return the rows of `redeliveries`: events that silver has, and how often they came."""
    raw = raw.filter(pa.array(deliveries < 0))
    ids = delivery_ids(raw)
    return pa.table(
        [
            pa.array(ids, pa.string()),
            raw["type"],
            raw["stream"],
            raw["time"],
            pa.array(-deliveries[deliveries < 0].astype(np.int64)),
            raw["entry_time"],
            pa.array(days_of(raw)),
            pa.array(hash_ids(ids)[0]),
        ],
        schema=REDELIVERIES,
    )


def write_judged(files: Files, judged: Judged, judge: Judge, result: JudgeResult) -> None:
    tables = {"events": judged.events, "events_quarantine": judged.quarantine, **judged.typed}
    for name, rows in tables.items():
        if len(rows):
            result.add(name, write_rows(files, name, rows))
    if judge.facts and len(judged.feed):
        result.feed.append(write_feed(files, judged.feed))
    result.counts += judged.counts.rows()


def write_feed(files: Files, feed: pa.Table) -> Feed:
    """Write the events of facts; they are in the order of their buckets."""
    name = files.new_name(f"{FOLDER}/feed").replace(".parquet", ".arrow")
    buckets, starts = np.unique(feed["bucket"].to_numpy(), return_index=True)
    ends = [*starts[1:], len(feed)]
    places: dict[int, int] = {}
    rows: dict[int, int] = {}
    feed = feed.combine_chunks()
    # Each bucket is a record batch, and compressing many small ones takes longer than all else.
    options = pa.ipc.IpcWriteOptions(compression="lz4" if len(feed) > _FEW_ROWS else None)
    path = files.path(files.uri(FOLDER, "feed", name))
    with (
        files.fs.open_output_stream(path) as out,
        pa.ipc.new_file(out, FEED, options=options) as writer,
    ):
        for place, (bucket, start, end) in enumerate(zip(buckets, starts, ends, strict=True)):
            writer.write_batch(feed.slice(start, end - start).to_batches()[0])
            places[int(bucket)] = place
            rows[int(bucket)] = int(end - start)
    return Feed(name, places, rows)


def run_judge(
    batch: Batch,
    work: Sequence[JudgeTask],
    files: Files,
    tasks: Tasks,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Judge the parts of a batch, and enter what was written in its record. `on_progress` gets how
    many parts are done, of how many."""
    counted: list[tuple[str, date | None, int, int]] = []
    again: list[pa.Table] = []
    at_once = _PARTS_PER_CORE * tasks.cores
    for start in range(0, len(work), at_once):
        some = work[start : start + at_once]
        for task, one in zip(some, tasks.map(judge_part, some), strict=True):
            for name, written in one.files.items():
                batch.add(name, *written)
            batch.feed += one.feed
            again += one.redeliveries
            if task.with_silver:
                counted += one.counts
        on_progress(start + len(some), len(work))
    if again:
        batch.add("redeliveries", files.write("redeliveries", pa.concat_tables(again)))
    batch.add("expectations", *write_counts(files, counted))


def write_counts(
    files: Files, counted: Sequence[tuple[str, date | None, int, int]]
) -> list[DataFile]:
    """Write the counts of rules as a file of `expectations`, if there are any."""
    if not counted:
        return []
    columns = [list(column) for column in zip(*counted, strict=True)]
    rows = pa.table(columns, schema=EXPECTATIONS).group_by(["rule", "day"])
    table = rows.aggregate([("checked", "sum"), ("failed", "sum")])
    return [files.write("expectations", table.rename_columns(EXPECTATIONS.names))]


def today() -> date:
    return datetime.now(UTC).date()
