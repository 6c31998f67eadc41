"""Judge: one look at each event, by the structs that producers use: typed columns, or a reason.

    entry ──▶ malformed_entry ─▶ broken_json ─▶ bad_envelope ─▶ unknown_type ─▶ unknown_version
          ──▶ null_data ─▶ invalid_data ─▶ rules by name ──▶ a row of silver, the feed of facts

The first check that fails is the reason. The same code serves Spark's tasks, a batch in the driver
and a test without Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import inspect

from conquiet.lake.definition import (
    EPOCH,
    Definition,
    Event,
    ExpectationFailed,
    Fact,
    FactFailed,
    Rule,
    table_of_type,
)
from conquiet.lake.schema import TIME, Encoder, arrange, arrow_schema, without_none

BUCKETS = 64
"""Into so many parts the keys of a fact are divided; a part is the unit of a task."""

_IDENTITY = [("_day", pa.int32()), ("_id_hash", pa.int64()), ("_id_check", pa.int64())]
EVENTS = pa.schema(
    [
        ("event_id", pa.string()),
        ("event_type", pa.string()),
        ("version", pa.int32()),
        ("aggregate_type", pa.string()),
        ("aggregate_id", pa.string()),
        ("occurred_at", TIME),
        ("created_at", TIME),
        ("actor_type", pa.string()),
        ("actor_id", pa.string()),
        ("actor_store_id", pa.string()),
        ("payload", pa.string()),
        ("first_seen_at", TIME),
        ("delivery_count", pa.int64()),
        ("moment", TIME),
        ("stream", pa.string()),
        ("entry_id", pa.string()),
        ("key", pa.string()),
        *_IDENTITY,
    ]
)
QUARANTINE = pa.schema(
    [
        ("event_id", pa.string()),
        ("stream", pa.string()),
        ("entry_id", pa.string()),
        ("event_type", pa.string()),
        ("version", pa.int32()),
        ("reason", pa.string()),
        ("created_at", TIME),
        ("data", pa.binary()),
        ("first_seen_at", TIME),
        ("delivery_count", pa.int64()),
        ("aggregate_type", pa.string()),
        ("aggregate_id", pa.string()),
        ("key", pa.string()),
        *_IDENTITY,
    ]
)
TYPED = pa.schema(
    [
        ("event_id", pa.string()),
        ("version", pa.int32()),
        ("occurred_at", TIME),
        ("created_at", TIME),
        ("moment", TIME),
        ("first_seen_at", TIME),
        ("delivery_count", pa.int64()),
        ("stream", pa.string()),
        ("entry_id", pa.string()),
        *_IDENTITY,
    ]
)
"""The columns that the table of an event type has before the fields of its data."""
FEED = pa.schema(
    [
        ("bucket", pa.int16()),
        ("fact", pa.int16()),
        ("key", pa.string()),
        ("event_id", pa.string()),
        ("type", pa.string()),
        ("version", pa.int32()),
        ("occurred", pa.int64()),
        ("created", pa.int64()),
        ("first_seen", pa.int64()),
        ("stream", pa.string()),
        ("partition_key", pa.string()),
        ("deliveries", pa.int64()),
        ("data", pa.binary()),
    ]
)
ENTRIES = pa.schema(
    [
        ("stream", pa.string()),
        ("entry_id", pa.string()),
        ("entry_time", TIME),
        ("key", pa.string()),
        ("event_id", pa.string()),
        ("type", pa.string()),
        ("subject", pa.string()),
        ("aggregate_type", pa.string()),
        ("time", TIME),
        ("data", pa.binary()),
        ("_malformed", pa.string()),
        ("delivery_count", pa.int64()),
        *_IDENTITY,
    ]
)
"""What the judge is given: first deliveries, each with the count of its deliveries."""

_END = datetime(9999, 1, 1, tzinfo=UTC)
"""Tables hold times from 1970 up to this."""
_MICROSECOND = timedelta(microseconds=1)
_MOST_INT = 2**63
_nul = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
_fault = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Actor(msgspec.Struct, rename="camel", gc=False):
    type: str | None = None
    id: str | None = None
    store_id: str | None = None


Data = TypeVar("Data")


class _Envelope(msgspec.Struct, Generic[Data], rename="camel", gc=False):
    version: int
    event_id: str
    occurred_at: Annotated[datetime, msgspec.Meta(tz=True)]
    data: Data
    actor: _Actor | None = None


class _Header(msgspec.Struct, gc=False):
    version: int


_headers = msgspec.json.Decoder(_Header)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_ACTOR = _Actor()


@dataclass
class Counts:
    """How often each rule was checked and broken, by day."""

    checked: dict[tuple[str, date | None], int] = field(default_factory=dict)
    failed: dict[tuple[str, date | None], int] = field(default_factory=dict)

    def add(self, rule: str, day: date | None, checked: int, failed: int) -> None:
        key = rule, day
        self.checked[key] = self.checked.get(key, 0) + checked
        if failed:
            self.failed[key] = self.failed.get(key, 0) + failed

    def rows(self) -> list[tuple[str, date | None, int, int]]:
        return [(*key, count, self.failed.get(key, 0)) for key, count in self.checked.items()]


@dataclass
class Judged:
    """What became of the entries of one file."""

    events: pa.Table
    quarantine: pa.Table
    typed: dict[str, pa.Table]
    feed: pa.Table
    counts: Counts


class Judge:
    """Judges entries by a definition; it is built once per process."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.types = definition.types
        self.kinds = {
            (event_type, version): _Kind(definition, event_type, version, struct)
            for (event_type, version), struct in definition.structs.items()
        }
        self.facts = list(definition.facts.values())
        self._has_keys = any(callable(one.key) for one in self.facts)
        self._typed = typed_schemas(definition)

    def judge(self, entries: pa.Table, with_silver: bool = True) -> Judged:
        """Judge first deliveries; `with_silver=False` for the feed alone."""
        counts = Counts()
        good, bad = _Good(), _Bad()
        look = _Look(entries, with_times=bool(self.definition.plain))
        for kind, read in self._read(look, bad).items():
            self._keep(kind, read, look, good, bad, counts)
        return self._judged(entries, good, bad, counts, with_silver)

    def _read(self, look: _Look, bad: _Bad) -> dict[_Kind, _Read]:
        """Read the events of each kind; what a kind cannot read is refused with its reason."""
        found: dict[_Kind, _Read] = {}
        doubtful: list[int] = []
        for kind, rows in self._by_kind(look, bad, doubtful).items():
            found[kind] = kind.read(rows, look, doubtful)
        for row in doubtful:
            names = look.streams[row], look.ids[row], look.types[row]
            if names[2] in self.definition.plain:
                bad.add(row, 1, self._reason_of_plain(names[0], names[2], look, row))
                continue
            reason, version, again = self._reason(*names, look.data[row])
            if again is None:
                bad.add(row, version, reason)
            else:
                envelope, kind = again
                found.setdefault(kind, _Read()).add(row, envelope)
        return found

    def _by_kind(self, look: _Look, bad: _Bad, doubtful: list[int]) -> dict[_Kind, list[int]]:
        """Find the kind of each entry, before all of it is read."""
        found: dict[_Kind, list[int]] = {}
        by_type: dict[tuple[str, str], list[int]] = {}
        columns = look.streams, look.ids, look.types, look.malformed
        for row, (stream, event_id, event_type, fault) in enumerate(zip(*columns, strict=True)):
            if fault is not None or not event_id or not event_type:
                bad.add(row, None, "malformed_entry")
            elif row in look.no_text:
                bad.add(row, None, "broken_json")
            elif rows := by_type.get((stream, event_type)):
                rows.append(row)
            else:
                by_type[stream, event_type] = [row]
        for (stream, event_type), rows in by_type.items():
            versions = self.types.get(event_type, [])
            if not self.definition.accepts(stream, event_type):
                versions = []
            if len(versions) == 1:  # it is compared when an event is read
                found.setdefault(self.kinds[event_type, versions[0]], []).extend(rows)
                continue
            for row in rows:
                version = _version(look.data[row]) if versions else None
                if version in versions:
                    found.setdefault(self.kinds[event_type, version], []).append(row)
                else:
                    doubtful.append(row)
        return found

    def _keep(
        self, kind: _Kind, read: _Read, look: _Look, good: _Good, bad: _Bad, counts: Counts
    ) -> None:
        """Check the rules of a kind, and keep the events that break none."""
        if kind.rules:
            kept = _Read()
            for row, envelope in zip(read.rows, read.envelopes, strict=True):
                broken = _check(kind.rules, envelope.data, look.days[row], counts, look.ids[row])
                if broken is None:
                    kept.add(row, envelope)
                else:
                    bad.add(row, kind.version, broken)
            read = kept
        if read.rows:
            good.add(kind, read)

    def _reason(
        self, stream: str, event_id: str, event_type: str, data: bytes | None
    ) -> tuple[str, int | None, tuple[_Envelope[Any], _Kind] | None]:
        """Find the first check that an entry fails; an entry whose actor alone is not as expected
        fails none, and is returned."""
        try:
            fields = _objects.decode(data or b"")
        except _fault:
            return "broken_json", None, None
        version = _read(fields.get("version"), int)
        version = version if isinstance(version, int) and not isinstance(version, bool) else None
        shown = _column_version(version)
        occurred = _read(fields.get("occurredAt"), Annotated[datetime, msgspec.Meta(tz=True)])
        if (
            version is None
            or not 0 < version < _MOST_INT
            or _read(fields.get("eventId"), str) != event_id
            or occurred is None
            or not _plausible_times([occurred])
        ):
            return "bad_envelope", shown, None
        kind = self.kinds.get((event_type, version))
        accepts = self.definition.accepts(stream, event_type)
        if kind is None or not accepts:
            is_known = accepts and event_type in self.types
            return "unknown_version" if is_known else "unknown_type", shown, None
        raw = bytes(fields.get("data", b""))
        if raw in (b"", b"null"):
            return "null_data", shown, None
        try:
            value = kind.decode(raw)
        except _fault:
            return "invalid_data", shown, None
        if not kind.values_are_plausible([value]):
            return "invalid_data", shown, None
        return "", shown, (_Envelope(version, event_id, occurred, value), kind)

    def _reason_of_plain(self, stream: str, event_type: str, look: _Look, row: int) -> str:
        """Find the first check that an entry without an envelope fails."""
        if not self.definition.accepts(stream, event_type):
            return "unknown_type"
        data = look.data[row] or b""
        if data.strip() in (b"", b"null"):
            return "null_data"
        if look.times[row] is None:
            return "malformed_entry"
        try:
            _objects.decode(data)
        except _fault:
            return "broken_json"
        return "invalid_data"

    # --- columns --------------------------------------------------------------------------------

    def _judged(
        self,
        entries: pa.Table,
        good: _Good,
        bad: _Bad,
        counts: Counts,
        with_silver: bool,
    ) -> Judged:
        taken = entries.take(pa.array(good.rows, pa.int64()))
        lengths = [end - start for _, start, end in good.kinds]
        of_kinds = [kind.version for kind, _, _ in good.kinds]
        versions = pa.array(np.repeat(of_kinds, lengths), pa.int32())
        occurred = pa.array(good.occurred, TIME)
        feed = self._feed(taken, good, versions, occurred)
        if not with_silver:
            empty = EVENTS.empty_table()
            return Judged(empty, QUARANTINE.empty_table(), {}, feed, counts)
        actors = [one.actor or _NO_ACTOR for one in good.envelopes]
        made = {
            "event_type": taken["type"],
            "version": versions,
            "aggregate_id": taken["subject"],
            "occurred_at": occurred,
            "created_at": taken["time"],
            "actor_type": pa.array([one.type for one in actors], pa.string()),
            "actor_id": pa.array([one.id for one in actors], pa.string()),
            "actor_store_id": pa.array([one.store_id for one in actors], pa.string()),
            "payload": taken["data"].cast(pa.string()),
            "first_seen_at": taken["entry_time"],
            "moment": _moments(good, occurred),
        }
        events = arrange(taken, EVENTS, made)
        typed = self._typed_tables(events, good) if self.definition.typed else {}
        bound = set(self.definition.streams) if self.definition.typed else set()
        if bound:
            own = [(at, end) for kind, at, end in good.kinds if kind.event_type not in bound]
            parts = [events.slice(at, end - at) for at, end in own]
            events = pa.concat_tables(parts) if parts else EVENTS.empty_table()
        refused = entries.take(pa.array(bad.rows, pa.int64()))
        given = {
            "event_type": refused["type"],
            "version": pa.array(bad.versions, pa.int32()),
            "reason": pa.array(bad.reasons, pa.string()),
            "created_at": refused["time"],
            "first_seen_at": refused["entry_time"],
            "aggregate_id": refused["subject"],
        }
        return Judged(events, arrange(refused, QUARANTINE, given), typed, feed, counts)

    def _typed_tables(self, events: pa.Table, good: _Good) -> dict[str, pa.Table]:
        base = events.select(TYPED.names)
        found: dict[str, list[pa.Table]] = {}
        for kind, start, end in good.kinds:
            data = kind.encoder.table(good.values[start:end])
            rows = base.slice(start, end - start)
            columns = [*rows.columns, *data.columns]
            names = [*rows.column_names, *map(_column, data.column_names)]
            table = table_of_type(kind.event_type)
            schema = self._typed[table]
            found.setdefault(table, []).append(_fit(pa.table(columns, names=names), schema))
        return {name: pa.concat_tables(parts) for name, parts in found.items()}

    def _feed(
        self, taken: pa.Table, good: _Good, versions: pa.Array, occurred: pa.Array
    ) -> pa.Table:
        places: list[int] = []
        facts: list[int] = []
        found: list[Any] = []
        for kind, start, end in good.kinds:
            for fact, name in kind.fields:
                values = list(map(attrgetter(name), good.values[start:end]))
                there = [place for place, one in enumerate(values, start) if one is not None]
                places += there
                facts += [fact] * len(there)
                found += [one for one in values if one is not None]
        keys = [one if type(one) is str else str(one) for one in msgspec.to_builtins(found)]
        if self._has_keys:
            self._computed_keys(taken, good, places, facts, keys)
        if not keys:
            return FEED.empty_table()
        buckets = np.fromiter((bucket_of(key) for key in keys), np.int16, len(keys))
        order = np.lexsort((np.asarray(facts), buckets))
        rows = np.asarray(places)[order]
        chosen = pa.array(rows, pa.int64())
        some = taken.select(
            [
                "event_id",
                "type",
                "time",
                "entry_time",
                "stream",
                "key",
                "subject",
                "delivery_count",
                "data",
            ]
        ).take(chosen)
        return pa.table(
            [
                pa.array(buckets[order]),
                pa.array(np.asarray(facts, np.int16)[order]),
                pa.array(keys, pa.string()).take(pa.array(order)),
                some["event_id"],
                some["type"],
                versions.take(chosen),
                occurred.take(chosen).cast(pa.int64()),
                some["time"].cast(pa.int64()),
                some["entry_time"].cast(pa.int64()),
                some["stream"],
                pc.coalesce(some["key"], some["subject"]),
                some["delivery_count"],
                some["data"],
            ],
            schema=FEED,
        )

    def _computed_keys(
        self, taken: pa.Table, good: _Good, places: list[int], facts: list[int], keys: list[str]
    ) -> None:
        names = ("event_id", "type", "stream", "key", "subject", "delivery_count")
        columns = [taken[name].to_pylist() for name in names]
        created = taken["time"].cast(pa.int64()).to_pylist()
        seen = taken["entry_time"].cast(pa.int64()).to_pylist()
        wanted = [(number, one) for number, one in enumerate(self.facts) if callable(one.key)]
        for kind, start, end in good.kinds:
            asked = [
                (number, fact)
                for number, fact in wanted
                if fact.events is None or kind.event_type in fact.events
            ]
            for place in range(start, end) if asked else ():
                event_id, event_type, stream, key, subject, deliveries = (
                    column[place] for column in columns
                )
                value = good.values[place]
                event = Event(
                    event_id,
                    event_type,
                    kind.version,
                    (good.occurred[place] - EPOCH) // _MICROSECOND,
                    created[place],
                    seen[place],
                    stream,
                    key if key is not None else subject,
                    value,
                    deliveries,
                    getattr(value, kind.moment) if kind.moment else None,
                )
                for number, fact in asked:
                    for one in _keys_of(fact, event):
                        places.append(place)
                        facts.append(number)
                        keys.append(one)


