"""Delivery: an entry that this consumer holds, and the order of entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from conquiet.redis.ids import parse

if TYPE_CHECKING:
    from conquiet.redis.group import GroupStream


class Delivery:
    """One entry in our hands; the token of its message's acking."""

    __slots__ = ("acked", "deliveries", "fields", "id", "nacks", "stream", "touched")

    def __init__(
        self, stream: GroupStream, id: bytes, fields: list[bytes], deliveries: int, touched: float
    ) -> None:
        self.stream = stream
        self.id = id
        self.fields = fields
        self.deliveries = deliveries
        self.touched = touched
        """When its idle time last began anew, by the monotonic clock."""
        self.nacks = 0
        self.acked = False
        """A transaction on the same server acked it with its EXEC: settling it sends nothing."""

    @property
    def place(self) -> tuple[int, int, bytes]:
        """Where it stands among the entries of all streams: by id, which begins with the time."""
        return (*parse(self.id), self.stream.key)

    def __repr__(self) -> str:
        return f"<{self.stream.name} {self.id.decode()} delivery {self.deliveries}>"


def by_stream(deliveries: Iterable[Delivery]) -> dict[GroupStream, list[Delivery]]:
    streams: dict[GroupStream, list[Delivery]] = {}
    for delivery in deliveries:
        streams.setdefault(delivery.stream, []).append(delivery)
    return streams
