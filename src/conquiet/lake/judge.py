"""Judge: one look at each event, by the structs that producers use: typed columns, or a reason.

    entry ──▶ malformed_entry ─▶ broken_json ─▶ bad_envelope ─▶ unknown_type ─▶ unknown_version
          ──▶ null_data ─▶ invalid_data ─▶ rules by name ──▶ a row of silver, the feed of facts

The first check that fails is the reason. The same code serves Spark's tasks, a batch in the driver
and a test without Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
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
    Rule,
)
from conquiet.lake.schema import TIME, Encoder, arrow_schema, without_none

REASONS = (
    "malformed_entry",
    "broken_json",
    "bad_envelope",
    "unknown_type",
    "unknown_version",
    "null_data",
    "invalid_data",
)
BUCKETS = 64
"""Into so many parts the keys of a fact are divided; a part is the unit of a task."""

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
        ("_day", pa.int32()),
        ("_id_hash", pa.int64()),
        ("_id_check", pa.int64()),
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
        ("_day", pa.int32()),
        ("_id_hash", pa.int64()),
        ("_id_check", pa.int64()),
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
        ("_day", pa.int32()),
        ("_id_hash", pa.int64()),
        ("_id_check", pa.int64()),
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
        ("_day", pa.int32()),
        ("_id_hash", pa.int64()),
        ("_id_check", pa.int64()),
    ]
)
"""What the judge is given: first deliveries, each with the count of its deliveries."""

_FIRST_YEAR, _LAST_YEAR = 1970, 9998
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
        self._kinds_of: dict[tuple[str, str], dict[int, _Kind]] = {}
        self._has_keys = any(callable(one.key) for one in self.facts)
        self._typed = typed_schemas(definition)

    def judge(self, entries: pa.Table, with_silver: bool = True) -> Judged:
        """Judge first deliveries; `with_silver=False` for the feed alone."""
        good = _Good()
        bad = _Bad()
        counts = Counts()
        columns = [
            entries[name].to_pylist()
            for name in ("stream", "event_id", "type", "data", "_malformed")
        ]
        days = entries["_day"].to_pylist() if self.definition.rules else []
        no_text = _rows_without_text(entries["data"])
        for row, (stream, event_id, event_type, data, malformed) in enumerate(
            zip(*columns, strict=True)
        ):
            if malformed is not None or not event_id or not event_type:
                bad.add(row, None, REASONS[0])
                continue
            if row in no_text:
                bad.add(row, None, "broken_json")
                continue
            try:
                kind = self._kind(stream, event_type, data)
                envelope = kind.open(data)
                occurred = _plausible_time(envelope.occurred_at)
                if envelope.event_id != event_id or occurred is None:
                    raise _Refused("bad_envelope")
                value = envelope.data
                if kind.is_plausible is not None and not kind.is_plausible(value):
                    raise _Refused("invalid_data")
                if kind.rules:
                    _check(kind.rules, value, days[row], counts, event_id)
            except _Refused as refusal:
                bad.add(row, _column_version(kind.version), refusal.args[0])
                continue
            except _fault:
                reason, version, again = self._reason(stream, event_id, event_type, data)
                if again is None:
                    bad.add(row, version, reason)
                    continue
                envelope, kind = again
                occurred = _plausible_time(envelope.occurred_at)
                value = envelope.data
                assert occurred is not None, "an event that can be read was checked"
            good.add(row, envelope, occurred, kind, value)
        return self._judged(entries, good, bad, counts, with_silver)

    def _kind(self, stream: str, event_type: str, data: bytes | None) -> _Kind:
        """Return the kind of an event, before all of it is read."""
        known = self._kinds_of.get((stream, event_type))
        if known is None:
            versions = self.types.get(event_type, [])
            accepts = self.definition.accepts(stream, event_type)
            known = {one: self.kinds[event_type, one] for one in versions} if accepts else {}
            self._kinds_of[stream, event_type] = known
        if len(known) == 1:
            return next(iter(known.values()))  # its version is checked when it is read
        found = known.get(_headers.decode(data or b"").version)
        if found is None:
            raise msgspec.DecodeError("neither type nor version is known")
        return found

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
            or _plausible_time(occurred) is None
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
            value = kind.decode(_nul.sub(rb"\1\\ufffd", raw))
        except _fault:
            return "invalid_data", shown, None
        if kind.is_plausible is not None and not kind.is_plausible(value):
            return "invalid_data", shown, None
        return "", shown, (_Envelope(version, event_id, occurred, value), kind)

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
        versions = pa.array([one.version for one in good.envelopes], pa.int32())
        occurred = pa.array(good.occurred, TIME)
        feed = self._feed(taken, good, versions, occurred)
        if not with_silver:
            empty = EVENTS.empty_table()
            return Judged(empty, QUARANTINE.empty_table(), {}, feed, counts)
        moments = pa.array(
            [
                getattr(value, kind.moment) or moment if kind.moment else moment
                for value, kind, moment in zip(good.values, good.kinds, good.occurred, strict=True)
            ],
            TIME,
        )
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
            "moment": moments,
        }
        events = pa.table(
            [made[one] if one in made else taken[one] for one in EVENTS.names], schema=EVENTS
        )
        typed = self._typed_tables(events, good) if self.definition.typed else {}
        bound = set(self.definition.streams) if self.definition.typed else set()
        if bound:
            own = pa.array([kind.event_type not in bound for kind in good.kinds], pa.bool_())
            events = events.filter(own)
        refused = entries.take(pa.array(bad.rows, pa.int64()))
        given = {
            "event_type": refused["type"],
            "version": pa.array(bad.versions, pa.int32()),
            "reason": pa.array(bad.reasons, pa.string()),
            "created_at": refused["time"],
            "first_seen_at": refused["entry_time"],
            "aggregate_id": refused["subject"],
        }
        quarantine = pa.table(
            [given[one] if one in given else refused[one] for one in QUARANTINE.names],
            schema=QUARANTINE,
        )
        return Judged(events, quarantine, typed, feed, counts)

    def _typed_tables(self, events: pa.Table, good: _Good) -> dict[str, pa.Table]:
        by_kind: dict[_Kind, list[int]] = {}
        for place, kind in enumerate(good.kinds):
            by_kind.setdefault(kind, []).append(place)
        base = events.select(TYPED.names)
        found: dict[str, list[pa.Table]] = {}
        for kind, places in by_kind.items():
            data = kind.encoder.table([good.values[place] for place in places])
            rows = base.take(pa.array(places, pa.int64()))
            for name in data.column_names:
                rows = rows.append_column(_column(name), data[name])
            schema = self._typed[kind.event_type]
            found.setdefault(kind.event_type, []).append(_fit(rows, schema))
        return {name: pa.concat_tables(parts) for name, parts in found.items()}

    def _feed(
        self, taken: pa.Table, good: _Good, versions: pa.Array, occurred: pa.Array
    ) -> pa.Table:
        places: list[int] = []
        facts: list[int] = []
        found: list[Any] = []
        for place, (kind, value) in enumerate(zip(good.kinds, good.values, strict=True)):
            for fact, name in kind.fields:
                one = getattr(value, name)
                if one is not None:
                    places.append(place)
                    facts.append(fact)
                    found.append(one)
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
        for place, (kind, value) in enumerate(zip(good.kinds, good.values, strict=True)):
            event = None
            for number, fact in wanted:
                if fact.events is not None and kind.event_type not in fact.events:
                    continue
                if event is None:
                    event_id, event_type, stream, key, subject, deliveries = (
                        column[place] for column in columns
                    )
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
                for one in _several(fact.key(event)):  # type: ignore[operator]  # a function here
                    places.append(place)
                    facts.append(number)
                    keys.append(one)


class _Refused(Exception):
    pass


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
    """The events of a file that passed all checks, column by column."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.envelopes: list[_Envelope[Any]] = []
        self.occurred: list[datetime] = []
        self.kinds: list[_Kind] = []
        self.values: list[Any] = []

    def add(
        self, row: int, envelope: _Envelope[Any], occurred: datetime, kind: _Kind, value: Any
    ) -> None:
        self.rows.append(row)
        self.envelopes.append(envelope)
        self.occurred.append(occurred)
        self.kinds.append(kind)
        self.values.append(value)


