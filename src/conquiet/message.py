"""Define the message: data, attributes with CloudEvents names, and its acking."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from conquiet.acking import Acking, Error
from conquiet.delay import Due, check_due
from conquiet.errors import InvalidMessage

if TYPE_CHECKING:
    from conquiet.attempts import FailedAttempt
    from conquiet.handler import Handler

T = TypeVar("T")
Attributes: TypeAlias = dict[str, Any]
ERRORS = "conquiet.errors"
"""The name in `Message.locals` under which a source gives the errors of earlier deliveries."""


class Message(Generic[T]):
    """Holds data, attributes and acking of one message.

    `data` is bytes (raw) or an object (typed). `attributes` are published with it; `locals` never
    leave the process. `acking` settles it at its source; None, if it came from none. `topic` is its
    destination, `deliveries` how often its source has delivered
    it. `notbefore` is when an outbox may publish it at the earliest: a moment with a time zone, or
    a while that begins when it is stored; it is not published with the message.

    >>> message = Message(b'{"id": 7}', {"id": "a-1", "type": "order.placed", "source": "/shop"})
    >>> message.type, message.subject, message.identity
    ('order.placed', '', '/shop a-1')
    """

    __slots__ = (
        "_locals",
        "_origin",
        "acking",
        "attributes",
        "data",
        "decoded",
        "deliveries",
        "handler",
        "notbefore",
        "order_key",
        "topic",
    )

    def __init__(
        self,
        data: T,
        attributes: Attributes | None = None,
        *,
        acking: Acking | None = None,
        topic: str | None = None,
        deliveries: int = 1,
        notbefore: Due | None = None,
    ) -> None:
        self.data = data
        self.attributes: Attributes = {} if attributes is None else attributes
        self.acking = acking
        self.topic = topic
        self.deliveries = deliveries
        self.notbefore: Due | None = None if notbefore is None else check_due(notbefore)
        self._locals: dict[str, Any] | None = None
        self._origin: Message[T] | None = None
        # The router sets the handler and the data decoded for it; an ordered worker sets the key
        # whose order must hold.
        self.handler: Handler | None = None
        self.decoded: Any = None
        self.order_key: str | None = None

    @property
    def id(self) -> str:
        return self._text("id")

    @property
    def type(self) -> str:
        return self._text("type")

    @property
    def source(self) -> str:
        return self._text("source")

    @property
    def subject(self) -> str:
        return self._text("subject")

    @property
    def correlationid(self) -> str:
        return self._text("correlationid")

    @property
    def datacontenttype(self) -> str:
        """Return the media type of `data`; JSON by default."""
        return self._text("datacontenttype") or "application/json"

    @property
    def time(self) -> datetime | None:
        return self._moment("time")

    @property
    def expirytime(self) -> datetime | None:
        return self._moment("expirytime")

    @property
    def key(self) -> str:
        """Return the ordering key: `partitionkey`, else `subject`, else empty."""
        return self._text("partitionkey") or self._text("subject")

    @property
    def identity(self) -> str:
        """Return source and id in one string; CloudEvents makes the pair unique.

        A source is a URI reference, so a space in it can only be an unescaped `%20`.
        """
        source, name = self.attributes.get("source", ""), self.attributes.get("id", "")
        if type(source) is not str or type(name) is not str:
            source, name = self.source, self.id  # one of them raises
        return f"{source.replace(' ', '%20')} {name}" if " " in source else f"{source} {name}"

    @property
    def locals(self) -> dict[str, Any]:
        """Return values that stay with the message inside this process."""
        if self._locals is None:
            self._locals = {}
        return self._locals

    @property
    def has_locals(self) -> bool:
        return bool(self._locals)

    @property
    def errors(self) -> tuple[FailedAttempt, ...]:
        """Return the errors of earlier deliveries, the oldest first, as far as the source has them.

        A source has those of a message that has waited in the store for a later try.
        """
        return () if self._locals is None else self._locals.get(ERRORS, ())

    def ack(self) -> bool:
        """Ack the message: it took effect. Return False if it was settled before."""
        return self.acking.ack() if self.acking is not None else False

    def nack(self, error: Error = None) -> bool:
        """Nack the message, for the reason `error`. Return False if it was settled before."""
        return self.acking.nack(error) if self.acking is not None else False

    def copy(self, **attributes: Any) -> Message[T]:
        """Copy the message with other attributes; None removes one. Locals are copied too.

        The copy is a new message, without acking, topic and delay.
        """
        merged = {**self.attributes, **attributes}
        kept = {name: value for name, value in merged.items() if value is not None}
        twin: Message[T] = Message(self.data, kept)
        if self._locals:
            twin._locals = dict(self._locals)
        return twin

    @property
    def origin(self) -> Message[T]:
        """Return the message that this is a share of; the message itself if it is none."""
        return self if self._origin is None else self._origin

    def shares(self, count: int) -> list[Message[T]]:
        """Copy the message for `count` handlers, each copy with a share of its acking."""
        ackings = self.acking.split(count) if self.acking is not None else [None] * count
        twins: list[Message[T]] = []
        for acking in ackings:
            twin = self.copy()
            twin.acking = acking
            twin._origin = self.origin
            twin.topic, twin.deliveries, twin.order_key = (
                self.topic,
                self.deliveries,
                self.order_key,
            )
            twins.append(twin)
        return twins

    def _text(self, name: str) -> str:
        value = self.attributes.get(name, "")
        if type(value) is not str:
            raise InvalidMessage(
                f"{describe(self.attributes)}: attribute {name!r} must be a string,"
                f" not {type(value).__name__} ({value!r:.60})"
            )
        return value

    def _moment(self, name: str) -> datetime | None:
        text = self._text(name)
        if not text:
            return None
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidMessage(
                f"{describe(self.attributes)}: attribute {name!r} must be an RFC 3339 time such as"
                f" 2026-01-31T12:00:00Z, not {text!r:.60}"
            ) from None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    def __repr__(self) -> str:
        known = {name: self.attributes.get(name) for name in ("id", "type", "source")}
        return f"<Message {describe(known)}>"


TEXT_ATTRIBUTES = frozenset(
    """id type source specversion subject time expirytime datacontenttype dataschema
    correlationid partitionkey traceparent tracestate""".split()  # noqa: SIM905 - it reads better
)


def check_kinds(attributes: Mapping[str, Any]) -> None:
    """Refuse attributes of types that CloudEvents lacks: lists, floats, a number as id."""
    for name, value in attributes.items():
        if type(name) is not str:
            raise InvalidMessage(
                f"{describe(attributes)}: the name of an attribute must be a string,"
                f" not {type(name).__name__} ({name!r:.60})"
            )
        if type(value) is str:
            continue
        if name in TEXT_ATTRIBUTES:
            raise InvalidMessage(
                f"{describe(attributes)}: attribute {name!r} must be a string,"
                f" not {type(value).__name__} ({value!r:.60})"
            )
        if not isinstance(value, (str, bool, int, bytes)):
            raise InvalidMessage(
                f"{describe(attributes)}: attribute {name!r:.60} must be a string, a number"
                f" without fraction, a boolean or bytes, not {type(value).__name__}"
            )


def describe(attributes: Mapping[str, Any]) -> str:
    """Name a message in logs and errors: `order.placed id=a-1 source=/shop`."""
    kind = attributes.get("type") or "(no type)"
    name = attributes.get("id") or "(no id)"
    source = attributes.get("source") or "-"
    return printable(f"{kind!s:.100} id={name!s:.100} source={source!s:.100}")


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters, so that a message's text cannot forge lines or cells.

    `keep` are characters to leave as they are, such as line breaks in a text of several lines.

    >>> print(printable("a\nb \x1b[2J"))
    a\nb \x1b[2J
    """
    return STEERING.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


