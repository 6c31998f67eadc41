"""Silver: entries of a batch into `raw_events`, then judged into `events`, typed tables,
`events_quarantine` and `redeliveries`.

    take    a task writes entries as files of raw_events, and returns ids, days and times of rows
    plan    the driver finds redeliveries: in the batch, and of ids that silver has
    judge   a task reads a file of raw_events, skips redeliveries, writes files of each table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from conquiet.lake.definition import Definition
from conquiet.lake.journal import FOLDER, Batch, Feed, Plan
from conquiet.lake.judge import ENTRIES, EVENTS, FEED, QUARANTINE, Judge, Judged, typed_schemas
from conquiet.lake.schema import TIME
from conquiet.lake.source import Split, read_split
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
_FILES_PER_CORE = 16
"""Files of a job, which are entered when it is done: a replay judges all files of a lake."""
_FEW_ROWS = 10_000
_BYTES_PER_FILE = 64 * 2**20
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
_IDS = ["_id_hash", "_id_check", "_day"]
_MICROSECONDS_PER_DAY = 86_400_000_000
_LAST_DAY = 2_932_000
"""The first days of the year 9998, about; a later time is nonsense."""


@dataclass
class Taken:
    """A file of raw_events, and what the driver must know of its rows."""

    file: DataFile
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
    return ["events", "events_quarantine", *(definition.streams if definition.typed else ())]


# --- take ---------------------------------------------------------------------------------------


class Take:
    """Writes the entries of a partition as files of raw_events; a picklable function."""

    def __init__(self, files: Files, day: date) -> None:
        self._files = files
        self._day = day

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Taken]:
        parts: list[pa.Table] = []
        rows = size = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            for start in range(0, batch.num_rows, _ROWS_PER_FILE):
                part = self._conform(batch.slice(start, _ROWS_PER_FILE))
                if parts and (rows + len(part) > _ROWS_PER_FILE or size > _BYTES_PER_FILE):
                    yield self._write(parts)
                    parts, rows, size = [], 0, 0
                parts.append(part)
                rows += len(part)
                size += part.nbytes
        if parts:
            yield self._write(parts)

    def _conform(self, batch: pa.RecordBatch) -> pa.Table:
        day = pa.array([self._day], pa.date32()).take(pa.array(np.zeros(batch.num_rows, np.int8)))
        columns = [
            day
            if one.name == "ingest_date"
            else batch.column(one.name).cast(one.type)
            if one.name in batch.schema.names
            else pa.nulls(batch.num_rows, one.type)
            for one in RAW
        ]
        return pa.table(columns, schema=RAW)

    def _write(self, parts: Sequence[pa.Table]) -> Taken:
        rows = pa.concat_tables(parts)
        return taken(write_rows(self._files, "raw_events", rows), rows)


@dataclass
class TakeTask:
    """Take parts of Parquet files in the columns of the log."""

    take: Take
    splits: list[Split]


def take_splits(task: TakeTask) -> list[Taken]:
    batches = (one for split in task.splits for one in read_split(split, _ROWS_PER_FILE))
    return list(task.take(batches))


def write_rows(files: Files, table: str, rows: pa.Table) -> DataFile:
    """Write a file of a table of silver."""
    return files.write(table, rows, _DICTIONARY, _NO_STATISTICS)


def taken(file: DataFile, rows: pa.Table) -> Taken:
    """Return what the driver must know of the rows of a file."""
    hashes, checks = hash_ids(delivery_ids(rows))
    times = _microseconds(rows["entry_time"])
    return Taken(file, hashes, checks, days_of(rows), times, _sequences(rows))


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

    A day is read from the tables when a batch has events of it, and kept.
    """

    def __init__(self, store: Store, tables: Sequence[str]) -> None:
        self._store = store
        self._tables = tables
        self._days: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def contains(self, hashes: np.ndarray, checks: np.ndarray, days: np.ndarray) -> np.ndarray:
        """Return of each id whether it is known on its day."""
        wanted = [int(day) for day in np.unique(days)]
        self._load([day for day in wanted if day not in self._days])
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

    def add(self, hashes: np.ndarray, checks: np.ndarray, days: np.ndarray) -> None:
        """Add ids of days that were read before."""
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