class _Kind:
    """One version of an event type: how its data is read, checked and stored."""

    def __init__(
        self, definition: Definition, event_type: str, version: int, struct: type[msgspec.Struct]
    ) -> None:
        self.event_type = event_type
        self.version = version
        self.decode = msgspec.json.Decoder(struct).decode
        self._open = msgspec.json.Decoder(_Envelope[struct]).decode  # type: ignore[valid-type]  # made at run time
        self.is_plausible = _plausible(inspect.type_info(struct))
        self.rules = [one for one in definition.rules if one.of is struct]
        self.moment = definition.moments.get(event_type)
        self.fields = [
            (number, fact.key)
            for number, fact in enumerate(definition.facts.values())
            if isinstance(fact.key, str)
            and fact.key in struct.__struct_fields__
            and (fact.events is None or event_type in fact.events)
        ]
        self.encoder = Encoder(struct)

    def open(self, data: bytes | None) -> _Envelope[Any]:
        """Read an envelope with the data of this kind; NUL becomes U+FFFD."""
        data = data or b""
        if b"\\u0000" in data:
            data = _nul.sub(rb"\1\\ufffd", data)
        envelope: _Envelope[Any] = self._open(data)
        if envelope.version != self.version:
            raise msgspec.DecodeError("another version")
        return envelope

    def open_again(self, data: bytes) -> Any:
        """Read the data of an event that was judged before."""
        try:
            return self.open(data).data
        except _fault:  # its actor is not as expected
            raw = bytes(_objects.decode(data)["data"])
            return self.decode(_nul.sub(rb"\1\\ufffd", raw))


