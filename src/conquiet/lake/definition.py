"""Definition: what a pipeline makes of events. It holds no lake and no session, and executors get
a copy of it.

    events ──▶ rules ──▶ facts (a state by key) ──▶ rows of tables ──▶ marts and queries (SQL)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, get_type_hints
from zoneinfo import ZoneInfo

import msgspec
import pyarrow as pa

from conquiet.errors import ConfigError, ConquietError
from conquiet.events.catalog import Catalog
from conquiet.lake.schema import arrow_schema

S = TypeVar("S", bound=type[msgspec.Struct])
Check = TypeVar("Check", bound=Callable[..., bool])
OnFail = Literal["quarantine", "count", "stop"]
Key = str | Callable[["Event"], "str | Iterable[str] | None"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_name = re.compile(r"[a-z][a-z0-9_]{0,62}")
ROWS_QUARANTINE = "rows_quarantine"
RESERVED = frozenset(
    (
        *("raw_events", "events", "events_quarantine", "redeliveries", "expectations", "touched"),
        *(ROWS_QUARANTINE, "recon_completeness", "outbox_delivery"),
    )
)


class ExpectationFailed(ConquietError):
    """An event or a row broke a rule with `on_fail="stop"`; nothing of its batch was committed."""


class FactFailed(ConquietError):
    """A fact raised on an event, or gave rows that its tables cannot hold; the run stops before
    anything that follows from it is committed."""


class Event(msgspec.Struct, gc=False):
    """An event that passed all checks, as a fact gets it. Times are kept in microseconds since
    1970, and become datetimes when they are asked for."""

    event_id: str
    """The CloudEvents id, by which duplicates are dropped."""
    type: str
    version: int
    """The version of its data, as the envelope names it."""
    occurred_us: int
    """The envelope's `occurredAt`."""
    created_us: int | None
    """The attribute `time`: when the event was stored in its outbox."""
    first_seen_us: int | None
    """The time of the first entry that delivered it."""
    stream: str
    """The stream that it was read from."""
    key: str | None
    """The attribute that picked the event's partition, or its subject."""
    data: Any
    """An instance of the struct that is declared for this type and version."""
    deliveries: int = 1
    """How many entries of its first batch had its id."""
    own_moment: datetime | None = None
    """The time in its data that the pipeline names for its type."""

    @property
    def moment(self) -> datetime:
        """When it happened: the time in its data, if the pipeline names one; else `occurred_at`."""
        return self.own_moment or _time(self.occurred_us)

    @property
    def occurred_at(self) -> datetime:
        return _time(self.occurred_us)

    @property
    def created_at(self) -> datetime | None:
        return None if self.created_us is None else _time(self.created_us)

    @property
    def first_seen_at(self) -> datetime | None:
        return None if self.first_seen_us is None else _time(self.first_seen_us)


