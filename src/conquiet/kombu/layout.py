"""Name the keys of the transport in Redis, and decode the entries of its streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

GROUP = "conquiet"
"""The one consumer group of every stream; two groups would handle each message twice."""

BACK = "~back"
"""The consumer that holds entries which were given back; every fetch empties it first."""

PRIORITIES = range(10)

Place = tuple[str, str]
"""The stream and the id of an entry."""


class Keys:
    """Name the key of each thing; lists of the same queue name are never touched.

    >>> Keys("shop:").stream("orders", 3)
    'shop:conquiet:kombu:q:3:orders'
    """

    def __init__(self, prefix: str = "") -> None:
        self.namespace = f"{prefix}conquiet:kombu:"
        self.queues = self.namespace + "queues"
        self.exchanges = self.namespace + "exchanges"
        self.leases = self.namespace + "leases"
        self.gone = self.namespace + "gone"
        self._streams = self.namespace + "q:"

    def stream(self, queue: str, priority: int) -> str:
        # The priority comes first, so that a queue may have any name.
        return f"{self._streams}{priority}:{queue}"

    def streams(self, queue: str) -> list[str]:
        """List the streams of all priorities, since publishers may have other priority steps."""
        return [self.stream(queue, priority) for priority in PRIORITIES]

    def queue(self, stream: str) -> str:
        return stream[len(self._streams) :].partition(":")[2]

    def broadcasts(self, database: int, exchange: str, word: str | None = None) -> str:
        """Name the PUB/SUB channel of an exchange, or of its messages of one kind.

        The databases of a server share their channels.
        """
        kind = "all" if word is None else f"word:{word}"
        return f"{self.namespace}fanout:{database}:{kind}:{exchange}"

    def bindings(self, exchange: str) -> str:
        return f"{self.namespace}bindings:{exchange}"

    def dead(self, queue: str) -> str:
        return f"{self.namespace}dead:{queue}"


class QueueSettings(NamedTuple):
    """Hold the limits that a queue was declared with; None for no limit.

    >>> QueueSettings(60_000, None, 100).encode()
    '60000||100'
    >>> QueueSettings.decode(b"60000||100").max_length
    100

    A queue that was used and never declared has an empty value in the hash `queues`.
    """

    expires_ms: int | None = None
    message_ttl_ms: int | None = None
    max_length: int | None = None

    def encode(self) -> str:
        """Write the value of a queue in the hash `queues`."""
        return "|".join("" if limit is None else str(limit) for limit in self)

    @classmethod
    def decode(cls, value: str | bytes) -> QueueSettings:
        text = value.decode() if isinstance(value, bytes) else value
        expires, _, others = text.partition("|")
        ttl, _, most = others.partition("|")
        return cls(*(int(limit) if limit else None for limit in (expires, ttl, most)))


def tag_of(stream: str, entry: str) -> str:
    """Build the delivery tag; it names the entry, so that any channel can ack it at any time.

    The stream of a broadcast is empty: there is nothing to ack.
    """
    return f"{entry} {stream}"


def place_of(tag: str) -> Place:
    """Return the stream and the entry of a delivery tag."""
    entry, _, stream = tag.partition(" ")
    return stream, entry


class Entry(NamedTuple):
    """Hold a message that was fetched and not handed over yet."""

    queue: str
    stream: str
    id: str
    redelivered: bool
    payload: bytes | None

    @property
    def place(self) -> Place:
        return self.stream, self.id


def decode_fetch(
    reply: list[Any], streams: list[str], queue_of: Callable[[str], str]
) -> list[Entry]:
    """Decode the reply of `fetch.lua`: a flag, then four values for each entry."""
    found = []
    for at in range(1, len(reply), 4):
        stream = streams[reply[at] - 1]
        entry, redelivered, payload = reply[at + 1 : at + 4]
        found.append(Entry(queue_of(stream), stream, entry.decode(), bool(redelivered), payload))
    return found


def decode_read(reply: Any, queue_of: Callable[[str], str]) -> list[Entry]:
    """Decode the reply of XREADGROUP: a map in RESP3, pairs in RESP2, None after a timeout."""
    found = []
    for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
        stream = key.decode()
        for entry, fields in entries:
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            again, payload = b"n" in named, named.get(b"m")
            found.append(Entry(queue_of(stream), stream, entry.decode(), again, payload))
    return found
