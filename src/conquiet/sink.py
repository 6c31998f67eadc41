"""Publish messages: the protocol of sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conquiet.acking import Error
from conquiet.errors import SinkUnavailable
from conquiet.message import Message


class Sink(Protocol):
    """Publishes messages, each to its `topic`."""

    def publish(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Publish in order; return one answer per message: None if confirmed, else an error.

        Raises `SinkUnavailable` if the sink cannot be reached; that costs no message an attempt.
        """

    def close(self) -> None:
        """Send what is buffered and close connections."""


def publish_each(sink: Sink, messages: Sequence[Message[Any]]) -> Sequence[Error]:
    """Publish, and return one answer per message also if the sink raises."""
    try:
        answers = sink.publish(messages)
    except Exception as error:  # noqa: BLE001 - becomes the answer for every message
        return [error] * len(messages)
    if len(answers) != len(messages):
        wrong = SinkUnavailable(
            f"{sink!r} returned {len(answers)} answers to {len(messages)} messages"
        )
        return [wrong] * len(messages)
    return answers
