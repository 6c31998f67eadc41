"""Facts: states by key, to which events are applied once each, and the rows that they give.

    feed of the new batches ─┐
    stored states            ├─▶ fold, per bucket of keys ─▶ new states, removed and added rows
                             ┘

States are kept in levels, the newest first; a refresh adds a level, and puts levels of a size
together. So its cost follows the keys that it touches, and not those that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from conquiet.lake.definition import (
    ROWS_QUARANTINE,
    Definition,
    Event,
    ExpectationFailed,
    Fact,
    FactFailed,
    RefusedRow,
    Rule,
    Table,
)
from conquiet.lake.journal import FOLDER, Batch, Feed, Folded, Refresh, States
from conquiet.lake.judge import BUCKETS, Counts, Judge, event_of, holds
from conquiet.lake.schema import Encoder
from conquiet.lake.silver import write_counts
from conquiet.lake.tables import CHANGE, Files, Store
from conquiet.lake.tasks import Tasks, balance, collector_paused, judge_of

STATES = pa.schema([("hash", pa.int64()), ("key", pa.string()), ("state", pa.binary())])
_MOST_LEVELS = 12
_ROWS_PER_TASK = 200_000
"""Events of a task, about: it holds the new rows of its keys as Python objects."""
_FEED_COLUMNS = (
    "event_id",
    "type",
    "version",
    "occurred",
    "created",
    "first_seen",
    "stream",
    "partition_key",
    "deliveries",
    "data",
)


@dataclass
class FoldTask:
    """Fold some buckets: their feed, and the levels of states."""

    definition: bytes
    files: Files
    buckets: list[int]
    feed: list[Feed]
    levels: list[list[States]]
    merged: int
    """So many of the newest levels are written again, into one."""


@dataclass
class FoldResult:
    states: States | None
    changes: dict[str, str]
    """The URI of the file of changes, by table."""
    counts: list[tuple[str, date | None, int, int]]


def fold(task: FoldTask) -> FoldResult:
    """Apply the new events of some buckets to the states of their keys."""
    with collector_paused():
        folding = _Fold(task)
        for bucket in task.buckets:
            folding.fold_bucket(bucket)
        return folding.finish()


class _Fold:
    """The work of one task."""

    def __init__(self, task: FoldTask) -> None:
        self._task = task
        self._files = task.files
        self._judge: Judge = judge_of(task.definition)
        self._levels = Levels(task.files, task.levels)
        self._merged = Levels(task.files, task.levels[: task.merged])
        self._facts = self._judge.facts
        self._decoders = [msgspec.msgpack.Decoder(one.state) for one in self._facts]
        self._encode = msgspec.msgpack.Encoder().encode
        self._states: dict[str, dict[int, pa.RecordBatch]] = {}
        self._outputs = _outputs(self._judge.definition)
        self._has_refusals = RefusedRow in self._outputs
        self._counts = Counts()
        self._feeds: dict[str, Any] = {}

    def fold_bucket(self, bucket: int) -> None:
        parts = []
        for one in self._task.feed:
            place = one.buckets.get(bucket)
            if place is not None:
                parts.append(self._feed(one.file).get_batch(place))
        touched: dict[int, dict[str, bytes]] = {}
        if parts:
            touched = self._apply(bucket, pa.Table.from_batches(parts))
        for number, fact in enumerate(self._facts):
            states = touched.get(number, {})
            older = self._merged.all_of(fact.name, bucket)
            if states or len(older):
                made = _states(states, older)
                self._states.setdefault(fact.name, {})[bucket] = made

    def _feed(self, name: str) -> Any:
        if name not in self._feeds:
            path = self._files.path(self._files.uri(FOLDER, "feed", name))
            self._feeds[name] = pa.ipc.open_file(self._files.fs.open_input_file(path))
        return self._feeds[name]

    def _apply(self, bucket: int, feed: pa.Table) -> dict[int, dict[str, bytes]]:
        feed = feed.combine_chunks()
        columns = [feed[name].to_pylist() for name in _FEED_COLUMNS]
        rows = list(zip(*columns, strict=True))
        keys = feed["key"].to_pylist()
        by_fact: dict[int, dict[str, list[int]]] = {}
        for place, (fact, key) in enumerate(zip(feed["fact"].to_pylist(), keys, strict=True)):
            by_fact.setdefault(fact, {}).setdefault(key, []).append(place)
        touched: dict[int, dict[str, bytes]] = {}
        for number, wanted in by_fact.items():
            fact = self._facts[number]
            stored = self._levels.find(fact.name, bucket, list(wanted))
            decode = self._decoders[number].decode
            has_key = "key" in fact.state.__struct_fields__
            new: dict[str, bytes] = {}
            for key, places in wanted.items():
                data = stored.get(key)
                old: list[Any] = []
                if data is not None:
                    # Decoded twice: rows may share lists with the state that gave them.
                    old = self._rows(fact, _decoded(fact, decode, data))
                    state = decode(data)
                else:
                    state = fact.state(key=key) if has_key else fact.state()
                for place in places:
                    event = event_of(self._judge, rows[place])
                    try:
                        state.apply(event)  # type: ignore[attr-defined]  # checked when declared
                    except Exception as error:
                        raise _failed(fact, event, error) from error
                after = self._encode(state)
                if after == data:
                    continue
                new[key] = after
                self._change(old, self._rows(fact, state))
            touched[number] = new
        return touched

    def _rows(self, fact: Fact, state: Any) -> list[Any]:
        try:
            rows = list(state.rows())
        except Exception as error:
            raise FactFailed(
                f"fact {fact.name}: {type(state).__name__}.rows() raised"
                f" {type(error).__name__}: {error}; its state: {state!r:.300}"
            ) from error
        if len(rows) > 1 and len({self._place(row) for row in rows}) < len(rows):
            raise FactFailed(
                f"fact {fact.name}: {type(state).__name__}.rows() gave two rows with one key of"
                f" their table; its state: {state!r:.300}"
            )
        return [self._kind(row).judge(row) for row in rows] if self._has_refusals else rows

    def _change(self, old: list[Any], new: list[Any]) -> None:
        if not old:
            for row in new:
                self._output(row).add(row, 1, self._counts)
            return
        gone = {self._place(row): row for row in old}
        for row in new:
            before = gone.pop(self._place(row), None)
            if before == row:
                continue
            output = self._output(row)
            if before is not None:
                output.add(before, -1, self._counts)
            output.add(row, 1, self._counts)
        for row in gone.values():
            self._output(row).add(row, -1, self._counts)

    def _kind(self, row: Any) -> _FactTable:
        return self._output(row).kind

    def _output(self, row: Any) -> _Output:
        found = self._outputs.get(type(row))
        if found is None:
            self._judge.definition.table_of(type(row))
            raise AssertionError("table_of raises")
        return found

    def _place(self, row: Any) -> Any:
        key = self._kind(row).table.key
        return type(row), tuple([getattr(row, one) for one in key])

    def finish(self) -> FoldResult:
        states = write_states(self._files, self._states)
        changes = {}
        for output in self._outputs.values():
            if output.rows:
                name = output.kind.table.name
                changes[name] = write_changes(self._files, name, output.table())
        return FoldResult(states, changes, self._counts.rows())


@dataclass(frozen=True)
class _FactTable:
    """A table of facts: how its rows are written and checked."""

    table: Table
    encoder: Encoder
    rules: list[Rule]

    def judge(self, row: Any) -> Any:
        """Return a row, or what is kept of it in quarantine."""
        for rule in self.rules:
            if rule.on_fail == "quarantine" and not holds(rule, row):
                key = msgspec.json.encode([getattr(row, one) for one in self.table.key]).decode()
                text = msgspec.json.encode(row).decode()
                return RefusedRow(self.table.name, key, rule.name, self.day(row), text)
        return row

    def day(self, row: Any) -> date | None:
        """Return the day of a row, by which its rules are counted."""
        value = getattr(row, self.table.partition_by or "", None)
        return value if isinstance(value, date) else None


@dataclass
class _Output:
    """Rows of one table that were removed and added."""

    kind: _FactTable
    rows: list[Any] = field(default_factory=list)
    signs: list[int] = field(default_factory=list)

    def add(self, row: Any, sign: int, counts: Counts) -> None:
        self.rows.append(row)
        self.signs.append(sign)
        if self.kind.table.name == ROWS_QUARANTINE:
            counts.add(row.rule, row.day, sign, sign)
        for rule in self.kind.rules:
            is_right = holds(rule, row)
            if not is_right and sign > 0 and rule.on_fail == "stop":
                raise ExpectationFailed(
                    f"a row of {self.kind.table.name} breaks the rule {rule.name}, which stops the"
                    f" pipeline: {row!r:.300}"
                )
            counts.add(rule.name, self.kind.day(row), sign, 0 if is_right else sign)

    def table(self) -> pa.Table:
        try:
            rows = self.kind.encoder.table(self.rows)
        except (pa.ArrowException, TypeError) as error:
            raise FactFailed(f"table {self.kind.table.name}: a row's {error}") from error
        return rows.append_column(CHANGE, pa.array(self.signs, pa.int8()))


def _outputs(definition: Definition) -> dict[type, _Output]:
    """Return an output for each table, by the class of its rows."""
    found = {}
    for one in definition.tables.values():
        rules = [rule for rule in definition.rules if rule.of is one.row]
        found[one.row] = _Output(_FactTable(one, Encoder(one.row), rules))
    return found


def _decoded(fact: Fact, decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        raise FactFailed(
            f"fact {fact.name}: a stored state does not fit {fact.state.__name__} ({error}): give"
            " new fields a default at the end, or make facts again by pipeline.replay()"
        ) from error


def _failed(fact: Fact, event: Event, error: Exception) -> FactFailed:
    return FactFailed(
        f"fact {fact.name}: {fact.state.__name__}.apply raised {type(error).__name__}: {error}"
        f" on the event {event.event_id} ({event.type} version {event.version})"
    )


def write_changes(files: Files, table: str, rows: pa.Table) -> str:
    folder = f"{FOLDER}/changes/{table}"
    file = files.write(folder, rows)
    return files.uri(folder, file.name)


# --- states -------------------------------------------------------------------------------------


def hash_key(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


def _states(new: dict[str, bytes], older: pa.Table) -> pa.RecordBatch:
    """Return states by the hash of their key; a new state takes the place of an older one."""
    keys = list(new)
    hashes = np.fromiter((hash_key(one) for one in keys), np.int64, len(keys))
    fresh = pa.table(
        [pa.array(hashes), pa.array(keys, pa.string()), pa.array(list(new.values()), pa.binary())],
        schema=STATES,
    )
    if len(older):
        older = older.filter(
            pc.invert(pc.is_in(older["key"], value_set=fresh["key"].combine_chunks()))
        )
        fresh = pa.concat_tables([fresh, older])
    order = np.argsort(fresh["hash"].to_numpy(), kind="stable")
    made = fresh.take(pa.array(order)).combine_chunks()
    return made.to_batches()[0] if len(made) else pa.RecordBatch.from_pylist([], schema=STATES)


def write_states(files: Files, states: dict[str, dict[int, pa.RecordBatch]]) -> States | None:
    if not states:
        return None
    name = files.new_name(f"{FOLDER}/states").replace(".parquet", ".arrow")
    parts: dict[str, dict[int, int]] = {}
    rows = place = 0
    path = files.path(files.uri(FOLDER, "states", name))
    with files.fs.open_output_stream(path) as out, pa.ipc.new_file(out, STATES) as writer:
        for fact, buckets in states.items():
            for bucket, batch in buckets.items():
                writer.write_batch(batch)
                parts.setdefault(fact, {})[bucket] = place
                rows += len(batch)
                place += 1
    return States(name, parts, rows)


class Levels:
    """Stored states, the newest level first."""

    def __init__(self, files: Files, levels: Sequence[Sequence[States]]) -> None:
        self._files = files
        self._levels = levels
        self._open: dict[str, Any] = {}

    def _batches(self, fact: str, bucket: int) -> list[pa.RecordBatch]:
        return [
            self._file(one.file).get_batch(one.parts[fact][bucket])
            for level in self._levels
            for one in level
            if bucket in one.parts.get(fact, ())
        ]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            uri = self._files.uri(FOLDER, "states", name)
            # Mapped into memory, so that a look-up reads the pages of its keys and no others.
            source = (
                pa.memory_map(uri)
                if self._files.is_local
                else self._files.fs.open_input_file(self._files.path(uri))
            )
            self._open[name] = pa.ipc.open_file(source)
        return self._open[name]

    def find(self, fact: str, bucket: int, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the newest state of each key that has one."""
        found: dict[str, bytes] = {}
        batches = self._batches(fact, bucket)
        left = list(keys) if batches else []
        hashes = np.fromiter((hash_key(one) for one in left), np.int64, len(left))
        for batch in batches:
            if not left:
                break
            stored = batch.column(0).to_numpy()
            places = np.searchsorted(stored, hashes)
            places[places == len(stored)] = 0
            hits = (
                np.flatnonzero(stored[places] == hashes) if len(stored) else np.empty(0, np.int64)
            )
            for hit in hits:
                key, place = left[hit], int(places[hit])
                while place < len(stored) and stored[place] == hashes[hit]:
                    if batch.column(1)[place].as_py() == key:
                        found[key] = batch.column(2)[place].as_py()
                        break
                    place += 1
            stays = [place for place, key in enumerate(left) if key not in found]
            left, hashes = [left[place] for place in stays], hashes[stays]
        return found

    def all_of(self, fact: str, bucket: int) -> pa.Table:
        """Return the newest state of every key of a bucket."""
        batches = self._batches(fact, bucket)
        if not batches:
            return STATES.empty_table()
        rows = pa.Table.from_batches(batches)
        if len(batches) == 1:
            return rows
        level = np.repeat(np.arange(len(batches)), [len(one) for one in batches])
        places = pa.table([rows["key"], pa.array(np.arange(len(level)))], ["key", "place"])
        # Levels are in the order of their age: the first place of a key is its newest.
        first = places.group_by("key", use_threads=False).aggregate([("place", "min")])
        return rows.take(first["place_min"])


