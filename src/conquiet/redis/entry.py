"""Entries: the codec of messages as fields, in binary mode or as JSON in one field.

Binary: one field per attribute, its value as text, and `data` byte for byte. Structured: the
field `cloudevent` with the whole event as JSON. A field whose name starts with a colon is no
attribute; `:topic` is the topic of a message in an outbox.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from conquiet.codec import SPEC_VERSION, encode_data, from_json, to_json
from conquiet.errors import ConfigError, InvalidMessage
from conquiet.message import Attributes, Message, check_kinds, describe

Mode = Literal["binary", "structured"]
Fields: TypeAlias = list[bytes]
"""Names and values in turn, as XADD takes them and XRANGE gives them."""
Content: TypeAlias = tuple[bytes, Attributes, str | None]
"""Data, attributes and topic."""
Decode: TypeAlias = Callable[[Fields], Content]
Unmarshal: TypeAlias = Callable[[Mapping[str, bytes]], Message[bytes]]
"""From the fields of an entry, without those that begin with a colon, to its message."""

STRUCTURED_FIELD = b"cloudevent"
TOPIC_FIELD = b":topic"
_DATA = b"data"
_VERSION = SPEC_VERSION.encode()
_REQUIRED = ("id", "source", "type")
_MAX_NAMES = 1_000

_attribute_name = re.compile(r"[a-z0-9]+")


class UndecodableEntry(InvalidMessage):
    """A stream holds an entry that is not a CloudEvent."""

    def __init__(self, stream: str, entry_id: str, why: str) -> None:
        super().__init__(f"entry {entry_id} of stream {stream!r} is not a CloudEvent: {why}")
        self.stream = stream
        self.entry_id = entry_id


# --- writing --------------------------------------------------------------------------------


class _Encoded(dict[str, bytes]):
    """Attribute names as bytes, checked once each."""

    def __missing__(self, name: str) -> bytes:
        if type(name) is not str or not _attribute_name.fullmatch(name) or name == "data":
            raise ConfigError(
                f"attribute name {name!r:.60} must consist of a-z and 0-9, and not be 'data'"
            )
        encoded = name.encode()
        if len(self) < _MAX_NAMES:
            self[name] = encoded
        return encoded


_encoded = _Encoded()


def encoder(mode: Mode = "binary") -> Callable[[Message[Any]], Fields]:
    """Return the function from message to fields; it raises `InvalidMessage`."""
    if mode == "binary":
        return to_fields
    if mode == "structured":
        return lambda message: [STRUCTURED_FIELD, to_json(message)]
    raise ConfigError(f"mode={mode!r}: choose 'binary' or 'structured'")


def to_fields(message: Message[Any]) -> Fields:
    """Return the fields of a message in binary mode.

    >>> to_fields(Message(b"{}", {"id": "1", "type": "t", "source": "/s", "specversion": "1.0"}))
    [b'id', b'1', b'type', b't', b'source', b'/s', b'specversion', b'1.0', b'data', b'{}']
    """
    attributes = message.attributes
    fields: Fields = []
    for name in _REQUIRED:
        if not attributes.get(name):
            raise InvalidMessage(
                f"{describe(attributes)}: attribute {name!r} is missing; let the producer set it"
            )
    try:
        for name, value in attributes.items():
            fields.append(_encoded[name])
            fields.append(value.encode() if type(value) is str else _text(value, attributes))
    except (ConfigError, UnicodeEncodeError) as error:
        raise InvalidMessage(f"{describe(attributes)}: {error}") from error
    if "specversion" not in attributes:
        fields += (b"specversion", _VERSION)
    if message.data is not None:
        fields.append(_DATA)
        fields.append(encode_data(message))
    return fields


def _text(value: object, attributes: Attributes) -> bytes:
    """Return a value in CloudEvents' canonical string form."""
    check_kinds(attributes)
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return b64encode(value) if isinstance(value, bytes) else str(value).encode()


# --- reading --------------------------------------------------------------------------------


