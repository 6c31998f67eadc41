"""Dead letters of a source: entries that cannot be decoded, or were delivered too often.

They are CloudEvents with the attributes of the `DeadLetter` middleware, and two more with the
stream and the id of the entry. An entry that could not be decoded is kept field by field as JSON.
"""

from __future__ import annotations

import time
import traceback
from base64 import b64encode
from collections.abc import Sequence

import msgspec

from conquiet import attempts
from conquiet.errors import InvalidMessage, PermanentError, handler_of
from conquiet.message import Attributes, Message, new_id, now_text
from conquiet.middleware.dead_letter import (
    ATTEMPTS,
    ENTRY,
    ERRORS,
    HANDLER,
    MAX_REASON_CHARS,
    MAX_TRACEBACK_CHARS,
    REASON,
    STREAM,
    TIME,
    TOPIC,
    TRACEBACK,
)
from conquiet.redis.consumer import Delivery
from conquiet.redis.entry import Fields, to_fields

UNREADABLE_TYPE = "conquiet.undecodable.entry"


def to_dead_letter(delivery: Delivery, deliveries: int, error: Exception | None) -> Fields:
    """Return the fields of the dead letter of an entry."""
    about = {
        REASON: _reason(delivery, deliveries, error)[:MAX_REASON_CHARS],
        ATTEMPTS: str(delivery.attempts_before + deliveries),
        TIME: now_text(),
        TOPIC: delivery.stream.topic,
    }
    about[STREAM], about[ENTRY] = delivery.origin
    if errors := delivery.errors:
        about[ERRORS] = errors
        if deliveries > 0:
            why = error or PermanentError(about[REASON])
            last = attempts.append(errors, delivery.attempts_before + deliveries, why)
            about[ERRORS] = f"{time.time():.3f}".join(last)
    if error is not None:
        if handler := handler_of(error):
            about[HANDLER] = handler
        lines = "".join(traceback.format_exception(error))
        about[TRACEBACK] = lines[-MAX_TRACEBACK_CHARS:].encode(errors="replace").decode()
    about[REASON] = about[REASON].encode(errors="replace").decode()
    data, attributes, topic = _content(delivery)
    about[TOPIC] = topic or about[TOPIC]
    try:
        return to_fields(Message(data, {**attributes, **about}))
    except InvalidMessage:  # such as a CloudEvent without an id: keep its fields
        data, attributes = _unreadable(delivery)
        return to_fields(Message(data, {**attributes, **about}))


def _reason(delivery: Delivery, deliveries: int, error: Exception | None) -> str:
    if error is None:
        return f"delivered {deliveries} times and never settled: {delivery!r}"
    return f"{type(error).__name__}: {error}"


def _content(delivery: Delivery) -> tuple[bytes, Attributes, str | None]:
    try:
        return delivery.stream.decode(delivery.fields)
    except InvalidMessage:
        return *_unreadable(delivery), None


def _unreadable(delivery: Delivery) -> tuple[bytes, Attributes]:
    attributes = {
        "id": new_id(),
        "type": UNREADABLE_TYPE,
        "source": "conquiet:unknown",
        "datacontenttype": "application/json",
    }
    return msgspec.json.encode(_as_text(delivery.fields)), attributes


def _as_text(fields: Sequence[bytes]) -> list[list[object]]:
    """Return pairs of name and value; values that are not UTF-8 as {"base64": …}."""
    values: list[object] = []
    for value in fields:
        try:
            values.append(value.decode())
        except UnicodeDecodeError:
            values.append({"base64": b64encode(value).decode()})
    return [values[i : i + 2] for i in range(0, len(values), 2)]