def bucket_of(key: str) -> int:
    """Return the part of a fact's keys that a key belongs to."""
    return crc32(key.encode()) % BUCKETS


def _several(keys: str | Iterable[str] | None) -> Iterable[str]:
    if keys is None:
        return ()
    return (keys,) if isinstance(keys, str) else keys


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
        schema = found.get(event_type, TYPED)
        for column in arrow_schema(struct):
            name = _column(column.name)
            if name not in schema.names:
                schema = schema.append(pa.field(name, column.type))
            elif schema.field(name).type != column.type:
                schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
        found[event_type] = schema
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


def _check(rules: list[Rule], value: Any, days: int, counts: Counts, event_id: str) -> None:
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
        raise _Refused(rule.name)


def holds(rule: Rule, value: Any) -> bool:
    """Return whether a value keeps a rule; a rule that raises is broken."""
    try:
        return bool(rule.check(value))
    except Exception:  # noqa: BLE001 - one event must not end the pipeline
        return False


def _plausible_time(moment: datetime) -> datetime | None:
    """Return a moment in UTC, or None if it is not of the years 1970 to 9998."""
    if moment.tzinfo is not UTC:
        try:
            moment = moment.astimezone(UTC)
        except (OverflowError, ValueError):
            return None
    return moment if _FIRST_YEAR <= moment.year <= _LAST_YEAR else None


def _plausible(info: inspect.Type) -> Callable[[Any], bool] | None:
    """Return a check of the values that msgspec accepts and a table cannot hold; None if it would
    check nothing."""
    kind = without_none(info)
    if kind is not info:
        check = _plausible(kind)
        return None if check is None else lambda value: value is None or check(value)
    if isinstance(info, inspect.DateTimeType):
        return lambda value: _plausible_time(value) is not None
    if isinstance(info, inspect.IntType):
        if (info.le is not None or info.lt is not None) and (
            info.ge is not None or info.gt is not None
        ):
            return None
        return lambda value: -_MOST_INT <= value < _MOST_INT
    if isinstance(info, (inspect.ListType, inspect.SetType, inspect.VarTupleType)):
        item = _plausible(info.item_type)
        return None if item is None else lambda values: all(map(item, values))
    if isinstance(info, inspect.StructType):
        checks = [(one.name, _plausible(one.type)) for one in info.fields]
        wanted = [(name, check) for name, check in checks if check is not None]
        if not wanted:
            return None
        return lambda value: all(check(getattr(value, name)) for name, check in wanted)
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