class _Look:
    """The columns of entries that are looked at one by one."""

    def __init__(self, entries: pa.Table, *, with_times: bool = False) -> None:
        names = ("stream", "event_id", "type", "data", "_malformed")
        columns = [entries[name].to_pylist() for name in names]
        self.streams, self.ids, self.types, data, self.malformed = columns
        self.data = [
            replace_nul(one) if one is not None and b"\\u0000" in one else one for one in data
        ]
        self.days = entries["_day"].to_pylist()
        self.times: list[datetime | None] = (
            pc.coalesce(entries["time"], entries["entry_time"]).to_pylist() if with_times else []
        )
        self.no_text = _rows_without_text(entries["data"])


class _Read:
    """Events of one kind that could be read, with the rows of their entries."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.envelopes: list[_Envelope[Any]] = []

    def add(self, row: int, envelope: _Envelope[Any]) -> None:
        self.rows.append(row)
        self.envelopes.append(envelope)


class _Bad:
    """The entries of a file that were refused, column by column."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.versions: list[int | None] = []
        self.reasons: list[str] = []

    def add(self, row: int, version: int | None, reason: str) -> None:
        self.rows.append(row)
        self.versions.append(version)
        self.reasons.append(reason)


class _Good:
    """The events of a file that passed all checks, kind by kind, column by column."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.envelopes: list[_Envelope[Any]] = []
        self.occurred: list[datetime] = []
        self.values: list[Any] = []
        self.kinds: list[tuple[_Kind, int, int]] = []
        """Each kind with the places of its first event and after its last one."""

    def add(self, kind: _Kind, read: _Read) -> None:
        start = len(self.rows)
        self.rows += read.rows
        self.envelopes += read.envelopes
        self.occurred += [one.occurred_at for one in read.envelopes]
        self.values += [one.data for one in read.envelopes]
        self.kinds.append((kind, start, len(self.rows)))


class _Kind:
    """One version of an event type: how its data is read, checked and stored."""

    def __init__(
        self, definition: Definition, event_type: str, version: int, struct: type[msgspec.Struct]
    ) -> None:
        self.event_type = event_type
        self.version = version
        self.decode = msgspec.json.Decoder(struct).decode
        self._open = msgspec.json.Decoder(_Envelope[struct]).decode  # type: ignore[valid-type]  # made at run time
        self.values_are_plausible = _plausible(inspect.type_info(struct)) or (lambda values: True)
        self.rules = [one for one in definition.rules if one.of is struct]
        self.moment = definition.moments.get(event_type)
        self._is_plain = event_type in definition.plain
        self.fields = [
            (number, fact.key)
            for number, fact in enumerate(definition.facts.values())
            if isinstance(fact.key, str)
            and fact.key in struct.__struct_fields__
            and (fact.events is None or event_type in fact.events)
        ]
        self.encoder = Encoder(struct)

    def read(self, rows: list[int], look: _Look, doubtful: list[int]) -> _Read:
        """Read entries of this kind; those that are not as they should be become doubtful."""
        found = (self._read_plain if self._is_plain else self._open_all)(rows, look, doubtful)
        if self._are_plausible(found.envelopes):
            return found
        plausible = _Read()
        for row, envelope in zip(found.rows, found.envelopes, strict=True):
            if self._are_plausible([envelope]):
                plausible.add(row, envelope)
            else:
                doubtful.append(row)
        return plausible

    def _open_all(self, rows: list[int], look: _Look, doubtful: list[int]) -> _Read:
        """Read entries that have an envelope."""
        found = _Read()
        data, ids, read, version = look.data, look.ids, self._open, self.version
        for row in rows:
            try:
                envelope = read(data[row] or b"")
            except _fault:
                doubtful.append(row)
                continue
            if envelope.version == version and envelope.event_id == ids[row]:
                found.rows.append(row)
                found.envelopes.append(envelope)
            else:
                doubtful.append(row)
        return found

    def _read_plain(self, rows: list[int], look: _Look, doubtful: list[int]) -> _Read:
        """Read entries that have their data alone."""
        found = _Read()
        for row in rows:
            occurred = look.times[row]
            try:
                value = self.decode(look.data[row] or b"")
            except _fault:
                doubtful.append(row)
                continue
            if occurred is None:
                doubtful.append(row)
            else:
                found.add(row, _Envelope(self.version, look.ids[row], occurred, value))
        return found

    def _are_plausible(self, envelopes: list[_Envelope[Any]]) -> bool:
        return _plausible_times(
            [one.occurred_at for one in envelopes]
        ) and self.values_are_plausible([one.data for one in envelopes])

    def open_again(self, data: bytes) -> Any:
        """Read the data of an event that was judged before."""
        if b"\\u0000" in data:
            data = replace_nul(data)
        if self._is_plain:
            return self.decode(data)
        try:
            return self._open(data).data
        except _fault:  # its actor is not as expected
            return self.decode(_objects.decode(data)["data"])


def bucket_of(key: str) -> int:
    """Return the part of a fact's keys that a key belongs to."""
    return crc32(key.encode()) % BUCKETS


