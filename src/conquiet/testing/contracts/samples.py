"""Messages that are hard to keep intact, and ids that are easy to mix up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet.codec import encode_data
from conquiet.message import Message

PAYLOADS = {
    "empty": b"",
    "json": b'{"price": 1.0,  "name" :"\\u0041"}',
    "spaces": b" \r\n{}\t\n ",
    "unicode": "☃ größer 𝄞".encode(),
    "nul": b'{"text": "a\\u0000b"}',
    "binary": bytes(range(256)) * 40,
}

ATTRIBUTES = {
    "specversion": "1.0",
    "type": "order.placed",
    "source": "/shops/Ålesund?a=1&b='2'",
    "subject": "order/☃",
    "partitionkey": "customer-7",
    "correlationid": "c-1",
    "datacontenttype": "application/octet-stream",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "extension": '  kept: {"as": "it is"}\n',
}

TWINS = ["a-1", "A-1", "a-1 ", "á-1", "a_1", "a%1", "a'1", 'a"1', "a\\1", "ａ-1", "x" * 200]
"""Ids that a careless comparison takes for one another."""


def make_messages(count: int, prefix: str = "m", **attributes: str) -> list[Message[Any]]:
    """Build messages `m-0`, `m-1`, … with a number as data."""
    given = {"type": "sample", "source": "/contract", "datacontenttype": "application/json"}
    return [
        Message(b"%d" % number, {**given, "id": f"{prefix}-{number}", **attributes})
        for number in range(count)
    ]


def ids(messages: Sequence[Message[Any]]) -> list[str]:
    return [message.id for message in messages]


def content(message: Message[Any]) -> tuple[bytes, dict[str, Any]]:
    """Return the parts of a message that must arrive unchanged."""
    return encode_data(message), dict(message.attributes)