class _Shapes(dict[tuple[bytes, ...], tuple[tuple[str, ...], int | None, int | None]]):
    """Caches the meaning of field names, since most entries have the same ones.

    A shape is the names of the attributes, and the places of data and topic among the values.
    """

    def __missing__(
        self, fields: tuple[bytes, ...]
    ) -> tuple[tuple[str, ...], int | None, int | None]:
        if len(set(fields)) < len(fields):
            raise KeyError("a field twice")
        names = list(fields)
        data_at = _take(names, _DATA)
        topic_at = _take(names, TOPIC_FIELD)
        shape = (tuple(map(_name, names)), data_at, topic_at)
        if len(self) < _MAX_NAMES:
            self[fields] = shape
        return shape


def _take(names: list[bytes], name: bytes) -> int | None:
    if name not in names:
        return None
    place = names.index(name)
    del names[place]
    return place


def _name(field: bytes) -> str:
    name = field.decode()
    if not _attribute_name.fullmatch(name):
        raise KeyError(field)
    return name


_shapes = _Shapes()
_to_text = bytes.decode


def from_fields(fields: list[bytes]) -> Content:
    """Return data, attributes and topic of an entry in either mode; raises `InvalidMessage`.

    >>> from_fields([b"specversion", b"1.0", b"type", b"t", b"data", b"x"])
    (b'x', {'specversion': '1.0', 'type': 't'}, None)
    """
    try:
        names, data_at, topic_at = _shapes[tuple(fields[::2])]
        values = fields[1::2]
        data = b"" if data_at is None else values.pop(data_at)
        topic = None if topic_at is None else values.pop(topic_at).decode()
        attributes: Attributes = dict(zip(names, map(_to_text, values), strict=True))
        if attributes["specversion"] == SPEC_VERSION:
            return data, attributes, topic
    except (KeyError, ValueError):  # UnicodeDecodeError is a ValueError
        pass
    return _from_unusual(fields)


def _from_unusual(fields: Sequence[bytes]) -> Content:
    """Decode structured mode or other fields of conquiet; raise with the reason otherwise."""
    if len(fields) % 2:
        raise InvalidMessage("a field has no value")
    known = dict(zip(fields[::2], fields[1::2], strict=True))
    try:
        topic = known[TOPIC_FIELD].decode() if TOPIC_FIELD in known else None
        known = {name: value for name, value in known.items() if not name.startswith(b":")}
        structured = known.get(STRUCTURED_FIELD)
        if structured is not None and len(known) == 1:
            message = from_json(structured)
            return message.data, message.attributes, topic
        if b"specversion" not in known:
            names = b", ".join(sorted(known)[:10]).decode(errors="backslashreplace")
            raise InvalidMessage(f"no field 'specversion' among {names or 'its fields':.200}")
        data = known.pop(_DATA, b"")
        attributes = {_name(name): value.decode() for name, value in known.items()}
    except KeyError as error:
        raise InvalidMessage(f"field {error.args[0]!r:.60} is not an attribute's name") from error
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"an attribute is not UTF-8: {error}") from error
    if attributes["specversion"] != SPEC_VERSION:
        raise InvalidMessage(
            f"specversion must be {SPEC_VERSION!r}, not {attributes['specversion']!r:.40}"
        )
    return data, attributes, topic


def decoder(unmarshal: Unmarshal | None) -> Decode:
    """Return the function from fields to content; it raises `InvalidMessage`.

    The topic is that of the message, or else the field `:topic` of an outbox.
    """
    if unmarshal is None:
        return from_fields

    def decode(fields: Fields) -> Content:
        try:
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            topic = named.get(TOPIC_FIELD)
            own = {name.decode(): value for name, value in named.items() if name[:1] != b":"}
            message = unmarshal(own)
            if not isinstance(message.data, bytes):
                raise TypeError(f"its message has data of type {type(message.data).__name__}")
            place = message.topic or (None if topic is None else topic.decode())
            return message.data, message.attributes, place
        except Exception as error:
            raise InvalidMessage(f"unmarshal failed: {type(error).__name__}: {error}") from error

    return decode
