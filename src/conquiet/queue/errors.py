"""Errors of the queue: a tree of its own, since the queue imports no other part of conquiet."""

from __future__ import annotations


class QueueError(Exception):
    """Base of every error of the queue; an error of Redis or the network is its `__cause__`."""


class InvalidSettingError(QueueError, ValueError):
    """A setting or an argument is wrong; nothing was sent to Redis."""


class InvalidPayloadError(QueueError, ValueError):
    """The payload is not a JSON object; nothing was sent to Redis."""


class MalformedEntryError(QueueError):
    """An entry of the stream is not a message. It stays pending until it is acked.

    `entry_id` is its id in the `stream`; `reason` says what is wrong with it.
    """

    def __init__(self, stream: str, entry_id: str, reason: str) -> None:
        super().__init__(stream, entry_id, reason)
        self.stream = stream
        self.entry_id = entry_id
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"entry {self.entry_id} of stream {self.stream!r} is not a message: {self.reason}; it "
            f"stays pending: inspect it with XRANGE, then XACK it, and correct its producer"
        )