def plan(
    taken: Sequence[Taken],
    known: KnownIds | None,
    files: Files,
    only: Sequence[np.ndarray] | None = None,
) -> tuple[list[Plan], pa.Table]:
    """Find first deliveries (lowest entry time, then entry id) in a batch; return the plan of each
    file and the rows of `redeliveries`. `only` masks the rows of each file that are looked at."""
    if not taken:
        return [], REDELIVERIES.empty_table()
    hashes, checks, days, times, sequences = (
        np.concatenate([getattr(one, name) for one in taken])
        for name in ("hashes", "checks", "days", "times", "sequences")
    )
    counts = [len(one.hashes) for one in taken]
    file_of = np.repeat(np.arange(len(taken)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    order = _order_deliveries(hashes, checks, times, sequences)
    if only is not None:
        order = order[np.concatenate(only)[order]]
    same = np.zeros(len(order), bool)
    same[1:] = (np.diff(hashes[order]) == 0) & (np.diff(checks[order]) == 0)
    group = np.cumsum(~same) - 1
    first = order[~same]
    deliveries = np.bincount(group)
    is_known = (
        np.zeros(len(first), bool)
        if known is None
        else known.contains(hashes[first], checks[first], days[first])
    )
    skip = np.ones(len(hashes), bool)
    skip[first[~is_known]] = False
    again = np.zeros(len(hashes), np.int64)
    again[first] = deliveries
    again[skip] = 0
    plans = []
    for place, one in enumerate(taken):
        here = file_of == place
        skipped = number[here & skip].astype(np.int32)
        several = here & (again > 1)
        plans.append(
            Plan(
                one.file.name,
                one.file.rows,
                skipped.tobytes(),
                number[several].astype(np.int32).tobytes(),
                again[several].astype(np.int32).tobytes(),
            )
        )
    rows = first[is_known]
    redelivered = _redeliveries(
        taken, files, rows, deliveries[is_known], file_of, number, times, days, hashes
    )
    return plans, redelivered


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


def _redeliveries(
    taken: Sequence[Taken],
    files: Files,
    rows: np.ndarray,
    entries: np.ndarray,
    file_of: np.ndarray,
    number: np.ndarray,
    times: np.ndarray,
    days: np.ndarray,
    hashes: np.ndarray,
) -> pa.Table:
    parts = []
    for place in np.unique(file_of[rows]):
        here = file_of[rows] == place
        uri = files.uri("raw_events", taken[place].file.name)
        found = files.read([uri], ["event_id", "type", "stream", "entry_id", "time"])
        found = found.take(pa.array(number[rows[here]]))
        seen = np.where(times[rows[here]] < 0, None, times[rows[here]])
        parts.append(
            pa.table(
                [
                    pa.array(delivery_ids(found), pa.string()),
                    found["type"],
                    found["stream"],
                    found["time"],
                    pa.array(entries[here], pa.int64()),
                    pa.array(list(seen), pa.int64()).cast(TIME),
                    pa.array(days[rows[here]], pa.int32()),
                    pa.array(hashes[rows[here]]),
                ],
                schema=REDELIVERIES,
            )
        )
    return pa.concat_tables(parts) if parts else REDELIVERIES.empty_table()


def plan_known(taken: Sequence[Taken], store: Store, files: Files) -> list[Plan]:
    """Plan to skip events that raw_events has, where there is no silver that knows them."""
    known = set()
    if store.exists("raw_events"):
        known = set(store.read("raw_events", ["event_id"])["event_id"].to_pylist())
    plans = []
    for one in taken:
        ids = files.read([files.uri("raw_events", one.file.name)], ["event_id"])["event_id"]
        again = [row for row, id_ in enumerate(ids.to_pylist()) if id_ in known]
        skip = np.array(again, np.int32)
        plans.append(Plan(one.file.name, one.file.rows, skip.tobytes()))
    return plans


def drop_known(
    taken: Sequence[Taken], plans: Sequence[Plan], files: Files
) -> tuple[list[Taken], list[Plan]]:
    """Write files without the rows that their plans skip."""
    kept: list[Taken] = []
    left: list[Plan] = []
    for one, plan in zip(taken, plans, strict=True):
        stays = plan.stays
        if not stays.any():
            continue
        if not stays.all():
            rows = files.read([files.uri("raw_events", one.file.name)]).filter(pa.array(stays))
            one.file = write_rows(files, "raw_events", rows)
            plan = Plan(one.file.name, one.file.rows)
        kept.append(one)
        left.append(plan)
    return kept, left


# --- judge --------------------------------------------------------------------------------------


@dataclass
class JudgeTask:
    """Judge one file of raw_events."""

    definition: bytes
    files: Files
    plan: Plan
    with_silver: bool = True
    """False for the feed of facts alone."""


@dataclass
class JudgeResult:
    files: dict[str, DataFile]
    feed: Feed | None
    counts: list[tuple[str, date | None, int, int]]
    hashes: bytes
    checks: bytes
    days: bytes


def judge_file(task: JudgeTask) -> JudgeResult:
    """Judge the first deliveries of a file, and write what they give."""
    with collector_paused():
        judge = judge_of(task.definition)
        uri = task.files.uri("raw_events", task.plan.file)
        entries = first_deliveries(task.files.read([uri]), task.plan)
        return write_judged(task.files, judge.judge(entries, task.with_silver), judge)


def first_deliveries(raw: pa.Table, plan: Plan) -> pa.Table:
    """Return the rows of a file that its plan does not skip, in the columns that are judged."""
    counts = np.ones(len(raw), np.int64)
    counts[np.frombuffer(plan.again, np.int32)] = np.frombuffer(plan.counts, np.int32)
    hashes, checks = hash_ids(delivery_ids(raw))
    days = days_of(raw)
    made = {
        # A time of no possible day is nonsense that readers could not show.
        "time": pc.if_else(pa.array(days != NO_DAY), raw["time"], pa.scalar(None, TIME)),
        "aggregate_type": pc.map_lookup(
            raw["attributes"].combine_chunks(), "aggregatetype", "first"
        ),
        "delivery_count": pa.array(counts),
        "_day": pa.array(days),
        "_id_hash": pa.array(hashes),
        "_id_check": pa.array(checks),
    }
    columns = [made[one] if one in made else raw[one] for one in ENTRIES.names]
    entries = pa.table(columns, schema=ENTRIES)
    return entries.filter(pa.array(plan.stays)) if plan.skip else entries


def write_judged(files: Files, judged: Judged, judge: Judge) -> JudgeResult:
    written: dict[str, DataFile] = {}
    tables = {"events": judged.events, "events_quarantine": judged.quarantine, **judged.typed}
    for name, rows in tables.items():
        if len(rows):
            written[name] = write_rows(files, name, rows)
    keepers = [judged.events, judged.quarantine]
    if judge.definition.typed:
        keepers += [judged.typed[one] for one in judge.definition.streams if one in judged.typed]
    ids = pa.concat_tables([one.select(_IDS) for one in keepers])
    return JudgeResult(
        written,
        write_feed(files, judged.feed) if judge.facts else None,
        judged.counts.rows(),
        *(ids[name].to_numpy().tobytes() for name in _IDS),
    )


def write_feed(files: Files, feed: pa.Table) -> Feed | None:
    """Write the events of facts; they are in the order of their buckets."""
    if not len(feed):
        return None
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
    definition: bytes,
    files: Files,
    tasks: Tasks,
    known: KnownIds | None,
    feed_only: Sequence[Plan] = (),
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Judge the files of a batch, and enter what was written in its record. `on_progress` gets how
    many files are done, of how many."""
    work = [JudgeTask(definition, files, one) for one in batch.plans]
    work += [JudgeTask(definition, files, one, with_silver=False) for one in feed_only]
    counted: list[tuple[str, date | None, int, int]] = []
    at_once = _FILES_PER_CORE * tasks.cores
    for start in range(0, len(work), at_once):
        part = work[start : start + at_once]
        for task, one in zip(part, tasks.map(judge_file, part), strict=True):
            for name, file in one.files.items():
                batch.add(name, file)
            batch.give(one.feed)
            if task.with_silver:
                counted += one.counts
            if known is not None and one.hashes:
                known.add(
                    np.frombuffer(one.hashes, np.int64),
                    np.frombuffer(one.checks, np.int64),
                    np.frombuffer(one.days, np.int32),
                )
        on_progress(start + len(part), len(work))
    enter_counts(batch, files, counted)


def enter_counts(
    batch: Batch, files: Files, counted: Sequence[tuple[str, date | None, int, int]]
) -> None:
    """Write the counts of rules as a file of `expectations`."""
    if counted:
        columns = [list(column) for column in zip(*counted, strict=True)]
        rows = pa.table(columns, schema=EXPECTATIONS).group_by(["rule", "day"])
        table = rows.aggregate([("checked", "sum"), ("failed", "sum")])
        table = table.rename_columns(EXPECTATIONS.names)
        batch.add("expectations", files.write("expectations", table))


def today() -> date:
    return datetime.now(UTC).date()
