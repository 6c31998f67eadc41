"""Messages for tests, complete with the attributes that a producer would set."""

from __future__ import annotations

from typing import Any

from conquiet.codec import encode_data
from conquiet.event import complete
from conquiet.message import Message


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
    typed = complete(Message(data), source="/test")
    if not typed.attributes["type"]:
        typed.attributes["type"] = "test"
    # None takes a default away, to see what a router does without it.
    chosen = {**typed.attributes, **attributes}
    given = {name: value for name, value in chosen.items() if value is not None}
    return Message(encode_data(typed), given)
