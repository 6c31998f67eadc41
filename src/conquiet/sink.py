"""Sink: where messages are published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conquiet.acking import Error
from conquiet.message import Message


class Sink(Protocol):
    """Publishes messages, each to its `topic`."""

    def publish(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Publish in order; one answer per message: None if confirmed, else why it failed.

        Raises `SinkUnavailable` if the sink could not be reached, so that nobody is blamed.
        """

    def close(self) -> None:
        """Send what is buffered and let go of connections."""
