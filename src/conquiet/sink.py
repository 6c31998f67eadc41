"""Publish messages: the protocol of sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conquiet import bridge
from conquiet.acking import Error
from conquiet.errors import Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.task import is_task


class Sink(Protocol):
    """Publishes messages, each to its `topic`.

    A sink of your own defines `publish_each` and `close`; a subclass of this inherits `publish`.
    An async worker calls it in a thread, unless its `is_async` is True: see `Source`.
    """

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        """Publish in order; raise the first error if a message was not published.

        The other messages of the call may have been published: `publish_each` answers for each.
        """
        failed = [answer for answer in collect_answers(self, messages) if answer is not None]
        if not failed:
            return
        error = failed[0]
        error.add_note(f"{len(failed)} of {len(messages)} messages were not published")
        raise error

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Publish in order; return one answer per message: None if confirmed, else an error.

        Raises `SinkUnavailable` if the sink cannot be reached; that costs no message an attempt.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Send what is buffered and close connections."""
        raise NotImplementedError


def collect_answers(sink: Sink, messages: Sequence[Message[Any]]) -> Sequence[Error]:
    """Publish, and return one answer per message also if the sink raises.

    A sink without `takes_tasks` gets no Celery tasks: as an event, a task would be lost.
    """
    if any(map(is_task, messages)) and not getattr(sink, "takes_tasks", False):
        others = [message for message in messages if not is_task(message)]
        given = iter(collect_answers(sink, others) if others else ())
        return [_refuse(message) if is_task(message) else next(given) for message in messages]
    try:
        answers = bridge.call(sink.publish_each, messages)
    except Exception as error:  # noqa: BLE001 - becomes the answer for every message
        return [error] * len(messages)
    if len(answers) != len(messages):
        wrong = SinkUnavailable(
            f"{sink!r} returned {len(answers)} answers to {len(messages)} messages"
        )
        return [wrong] * len(messages)
    return answers


def _refuse(message: Message[Any]) -> Refused:
    return Refused(
        f"{describe(message.attributes)}: is a Celery task, and this sink takes events; send it by"
        " App(…, celery=…), or by a relay with the sink celery:MODULE:NAME"
    )