def _keys_of(fact: Fact, event: Event) -> list[str]:
    """Return the keys that a fact's function gives for an event."""
    try:
        given = fact.key(event)  # type: ignore[operator]  # a function here
        if given is None:
            return []
        several = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
        return [one if type(one) is str else str(msgspec.to_builtins(one)) for one in several]
    except Exception as error:
        raise FactFailed(
            f"fact {fact.name}: its key raised {type(error).__name__}: {error} on the event"
            f" {event.event_id} ({event.type} version {event.version})"
        ) from error


def event_of(judge: Judge, row: tuple[Any, ...]) -> Event:
    """Build an event from a row of the feed, without its bucket, fact and key."""
    event_id, event_type, version, occurred, created, seen, stream, key, deliveries, data = row
    kind = judge.kinds[event_type, version]
    value = kind.open_again(data)
    moment = getattr(value, kind.moment) if kind.moment else None
    return Event(
        event_id,
        event_type,
        version,
        occurred,
        created,
        seen,
        stream,
        key,
        value,
        deliveries,
        moment,
    )


def _column(name: str) -> str:
    """Return the column of a field of data; `data_` sets it apart from the envelope's columns."""
    return f"data_{name}" if name in TYPED.names else name


def typed_schemas(definition: Definition) -> dict[str, pa.Schema]:
    """Return the schema of each event type's table: the fields of all its versions."""
    found: dict[str, pa.Schema] = {}
    for (event_type, _), struct in sorted(definition.structs.items(), key=lambda one: one[0]):
        table = table_of_type(event_type)
        schema = found.get(table, TYPED)
        for column in arrow_schema(struct):
            name = _column(column.name)
            if name not in schema.names:
                schema = schema.append(pa.field(name, column.type))
            elif schema.field(name).type != column.type:
                schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
        found[table] = schema
    return found


