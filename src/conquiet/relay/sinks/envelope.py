"""Pack a message for a sink: its data, and its attributes as text; unpack it at a source."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from conquiet.codec import SPEC_VERSION, encode_data, from_json
from conquiet.errors import ConfigError, InvalidMessage
from conquiet.message import Attributes, Message, check_kinds, describe

_REQUIRED = ("id", "source", "type")
_attribute_name = re.compile(r"[a-z0-9]+")

# Names that consumers of domain events filter by; CloudEvents names have no underscore.
_PLAIN_NAMES = {
    "event_id": ("eventid", "id"),
    "event_type": ("eventtype", "type"),
    "aggregate_type": ("aggregatetype",),
    "aggregate_id": ("aggregateid",),
    "created_at": ("createdat", "time"),
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """Holds a message as a sink sends it."""

    body: bytes
    content_type: str | None
    attributes: dict[str, str]
    """CloudEvents attributes without the content type; each binding has its own prefix."""
    plain: dict[str, str]
    """`event_id`, `event_type` and so on, which are sent without a prefix."""

    def headers(self, prefix: str) -> dict[str, str]:
        return {
            **{f"{prefix}{name}": value for name, value in self.attributes.items()},
            **self.plain,
        }


def pack(message: Message[Any]) -> Envelope:
    """Pack a message; raise `InvalidMessage` if no sink could send it.

    >>> pack(Message(b"{}", {"id": "1", "type": "sold", "source": "/shop"})).plain
    {'event_id': '1', 'event_type': 'sold'}
    """
    given = message.attributes
    check_kinds(given)
    for name in _REQUIRED:
        if not given.get(name):
            raise InvalidMessage(
                f"{describe(given)}: attribute {name!r} is missing; let the producer set it"
            )
    texts = {"specversion": SPEC_VERSION}
    for name, value in given.items():
        if name not in _PLAIN_NAMES and not _attribute_name.fullmatch(name):
            raise InvalidMessage(
                f"{describe(given)}: attribute name {name!r:.60} must consist of a-z and 0-9"
            )
        texts[name] = _text(name, value, message)
    plain = {}
    for name, others in _PLAIN_NAMES.items():
        own = texts.pop(name, None)
        found = own or next((texts[other] for other in others if texts.get(other)), None)
        if found:
            plain[name] = found
    if "aggregate_type" in plain and texts.get("subject"):
        plain.setdefault("aggregate_id", texts["subject"])
    body = b"" if message.data is None else encode_data(message)
    content_type = texts.pop("datacontenttype", None)
    return Envelope(body, content_type, texts, plain)


def _text(name: str, value: Any, message: Message[Any]) -> str:
    """Format a value in CloudEvents' canonical string form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return b64encode(value).decode()
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"{describe(message.attributes)}: attribute {name!r:.60}: {error}"
        ) from error
    return text


def unpack(
    body: bytes, headers: Mapping[str, Any], content_type: str | None, *prefixes: str
) -> tuple[bytes, Attributes] | None:
    """Return data and attributes of a CloudEvent in structured or binary mode; None if it is none.

    `prefixes` are those that the protocol gives to the names of attributes.

    >>> unpack(b"{}", {"ce_id": "1", "ce_type": "sold", "trace": "x"}, "text/json", "ce_")
    (b'{}', {'id': '1', 'type': 'sold', 'datacontenttype': 'text/json'})
    """
    if content_type is not None and content_type.startswith("application/cloudevents"):
        event = from_json(body)
        return event.data, event.attributes
    attributes: Attributes = {}
    for prefix in prefixes:
        names = _NAMES.setdefault(prefix, {})
        for name, value in headers.items():
            try:
                known = names[name]
            except KeyError:
                known = _name_attribute(name, prefix, names)
            if known:
                attributes[known] = value if type(value) is str else plain_value(name, value)
        if attributes:
            break
    else:
        return None
    if content_type is not None:
        attributes["datacontenttype"] = content_type
    kind, aggregate = headers.get("aggregate_type"), headers.get("aggregate_id")
    if kind is not None:
        attributes.setdefault("aggregatetype", plain_value("aggregate_type", kind))
        if aggregate is not None:
            attributes.setdefault("subject", plain_value("aggregate_id", aggregate))
    return body, attributes


_MAX_NAMES = 1_000
_NAMES: dict[str, dict[str, str]] = {}
"""By prefix: attributes by the names of their headers, empty for other headers."""


def _name_attribute(header: str, prefix: str, names: dict[str, str]) -> str:
    name = header.removeprefix(prefix) if header.startswith(prefix) else ""
    if len(names) < _MAX_NAMES:  # a producer may make up any number
        names[header] = name
    return name


def plain_value(name: str, value: Any) -> Any:
    """Return a header as a value of CloudEvents: text, a number, a boolean."""
    if isinstance(value, (bytes, bytearray)):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"the header {name!r:.60} is no UTF-8: {error}") from None
    if isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, datetime):
        return value.replace(tzinfo=value.tzinfo or UTC).isoformat().replace("+00:00", "Z")
    raise InvalidMessage(f"the header {name!r:.60} is a {type(value).__name__}, not a text")


def topic_of(message: Message[Any], default: str | None) -> str:
    """Return the topic of a message, or the default of the sink."""
    topic = message.topic or default
    if not topic:
        raise ConfigError(
            f"{describe(message.attributes)}: no topic; give the message one, or the sink a default"
        )
    return topic
