"""Topic: one stream, or several partitions; the key of a message picks its partition.

One partition is one stream, named as the topic. More are called `orders:{0}`, `orders:{1}`, …:
the braces spread them over a cluster, and keep other keys of a partition on its node.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from conquiet.errors import ConfigError

_partition = re.compile(r"(.+):\{\d+\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Topic:
    """A `name` and its number of streams, which must not change once the topic is in use.

    With more than 1 of `partitions`, several workers can share the topic and keep the order of each
    key.

    >>> orders = Topic("orders", partitions=2)
    >>> orders.streams
    ('orders:{0}', 'orders:{1}')
    >>> orders.stream("customer-7") == orders.stream("customer-7")
    True
    """

    name: str
    partitions: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a topic needs a name, such as 'orders'")
        if isinstance(self.partitions, bool) or not isinstance(self.partitions, int):
            raise ConfigError(f"partitions={self.partitions!r}: must be a whole number")
        if self.partitions < 1:
            raise ConfigError(f"partitions={self.partitions}: must be at least 1")

    @property
    def streams(self) -> tuple[str, ...]:
        if self.partitions == 1:
            return (self.name,)
        return tuple(f"{self.name}:{{{number}}}" for number in range(self.partitions))

    def partition(self, key: str) -> int:
        """Return the partition of a key: CRC-32 of its UTF-8, scaled to the number of partitions.

        Uses the upper bits: an ordered worker assigns keys to threads by the lower ones, and the
        keys of one partition must not all meet in one thread.
        """
        return zlib.crc32(key.encode(errors="surrogatepass")) * self.partitions >> 32

    def stream(self, key: str) -> str:
        """Return the stream of a key."""
        return self.name if self.partitions == 1 else f"{self.name}:{{{self.partition(key)}}}"


Streams: TypeAlias = "str | Topic | Sequence[str | Topic]"
"""What a source reads: a stream, a topic, or several of them."""


def streams_of(given: Streams) -> dict[str, str]:
    """Return the streams to read, and the topic of each."""
    items = [given] if isinstance(given, (str, Topic)) else list(given)
    found: dict[str, str] = {}
    for item in items:
        topic = item if isinstance(item, Topic) else Topic(item)
        for stream in topic.streams:
            if stream in found:
                raise ConfigError(f"stream {stream!r} is named twice")
            partition = _partition.fullmatch(stream)
            found[stream] = partition[1] if partition else topic.name
    if not found:
        raise ConfigError("name at least one stream to read")
    return found


def beside(stream: str, prefix: str) -> str:
    """Return the name of a key in the same slot of a cluster as the stream."""
    start = stream.find("{")
    is_tagged = start >= 0 and stream.find("}", start) > start + 1
    return f"{prefix}{stream}" if is_tagged else f"{prefix}{{{stream}}}"
