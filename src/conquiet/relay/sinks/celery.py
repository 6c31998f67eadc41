"""Publish tasks by a Celery application, as its own `apply_async` does.

Celery's router picks the queue, Celery's serializer writes the message (protocol 2), and the task's
id is the message's id: a task that a relay publishes twice has one id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from conquiet.acking import Error
from conquiet.config import Url, check_timeout, require
from conquiet.errors import ConfigError, InvalidMessage, Refused, SinkUnavailable
from conquiet.message import Message, describe
from conquiet.processes import resolve
from conquiet.relay.sinks.answers import Answers
from conquiet.relay.sinks.envelope import Envelope
from conquiet.relay.sinks.kombu import connect
from conquiet.sink import Sink, collect_answers
from conquiet.task import is_task, read_task


class CelerySink(Sink):
    """Publishes tasks to the broker of a Celery application, any that Kombu knows.

    On AMQP a task counts as published when the broker has confirmed it. A message that holds no
    task is refused.

    `app` is the application; a task that is not sent within `timeout` seconds counts as not
    published.
    """

    takes_tasks = True

    def __init__(self, app: Any, *, timeout: float = 10.0) -> None:
        check_celery(app)
        self.app = app
        self._timeout = check_timeout(timeout)
        self._link: _Link | None = None

    @classmethod
    def from_url(cls, url: str, topic: str | None = None, timeout: float = 10.0) -> Self:
        """Create one by `celery:MODULE:NAME?timeout=5`; the name is that of a Celery application.

        The module is looked up from the current directory, as by `celery -A`.
        """
        given = Url(url)
        seconds = given.seconds(timeout)
        given.end()
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return cls(resolve(given.rest.removeprefix("celery:")), timeout=seconds)

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Return an answer per message; raise `SinkUnavailable` if there is none at all."""
        answers = Answers(messages, self._timeout)
        packed = answers.pack_all(_check)
        answers.one_by_one(
            packed, lambda one: answers.set(one[0], self._publish(messages[one[0]], one[1]))
        )
        return answers.conclude()

    def check(self) -> None:
        """Raise `SinkUnavailable` if the broker of the tasks does not answer."""
        try:
            _Link(self.app, self._timeout).close()
        except Exception as error:
            raise _unreachable(error) from error

    def close(self) -> None:
        """Close the connection; the next task opens another."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _publish(self, message: Message[Any], envelope: Envelope) -> Error:
        try:
            link = self._link = self._link or _Link(self.app, self._timeout)
        except Exception as error:  # noqa: BLE001 - whatever a transport of Kombu raises
            return _unreachable(error)
        try:
            link.send(message.id, read_task(envelope.body))
        except Exception as error:  # noqa: BLE001 - becomes the answer of the message
            cause = error.__cause__ or error
            if link.is_broken_by(cause):
                self.close()
                return _unreachable(cause)
            if link.is_channel_closed_by(cause):
                self.close()
            return Refused(f"{describe(message.attributes)}: it cannot be sent: {cause!r:.300}")
        return None


class _Link:
    """Holds a connection to the broker of an application, and the producer on it."""

    def __init__(self, app: Any, timeout: float) -> None:
        self._app = app
        self._options: dict[str, Any] = {}
        options = dict(app.conf.broker_transport_options)
        with app.connection_for_write() as unopened:
            driver = unopened.transport.driver_type
        if driver == "amqp":
            limits = {"read_timeout": timeout, "write_timeout": timeout}
            options = {**limits, **options, "confirm_publish": True}
            self._options = {"timeout": timeout}  # of the confirm, too
        elif driver == "redis":
            options = {"socket_timeout": timeout, "socket_connect_timeout": timeout, **options}
        self._connection = app.connection_for_write(
            connect_timeout=timeout, transport_options=options
        )
        try:
            connect(self._connection)
            self._producer = app.amqp.Producer(self._connection, auto_declare=False)
        except BaseException:
            self.close()
            raise

    def send(self, id: str, signature: dict[str, Any]) -> None:
        self._app.signature(signature).apply_async(
            task_id=id,
            producer=self._producer,
            retry=False,  # the relay does, and knows which tasks were sent
            add_to_parent=False,
            **self._options,
        )

    def is_broken_by(self, error: BaseException) -> bool:
        """Return whether the error concerns the broker, or its full queue, and no single task."""
        link = self._connection
        library = require("kombu.exceptions", "kombu").OperationalError
        errors = (*link.connection_errors, *link.recoverable_connection_errors)
        return isinstance(error, (OSError, library, *errors))

    def is_channel_closed_by(self, error: BaseException) -> bool:
        return isinstance(error, tuple(self._connection.channel_errors))

    def close(self) -> None:
        with suppress(Exception):  # it may be broken, which is why it is closed
            self._connection.release()


class TaskSplit(Sink):
    """Publishes tasks by one sink, and all other messages by another."""

    takes_tasks = True

    def __init__(self, tasks: Sink, events: Sink) -> None:
        self.tasks = tasks
        self.events = events

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        answers: list[Error] = [None] * len(messages)
        for sink, takes in ((self.events, False), (self.tasks, True)):
            places = [place for place, one in enumerate(messages) if is_task(one) is takes]
            if not places:
                continue
            given = collect_answers(sink, [messages[place] for place in places])
            for place, answer in zip(places, given, strict=True):
                answers[place] = answer
        return answers

    def close(self) -> None:
        self.events.close()
        self.tasks.close()


def check_celery(app: Any) -> None:
    """Raise unless this is a Celery application that sends its tasks."""
    if not hasattr(app, "connection_for_write"):
        raise ConfigError(f"{app!r:.80} is no Celery application; give one, as in Celery('shop')")
    if app.conf.task_always_eager:
        raise ConfigError(
            "task_always_eager makes Celery run tasks in the relay instead of sending them; set it"
            " to False where a relay runs"
        )


def _check(message: Message[Any], envelope: Envelope) -> None:
    if not is_task(message):
        raise InvalidMessage(
            f"{describe(message.attributes)}: is no Celery task; emit a signature, as in"
            " task.s(…), and give events a relay of their own"
        )


def _unreachable(error: BaseException) -> SinkUnavailable:
    return SinkUnavailable(f"the broker of Celery cannot be used: {error!r:.300}")
