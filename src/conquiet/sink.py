"""Publish messages: the protocol of sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conquiet import bridge
from conquiet.acking import Error
from conquiet.delay import is_delayed
from conquiet.errors import Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.task import KIND as TASK
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

    A sink without `takes_tasks` gets no Celery tasks: as an event, a task would be lost. No sink
    gets delayed messages: it would publish them at once.
    """
    for message in messages:
        if message.notbefore is not None or message.attributes.get("kind") == TASK:
            return _publish_others(sink, messages)
    return _publish_all(sink, messages)


def _publish_others(sink: Sink, messages: Sequence[Message[Any]]) -> Sequence[Error]:
    """Publish those that this sink may take."""
    takes_tasks = getattr(sink, "takes_tasks", False)
    refused = [_refusal(message, takes_tasks) for message in messages]
    pairs = zip(messages, refused, strict=True)
    others = [message for message, error in pairs if error is None]
    given = iter(_publish_all(sink, others) if others else ())
    return [error or next(given) for error in refused]


def _publish_all(sink: Sink, messages: Sequence[Message[Any]]) -> Sequence[Error]:
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


def _refusal(message: Message[Any], takes_tasks: bool) -> Refused | None:
    """Return why no sink, or none but that of tasks, takes a message."""
    name = describe(message.attributes)
    if is_delayed(message):
        return Refused(
            f"{name}: is not to be published before {message.notbefore}, and a sink publishes at"
            " once; put it into an outbox, by app.emit(), app.send() or a handler with an Outbox"
        )
    if is_task(message) and not takes_tasks:
        return Refused(
            f"{name}: is a Celery task, and this sink takes events; send it by App(…, celery=…), or"
            " by a relay with the sink celery:MODULE:NAME"
        )
    return None