# Control characters of C0 and C1, other line ends, and marks and changes of the writing direction.
STEERING = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def now_text() -> str:
    """Return the time in CloudEvents' format: RFC 3339, UTC, microseconds."""
    return datetime.now(UTC).isoformat()[: -len("+00:00")] + "Z"


# Seeded by the operating system, and again in a forked child. A system call for each id would take
# as long as the rest of it.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)
_id_lock = threading.Lock()
_last_id = 0
_MAX_TICKS_AHEAD = 60_000 << 12


def new_id() -> str:
    """Return a UUIDv7 (RFC 9562) that sorts after all earlier ones of this process.

    Rows of one transaction have the same time; their ids keep their order. The 12 bits after the
    milliseconds count up within one millisecond, and borrow from the next ones when they run out.
    If the clock was set back by more than a minute, ids follow it; else one jump ahead would give
    all later ids a wrong time.
    """
    global _last_id
    with _id_lock:
        ticks = time.time_ns() // 1_000_000 << 12
        if _last_id - ticks < _MAX_TICKS_AHEAD:
            ticks = max(ticks, _last_id + 1)
        _last_id = ticks
    # One number, formatted once: version 7 behind the milliseconds, then the variant.
    ticks = (ticks >> 12 << 16 | 0x7000 | ticks & 0xFFF) << 64
    digits = f"{ticks | 1 << 63 | _random.getrandbits(62):032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
