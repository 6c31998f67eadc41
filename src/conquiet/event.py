"""Name the message type of a class, and create the attributes of new events."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any
from uuid import UUID, uuid5

import msgspec

from conquiet.codec import SPEC_VERSION
from conquiet.message import Attributes, Message, new_id, now_text
from conquiet.task import is_signature, pack_task

_OUTPUTS = UUID("5a3a27c5-5b35-4a6e-9a58-1e5b7a3b7f0d")
"""The namespace of ids that follow from an input."""


def type_name(kind: type) -> str:
    """Return the message type of a class: `__message_type__`, or its words joined by dots.

    >>> class OrderPlaced: ...
    >>> type_name(OrderPlaced)
    'order.placed'
    """
    named = getattr(kind, "__message_type__", None)
    if named is not None:
        return str(named)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", kind.__name__)
    return ".".join(words).lower()


def is_event_class(kind: type) -> bool:
    """Return whether instances are events: a Struct, a dataclass, a pydantic model."""
    return issubclass(kind, msgspec.Struct) or is_dataclass(kind) or hasattr(kind, "model_fields")


def derived_id(cause: Message[Any], handler: str, place: int) -> str | None:
    """Return the id of the output at this place, the same with each delivery of its cause.

    Return None if the cause has no id.
    """
    if not cause.id:
        return None
    return str(uuid5(_OUTPUTS, f"{cause.identity}\n{handler}\n{place}"))


def new_attributes(
    type: str, source: str, id: str | None = None, time: str | None = None
) -> Attributes:
    """Return the attributes of a new event with JSON data; id and time are new if not given."""
    return {
        "specversion": SPEC_VERSION,
        "id": id or new_id(),
        "type": type,
        "source": source,
        "time": time or now_text(),
        "datacontenttype": "application/json",
    }


def complete(given: Message[Any], source: str, id: str | None = None) -> Message[Any]:
    """Copy a message and add the attributes that it lacks; `id` is for one without id.

    Attributes that are set are kept; an empty value counts as not set. The type stays empty if
    neither the attributes nor the class of the data has one. A Celery signature becomes a task.
    """
    data = given.data
    if isinstance(data, dict) and is_signature(data):
        return pack_task(given, source, id)
    kind = type_name(type(data)) if is_event_class(type(data)) else ""
    attributes = new_attributes(kind, source, id)
    if isinstance(data, bytes):
        del attributes["datacontenttype"]  # bytes may have any content type
    for name, value in given.attributes.items():
        if value is not None and value != "":
            attributes[name] = value
    output: Message[Any] = Message(data, attributes, topic=given.topic, notbefore=given.notbefore)
    if given.has_locals:
        output.locals.update(given.locals)
    return output
