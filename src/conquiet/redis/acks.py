"""Acks that ride in the EXEC: for messages of a stream on the server of the transaction.

Only with an inbox. It holds the message as done from the same EXEC on, so that a delivery after
it could have no effect but this ack, whatever the router's way to ack is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet.message import Message
from conquiet.redis.ambient import Acks, Unit
from conquiet.redis.delivery import Delivery
from conquiet.redis.group import GroupStream
from conquiet.redis.session import pack


def ack_with_commit(unit: Unit, messages: Sequence[Message[Any]]) -> None:
    """Let the transaction ack these, as far as it can; the source sends nothing for them then.

    A message that several handlers take has a share of an acking here, and no delivery.
    """
    by_stream: dict[GroupStream, list[Delivery]] = {}
    for message in messages:
        delivery = message.acking.token if message.acking is not None else None
        if type(delivery) is Delivery:
            by_stream.setdefault(delivery.stream, []).append(delivery)
    for stream, deliveries in by_stream.items():
        if unit.home.serves(stream.client) and unit.shares_slot(stream.key):
            ack = (b"XACK", stream.key, stream.group, *[item.id for item in deliveries])
            unit.on_commit.append(Acks([pack(ack)], _Acked(deliveries)))


class _Acked:
    """Tells deliveries that they are acked."""

    __slots__ = ("_deliveries",)

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = deliveries

    def __call__(self) -> None:
        for delivery in self._deliveries:
            delivery.acked = True