def _time(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


@dataclass(frozen=True)
class Table:
    """A table whose rows a fact gives."""

    name: str
    row: type[msgspec.Struct]
    key: tuple[str, ...]
    partition_by: str | None
    schema: pa.Schema


@dataclass(frozen=True)
class Fact:
    """A mergeable state by key."""

    name: str
    state: type[msgspec.Struct]
    key: Key
    events: frozenset[str] | None
    """Event types that it takes; None for all whose data has the key's field."""


@dataclass(frozen=True)
class Rule:
    """A check of events or rows by name."""

    name: str
    of: type[msgspec.Struct]
    check: Callable[[Any], bool]
    on_fail: OnFail


class RefusedRow(msgspec.Struct):
    """A row of `rows_quarantine`: what a fact gives in place of a row that breaks a rule."""

    table_name: str
    row_key: str
    """The values of the table's key, as JSON."""
    rule: str
    day: date | None
    row: str
    """The row, as JSON."""


@dataclass
class Definition:
    """Event types, rules, facts and their tables; pickled for executors."""

    name: str
    zone: str = "UTC"
    structs: dict[tuple[str, int], type[msgspec.Struct]] = field(default_factory=dict)
    streams: dict[str, str] = field(default_factory=dict)
    """Patterns of streams by event type, for types that come from some streams only."""
    plain: set[str] = field(default_factory=set)
    """Event types whose entries have their data alone, without an envelope."""
    moments: dict[str, str] = field(default_factory=dict)
    """The field of an event type's data that says when it happened."""
    rules: list[Rule] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    typed: bool = True
    """Whether each event type has a table of its own, with the fields of its data as columns."""

    @property
    def types(self) -> dict[str, list[int]]:
        """The known versions of each event type."""
        found: dict[str, list[int]] = {}
        for event_type, version in sorted(self.structs):
            found.setdefault(event_type, []).append(version)
        return found

    def accepts(self, stream: str, event_type: str) -> bool:
        """Return whether a known type may come from a stream.

        A stream that a pattern names carries the types bound to it and no others.
        """
        bound = self.streams.get(event_type)
        if bound is not None:
            return fnmatchcase(stream, bound)
        return not any(fnmatchcase(stream, pattern) for pattern in self.streams.values())

    def table_of(self, row: type) -> Table:
        for one in self.tables.values():
            if one.row is row:
                return one
        raise ConfigError(
            f"{row.__name__} is the row of no table: put @pipeline.table(key=…) above it"
        )


def _columns(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def snake_case(name: str) -> str:
    """Write a class's name as a table's.

    >>> snake_case("FactOrderLine")
    'fact_order_line'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def table_of_type(event_type: str) -> str:
    """Return the name of an event type's table.

    >>> table_of_type("order.placed")
    'order_placed'
    """
    return event_type.replace(".", "_")


class Definitions:
    """The registrations of a pipeline; `Pipeline` adds the lake and the runs."""

    def __init__(
        self,
        catalog: Catalog | None,
        *,
        name: str = "pipeline",
        zone: str = "UTC",
        moments: Mapping[str, str] | None = None,
        typed: bool = True,
    ) -> None:
        self.catalog = catalog
        self.name = name
        self._zone = ZoneInfo(zone)
        self.definition = Definition(name, zone, typed=typed)
        self.queries: list[Any] = []
        """Marts and queries, in the order in which they are made."""
        for one in catalog.declarations if catalog is not None else ():
            self._add_type(one.event_type, one.version, one.data)
        self.moments = moments or {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the catalog: executors need its structs alone, and it cannot be pickled."""
        return {**self.__dict__, "catalog": None}

    @property
    def moments(self) -> Mapping[str, str]:
        """The field of data that says when an event happened, by type."""
        return self.definition.moments

    @moments.setter
    def moments(self, given: Mapping[str, str]) -> None:
        for event_type, name in given.items():
            structs = [
                one for (type, _), one in self.definition.structs.items() if type == event_type
            ]
            if not structs:
                raise ConfigError(f"moments: the pipeline has no event type {event_type!r:.60}")
            for struct in structs:
                if name not in struct.__struct_fields__:
                    raise ConfigError(f"moments: {struct.__name__} has no field {name!r:.60}")
        self.definition.moments = dict(given)

    def day(self, moment: datetime) -> date:
        """Return the date of a moment in the pipeline's zone."""
        return moment.astimezone(self._zone).date()

    def event(
        self,
        event_type: str,
        data: type[msgspec.Struct],
        *,
        version: int = 1,
        streams: str | None = None,
        envelope: bool = True,
    ) -> None:
        """Declare a type outside the catalog, and the struct of its `data` in one `version`.

        With `streams`, a pattern, it is taken from streams with such names only. Without an
        `envelope` an entry has the data alone, as handlers and `app.emit` write it; the event has
        the version 1, and occurred at the attribute `time`.
        """
        if (event_type, version) in self.definition.structs:
            raise ConfigError(f"{event_type} version {version} is declared twice")
        is_known = event_type in self.definition.types
        if (not envelope and (version != 1 or is_known)) or event_type in self.definition.plain:
            raise ConfigError(f"{event_type} has one version alone, 1, without an envelope")
        self._add_type(event_type, version, data)
        if not envelope:
            self.definition.plain.add(event_type)
        if streams is not None:
            self.definition.streams[event_type] = streams

    def _add_type(self, event_type: str, version: int, data: type[msgspec.Struct]) -> None:
        table = table_of_type(event_type)
        _check_name(table)
        others = {table_of_type(one) for one in self.definition.types if one != event_type}
        if self.definition.typed and table in self._taken_names() | others:
            raise ConfigError(
                f"the event type {event_type} has the name of another table: leave out the tables"
                " of event types by typed=False, or give it another name"
            )
        self.definition.structs[event_type, version] = data

    def _taken_names(self) -> set[str]:
        return {*RESERVED, *self.definition.tables, *(one.name for one in self.queries)}

    def expect(self, name: str, *, on_fail: OnFail = "quarantine") -> Callable[[Check], Check]:
        """Decorator: a rule over the struct or the row that the function's parameter is annotated
        with. An event that breaks it goes to `events_quarantine`; a row goes to `rows_quarantine`,
        and leaves it when an event corrects it.

        `name` is that of the rule in `expectations`. `on_fail` may also `count` what breaks it, and
        keep it, or `stop` the run.
        """
        if on_fail not in ("quarantine", "count", "stop"):
            raise ConfigError(f"on_fail={on_fail!r:.40}: quarantine, count or stop")
        _check_name(name)
        if any(one.name == name for one in self.definition.rules):
            raise ConfigError(f"the rule {name} is declared twice")

        def register(check: Check) -> Check:
            try:
                hints = get_type_hints(check)
            except NameError as error:
                raise ConfigError(
                    f"rule {name}: {error}; define the struct or the row at the top of a module"
                ) from error
            hints.pop("return", None)
            of: Any = next(iter(hints.values()), None)
            rows = {one.row for one in self.definition.tables.values()}
            if of not in rows and of not in self.definition.structs.values():
                raise ConfigError(
                    f"rule {name}: annotate its parameter with the struct of an event or with the"
                    f" row of a table, not {of!r:.60}"
                )
            self.definition.rules.append(Rule(name, of, check, on_fail))
            if of in rows and on_fail == "quarantine":
                key = "table_name", "row_key"
                self.definition.tables[ROWS_QUARANTINE] = Table(
                    ROWS_QUARANTINE, RefusedRow, key, None, arrow_schema(RefusedRow)
                )
            return check

        return register

    def table(
        self, *, key: str | Sequence[str], partition_by: str | None = None, name: str | None = None
    ) -> Callable[[S], S]:
        """Decorator: a struct is the row of a table; its name in snake case is the table's.

        `key` names the columns that identify a row, `partition_by` the one by whose values files
        are set apart.
        """

        def register(row: S) -> S:
            named = self._new_name(name or snake_case(row.__name__))
            schema = arrow_schema(row)
            keys = _columns(key)
            for column in (*keys, *([partition_by] if partition_by else [])):
                if column not in schema.names:
                    raise ConfigError(f"table {named}: {row.__name__} has no field {column!r:.60}")
            self.definition.tables[named] = Table(named, row, keys, partition_by, schema)
            return row

        return register

    def fact(
        self, *, key: Key, events: Iterable[str] | None = None, name: str | None = None
    ) -> Callable[[S], S]:
        """Decorator: a struct is a state by key, with `apply(event)` and `rows()`.

        `key` is a field of the events' data, or a function from an event to a key, to several, or
        to None. A field of the state that is named `key` gets the key.
        """

        def register(state: S) -> S:
            named = name or snake_case(state.__name__)
            _check_name(named)
            if named in self.definition.facts:
                raise ConfigError(f"the fact {named} is declared twice")
            for method in ("apply", "rows"):
                if not callable(getattr(state, method, None)):
                    raise ConfigError(f"fact {named}: {state.__name__} has no method {method}")
            try:
                state()
            except TypeError as error:
                raise ConfigError(
                    f"fact {named}: every field of {state.__name__} needs a default ({error})"
                ) from error
            types = None if events is None else frozenset(map(str, events))
            unknown = (types or frozenset()) - set(self.definition.types)
            if unknown:
                raise ConfigError(f"fact {named}: {', '.join(sorted(unknown))} is not declared")
            if isinstance(key, str):
                self._check_key(named, key, types)
            self.definition.facts[named] = Fact(named, state, key, types)
            return state

        return register

    def _check_key(self, fact: str, key: str, types: frozenset[str] | None) -> None:
        """Refuse a key that no version of the named event types has, or of any type."""
        having = {
            event_type
            for (event_type, _), struct in self.definition.structs.items()
            if key in struct.__struct_fields__
        }
        lacking = sorted((types or set()) - having)
        if lacking or not having:
            which = ", ".join(lacking) or "any event that is declared so far"
            raise ConfigError(f"fact {fact}: its key {key!r:.60} is no field of {which}")

    def _new_name(self, name: str) -> str:
        _check_name(name)
        taken = self._taken_names()
        if self.definition.typed:
            taken |= set(map(table_of_type, self.definition.types))
        if name in taken:
            raise ConfigError(f"the table {name} is declared twice, or its name is reserved")
        return name


def _check_name(name: str) -> None:
    if not _name.fullmatch(name):
        raise ConfigError(f"{name!r:.60}: names are in snake_case, at most 63 letters")
