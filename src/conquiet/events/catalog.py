"""Declare event types, aggregate types and the data of each version; create and read events.

    class EventType(StrEnum) ─┐
    class AggregateType …     ├─▶ Catalog ─▶ enums of the database, checks of emit, consumers, docs
    @catalog.declare(…)      ─┘

It is the only place that lists event types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from conquiet.errors import ConfigError, InvalidMessage, PermanentError
from conquiet.events.envelope import ActorRef, Envelope
from conquiet.message import new_id


def now() -> datetime:
    return datetime.now(UTC)


def new_event_id() -> UUID:
    """Return a UUIDv7: ids ascend in the order of their creation."""
    return UUID(new_id())


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Holds an event before it is stored; its id is also that of row, envelope and message."""

    catalog: Catalog
    """The catalog that its data is checked against when it is stored."""
    event_type: str
    """A type that the catalog declares, such as `order.placed`."""
    aggregate_type: str
    """The kind of thing that it is about, such as `order`."""
    aggregate_id: UUID
    """Which one it is about; an ordered relay keeps the order of its events."""
    version: int
    """The version of its data, from 1 on."""
    data: msgspec.Struct | Mapping[str, Any]
    """An instance of the declared struct, or a mapping with its fields."""
    occurred_at: datetime
    """When it happened, with a time zone; not when it is stored."""
    actor: ActorRef | None = None
    """Who caused it."""
    id: UUID = msgspec.field(default_factory=new_event_id)
    """By default a new UUID of version 7, which sorts by time."""


S = TypeVar("S", bound=type[msgspec.Struct])

_value = re.compile(r"[a-z][a-z0-9_]{0,62}")


class InvalidEvent(PermanentError):
    """An event that cannot be stored; it was refused before any statement was sent."""


class UnknownEvent(InvalidMessage):
    """An event type or version that this catalog does not declare, of a newer producer."""


class Declaration(NamedTuple):
    """Names the aggregate and the data of one version of an event type."""

    event_type: str
    version: int
    aggregate_type: str
    data: type[msgspec.Struct]


class Consumer(NamedTuple):
    """Holds the `name` of a consumer, and as `accepts` the event types that it handles."""

    name: str
    accepts: frozenset[str]


class Received(NamedTuple):
    """Holds an event as a consumer receives it."""

    envelope: Envelope
    """The envelope, with the data as undecoded JSON."""
    data: Any
    """An instance of the struct declared for its type and version."""


