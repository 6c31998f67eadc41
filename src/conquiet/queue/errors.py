"""The errors of the queue: a tree of its own, because the queue knows no other part of conquiet."""

from __future__ import annotations


class QueueError(Exception):
    """Base of every error of the queue; what Redis or the network said is its `__cause__`."""


class InvalidSettingError(QueueError, ValueError):
    """A setting or an argument that cannot work; nothing was sent to Redis."""


class InvalidPayloadError(QueueError, ValueError):
    """The payload is not a JSON object; nothing was sent to Redis."""


class MalformedEntryError(QueueError):
    """The stream holds an entry that is no message. It is pending, and stays so until acked."""

    def __init__(self, stream: str, entry_id: str, reason: str) -> None:
        super().__init__(stream, entry_id, reason)
        self.stream = stream
        self.entry_id = entry_id
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"entry {self.entry_id} of stream {self.stream!r} is no message: {self.reason}; it "
            f"stays pending: look at it with XRANGE, then XACK it, and mend its producer"
        )
