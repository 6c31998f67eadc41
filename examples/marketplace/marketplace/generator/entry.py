"""An entry of the log, with the fields of its outbox row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from conquiet import Message

DOMAIN_TOPIC = "pf-domain-events"
TELEMETRY_TOPIC = "pf-ad-telemetry"
DOMAIN_SOURCE = "/outbox_events"
TELEMETRY_SOURCE = "/ads"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """Holds a published event. A redelivery is another entry with the same id and data."""

    topic: str
    ms: int
    """Milliseconds of its publication; never less than those of the entry before it."""
    event_id: str
    type: str
    aggregate_type: str
    """Empty for telemetry."""
    aggregate_id: str
    time: str
    """`created_at` of its outbox row."""
    data: bytes
    delivery: int = 1
    """The number of this publication of the event, from 1."""
    failures: int = 0
    """Failed attempts to publish it: `attempt_count`."""
    is_foreign: bool = False
    """Whether it was written past the outbox, which would have refused it."""

    @property
    def source(self) -> str:
        return DOMAIN_SOURCE if self.topic == DOMAIN_TOPIC else TELEMETRY_SOURCE

    @property
    def is_telemetry(self) -> bool:
        return self.topic == TELEMETRY_TOPIC

    def attributes(self) -> dict[str, str]:
        """Return the attributes that `EventSource(cloudevents=True)` would give."""
        found = {
            "specversion": "1.0",
            "id": self.event_id,
            "type": self.type,
            "source": self.source,
            "subject": self.aggregate_id,
            "time": self.time,
            "datacontenttype": "application/json",
        }
        if self.aggregate_type:
            found["aggregatetype"] = self.aggregate_type
        return found

    def message(self) -> Message[bytes]:
        return Message(self.data, self.attributes(), topic=self.topic)


def messages(entries: Iterable[Entry]) -> Iterator[Message[bytes]]:
    """Convert entries to the messages that a relay publishes to their topics."""
    return (entry.message() for entry in entries)


class Numbers:
    """Numbers the entries of each stream, as Redis does: `milliseconds-count`."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def next(self, stream: str, ms: int) -> str:
        last, count = self._last.get(stream, (0, -1))
        count = count + 1 if last == ms else 0
        self._last[stream] = ms, count
        return f"{ms}-{count}"