class Catalog:
    """Declares event types, aggregate types, and the struct of each (type, version).

    >>> class EventType(StrEnum):
    ...     ORDER_PLACED = "order_placed"
    >>> class AggregateType(StrEnum):
    ...     ORDER = "order"
    >>> catalog = Catalog(EventType, AggregateType)
    >>> @catalog.declare("order_placed", "order")
    ... class OrderPlaced(msgspec.Struct):
    ...     total_cents: int
    >>> catalog.event(OrderPlaced(499), aggregate_id=UUID(int=7)).event_type
    'order_placed'

    `event_types` and `aggregate_types` are the enums of what may be declared; the database gets
    them too.
    """

    def __init__(self, event_types: type[StrEnum], aggregate_types: type[StrEnum]) -> None:
        self.event_types = _values(event_types)
        self.aggregate_types = _values(aggregate_types)
        self.consumers: list[Consumer] = []
        self._declared: dict[tuple[str, int], Declaration] = {}
        self._by_struct: dict[type, Declaration] = {}
        self._decoders: dict[tuple[str, int], msgspec.json.Decoder[Any]] = {}

    def declare(self, event_type: str, aggregate_type: str, version: int = 1) -> Callable[[S], S]:
        """Return a decorator that declares a struct as the data of an event type and version."""
        if event_type not in self.event_types:
            raise ConfigError(f"event type {event_type!r:.60} is not in the enum of the catalog")
        if aggregate_type not in self.aggregate_types:
            raise ConfigError(f"aggregate type {aggregate_type!r:.60} is not in the catalog's enum")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ConfigError(f"version={version!r:.40}: versions are whole numbers from 1 on")
        if (event_type, version) in self._declared:
            raise ConfigError(f"{event_type} version {version} is declared twice")

        def add(struct: S) -> S:
            if not isinstance(struct, type) or not issubclass(struct, msgspec.Struct):
                raise ConfigError(f"{struct!r:.80}: the data of an event must be a msgspec.Struct")
            if struct in self._by_struct:
                raise ConfigError(f"{struct.__name__} is declared twice; make a subclass of it")
            key = str(event_type), version
            declaration = Declaration(*key, str(aggregate_type), struct)
            self._declared[key] = self._by_struct[struct] = declaration
            self._decoders[key] = msgspec.json.Decoder(struct)
            return struct

        return add

    def consumer(self, name: str, accepts: Iterable[str]) -> Consumer:
        """Declare that the consumer `name` accepts these event types."""
        types = frozenset(map(str, accepts))
        unknown = types.difference(self.event_types)
        if unknown:
            raise ConfigError(f"consumer {name!r}: {', '.join(sorted(unknown))} is not declared")
        made = Consumer(name, types)
        self.consumers.append(made)
        return made

    @property
    def declarations(self) -> list[Declaration]:
        """Return all declarations, in the order of the enum and the versions."""
        order = {name: place for place, name in enumerate(self.event_types)}
        return sorted(self._declared.values(), key=lambda one: (order[one.event_type], one.version))

    def declaration(self, event_type: str, version: int) -> Declaration | None:
        return self._declared.get((event_type, version))

    def versions(self, event_type: str) -> list[int]:
        return sorted(version for name, version in self._declared if name == event_type)

    def event(
        self,
        data: msgspec.Struct,
        *,
        aggregate_id: UUID,
        actor: ActorRef | None = None,
        occurred_at: datetime | None = None,
    ) -> Event:
        """Create an event of the type that the struct of `data` declares; `emit` stores it.

        `aggregate_id` says which thing it is about, `actor` who caused it, and `occurred_at` when
        it happened: now, unless given.
        """
        found = self._by_struct.get(type(data))
        if found is None:
            raise InvalidEvent(
                f"{type(data).__name__} is not declared;"
                " put @catalog.declare(event_type, aggregate_type) above it"
            )
        return Event(
            catalog=self,
            event_type=found.event_type,
            aggregate_type=found.aggregate_type,
            aggregate_id=aggregate_id,
            version=found.version,
            data=data,
            actor=actor,
            occurred_at=occurred_at or now(),
        )

    def event_of(
        self,
        event_type: str,
        aggregate_type: str,
        data: Mapping[str, Any],
        *,
        aggregate_id: UUID,
        version: int = 1,
        actor: ActorRef | None = None,
        occurred_at: datetime | None = None,
    ) -> Event:
        """Create an event from names and plain data, for callers without structs.

        `aggregate_id`, `actor` and `occurred_at` are as for `event`.
        """
        return Event(
            catalog=self,
            event_type=event_type,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            version=version,
            data=data,
            actor=actor,
            occurred_at=occurred_at or now(),
        )

    def open(self, event_type: str, payload: bytes | str) -> Received:
        """Decode the envelope and the typed data of a published payload."""
        try:
            envelope = Envelope.read(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMessage(f"{event_type!s:.60}: not an envelope: {error}") from error
        return Received(envelope, self.read(event_type, envelope.version, envelope.data))

    def read(self, event_type: str, version: int, data: bytes | msgspec.Raw) -> Any:
        """Decode `data`, JSON, into the struct declared for a type and version."""
        decoder = self._decoders.get((event_type, version))
        if decoder is None:
            known = ", ".join(map(str, self.versions(event_type))) or "none"
            raise UnknownEvent(f"{event_type!s:.60} version {version}; known versions: {known}")
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMessage(f"{event_type} version {version}: {error}") from error


def _values(enum: type[StrEnum]) -> tuple[str, ...]:
    values = tuple(str(member.value) for member in enum)
    for value in values:
        if not _value.fullmatch(value):
            raise ConfigError(f"{enum.__name__}: {value!r} must be snake_case, at most 63 letters")
    return values