# --- the driver's part --------------------------------------------------------------------------


def run_fold(
    definition: bytes,
    batches: Sequence[Batch],
    refresh: Refresh,
    files: Files,
    tasks: Tasks,
    *,
    through: int,
    gone: dict[str, list[str]] | None = None,
) -> Folded:
    """Fold the feed of some batches into new states, up to the batch `through`.

    `gone` is for a rebuild, which begins without states: the files of all rows that were there.
    """
    feed = [one for batch in batches for one in batch.feed]
    levels = [] if gone is not None else refresh.levels
    rows_of = np.zeros(BUCKETS, np.int64)
    for one in feed:
        for bucket, rows in one.rows.items():
            rows_of[bucket] += rows
    merged = _levels_to_merge(int(rows_of.sum()), levels)
    for level in levels[:merged]:
        for file in level:
            for parts in file.parts.values():
                for bucket in parts:
                    rows_of[bucket] += 1
    count = max(tasks.cores * 2, int(rows_of.sum()) // _ROWS_PER_TASK)
    groups = balance(rows_of.tolist(), count)
    results = tasks.map(
        fold,
        [
            FoldTask(
                definition,
                files,
                group,
                _only(feed, group),
                _only_states(levels, group),
                merged,
            )
            for group in groups
        ],
    )
    changes: dict[str, list[str]] = {}
    for result in results:
        for name, uri in result.changes.items():
            changes.setdefault(name, []).append(uri)
    for name, uris in (gone or {}).items():
        changes.setdefault(name, []).extend(uris)
    level = [one.states for one in results if one.states is not None]
    counted = [row for one in results for row in one.counts]
    return Folded(
        through,
        [level, *levels[merged:]] if level else list(levels),
        changes,
        replace=gone is not None,
        counts=write_counts(files, counted),
    )


def _levels_to_merge(new: int, levels: Sequence[Sequence[States]]) -> int:
    """Return how many of the newest levels are about as large as what is newer."""
    size, count = new, 0
    for level in levels:
        rows = sum(one.rows for one in level)
        if size * 2 < rows and len(levels) - count < _MOST_LEVELS:
            break
        size += rows
        count += 1
    return count


def _only(feed: list[Feed], buckets: list[int]) -> list[Feed]:
    wanted = set(buckets)
    cut = [
        Feed(one.file, {bucket: at for bucket, at in one.buckets.items() if bucket in wanted}, {})
        for one in feed
    ]
    return [one for one in cut if one.buckets]


def _only_states(levels: Sequence[Sequence[States]], buckets: list[int]) -> list[list[States]]:
    wanted = set(buckets)
    return [
        [
            States(
                one.file,
                {
                    fact: {bucket: at for bucket, at in parts.items() if bucket in wanted}
                    for fact, parts in one.parts.items()
                },
                one.rows,
            )
            for one in level
        ]
        for level in levels
    ]


def merge_table(store: Store, definition: Definition, folded: Folded, name: str) -> bool:
    """Bring one table of facts up to a refresh."""
    table = definition.tables[name]
    uris = folded.changes.get(name, [])
    if store.version(name) >= folded.through:
        return False
    if not uris and not folded.replace and store.exists(name):
        return False
    changes = (
        store.files_of_lake.read(uris)
        if uris
        else table.schema.append(pa.field(CHANGE, pa.int8())).empty_table()
    )
    if folded.replace:
        changes = changes.filter(pc.equal(changes[CHANGE], 1))
        return store.overwrite(
            name, changes.select(table.schema.names), folded.through, table.partition_by, table.key
        )
    return store.merge(
        name,
        changes,
        folded.through,
        key=table.key,
        partition_by=table.partition_by,
        schema=table.schema,
    )
