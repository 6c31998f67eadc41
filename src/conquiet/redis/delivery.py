"""Delivery: an entry that this consumer holds, and the order of entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conquiet.redis.group import GroupStream

_LARGEST_SEQUENCE = 2**64 - 1

FIRST, LAST = b"-", b"+"


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
        return (*split_id(self.id), self.stream.key)

    def __repr__(self) -> str:
        return f"<{self.stream.name} {self.id.decode()} delivery {self.deliveries}>"


def by_stream(deliveries: Iterable[Delivery]) -> dict[GroupStream, list[Delivery]]:
    streams: dict[GroupStream, list[Delivery]] = {}
    for delivery in deliveries:
        streams.setdefault(delivery.stream, []).append(delivery)
    return streams


def split_id(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence or 0)


def id_after(entry_id: bytes) -> bytes:
    """The smallest id above: ranges that exclude their start came with Redis 6.2 only."""
    milliseconds, sequence = split_id(entry_id)
    if sequence == _LARGEST_SEQUENCE:
        return b"%d-0" % (milliseconds + 1)
    return b"%d-%d" % (milliseconds, sequence + 1)
