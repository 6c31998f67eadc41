"""Messages for tests, complete with the attributes that a producer would set."""

from __future__ import annotations

from typing import Any

from conquiet.codec import SPEC_VERSION, encode_data
from conquiet.handler import type_name
from conquiet.message import Message, new_id, now_text


def message(data: Any = b"{}", **attributes: Any) -> Message[bytes]:
    """A raw message, as a source would deliver it.

    `data` is bytes, or an event whose class names the type, or anything that JSON can hold.

    >>> import msgspec
    >>> class OrderPlaced(msgspec.Struct):
    ...     order: int
    >>> placed = message(OrderPlaced(7), subject="order-7")
    >>> placed.type, placed.data, placed.subject
    ('order.placed', b'{"order":7}', 'order-7')
    """
    typed: Message[Any] = Message(data, attributes)
    plain = isinstance(data, (bytes, bytearray, memoryview, dict, list, str, int, float))
    defaults: dict[str, Any] = {
        "specversion": SPEC_VERSION,
        "id": new_id(),
        "source": "/test",
        "time": now_text(),
        "type": "test" if plain else type_name(type(data)),
    }
    if not isinstance(data, bytes):
        defaults["datacontenttype"] = "application/json"
    # None takes a default away, to see what a router does without it.
    complete = {**defaults, **attributes}
    given = {name: value for name, value in complete.items() if value is not None}
    return Message(encode_data(typed), given)