def _fit(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give rows of one version the columns of all; values of differing types become JSON text."""
    columns = []
    for one in schema:
        if one.name not in rows.column_names:
            columns.append(pa.nulls(len(rows), one.type))
        elif rows.schema.field(one.name).type == one.type:
            columns.append(rows[one.name])
        else:
            values = rows[one.name].to_pylist()
            texts = [None if it is None else msgspec.json.encode(it).decode() for it in values]
            columns.append(pa.array(texts, pa.string()))
    return pa.table(columns, schema=schema)


# --- checks -------------------------------------------------------------------------------------


def _check(rules: list[Rule], value: Any, days: int, counts: Counts, event_id: str) -> str | None:
    """Count the rules of an event; return the first one that refuses it."""
    day = EPOCH.date() + timedelta(days=days) if days >= 0 else None
    for rule in rules:
        is_right = holds(rule, value)
        counts.add(rule.name, day, 1, 0 if is_right else 1)
        if is_right or rule.on_fail == "count":
            continue
        if rule.on_fail == "stop":
            raise ExpectationFailed(
                f"event {event_id} breaks the rule {rule.name}, which stops the pipeline;"
                " correct the rule or the event, and start again"
            )
        return rule.name
    return None


def holds(rule: Rule, value: Any) -> bool:
    """Return whether a value keeps a rule; a rule that raises is broken."""
    try:
        return bool(rule.check(value))
    except Exception:  # noqa: BLE001 - one event must not end the pipeline
        return False


def _plausible_times(moments: Sequence[datetime]) -> bool:
    """Return whether all moments are of the years 1970 to 9998, in UTC."""
    if not moments:
        return True
    try:
        return min(moments) >= EPOCH and max(moments) < _END
    except TypeError:  # some have no zone: those of the machine
        pass
    try:
        return _plausible_times([one if one.tzinfo else one.astimezone() for one in moments])
    except (OverflowError, ValueError):
        return False


def _plausible(info: inspect.Type) -> Callable[[Sequence[Any]], bool] | None:
    """Return a check of values, all at once, for what msgspec accepts and a table cannot hold; None
    if it would check nothing."""
    kind = without_none(info)
    if kind is not info:
        check = _plausible(kind)
        if check is None:
            return None
        return lambda values: check([one for one in values if one is not None])
    if isinstance(info, inspect.DateTimeType):
        return _plausible_times
    if isinstance(info, inspect.IntType):
        if (info.le is not None or info.lt is not None) and (
            info.ge is not None or info.gt is not None
        ):
            return None
        return lambda values: not values or (min(values) >= -_MOST_INT and max(values) < _MOST_INT)
    if isinstance(info, (inspect.ListType, inspect.SetType, inspect.VarTupleType)):
        item = _plausible(info.item_type)
        return None if item is None else lambda values: item(list(chain.from_iterable(values)))
    if isinstance(info, inspect.StructType):
        checks = [(attrgetter(one.name), _plausible(one.type)) for one in info.fields]
        wanted = [(read, check) for read, check in checks if check is not None]
        if not wanted:
            return None
        return lambda values: all(check(list(map(read, values))) for read, check in wanted)
    return None


def _moments(good: _Good, occurred: pa.Array) -> pa.ChunkedArray:
    """Return when each event happened: the time in its data that its kind names, or `occurred`."""
    parts = []
    for kind, start, end in good.kinds:
        moments = occurred.slice(start, end - start)
        if kind.moment is not None:
            own = pa.array(map(attrgetter(kind.moment), good.values[start:end]), TIME)
            moments = pc.coalesce(own, moments)
        parts.append(moments)
    return pa.chunked_array(parts, TIME)


def replace_nul(data: bytes) -> bytes:
    """Replace an escaped NUL, which tables cannot hold, by U+FFFD."""
    return _nul.sub(rb"\1\\ufffd", data)


def _version(data: bytes | None) -> int | None:
    """Read the version of an event alone."""
    try:
        return _headers.decode(data or b"").version
    except _fault:
        return None


def _read(raw: msgspec.Raw | None, kind: Any) -> Any:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except _fault:
        return None


def _column_version(version: int | None) -> int | None:
    return version if version is not None and 0 <= version < 2**31 else None


def _rows_without_text(data: pa.ChunkedArray) -> frozenset[int]:
    """Find the rows whose data is not UTF-8, also in a part that no struct reads."""
    try:
        data.cast(pa.string())
    except pa.ArrowInvalid:
        return frozenset(row for row, one in enumerate(data.to_pylist()) if not _is_text(one))
    return frozenset()


def _is_text(data: bytes | None) -> bool:
    try:
        (data or b"").decode()
    except UnicodeDecodeError:
        return False
    return True
