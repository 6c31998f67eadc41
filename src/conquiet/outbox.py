"""Store the events of a batch in its transaction, until a relay publishes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from conquiet.errors import ConfigError
from conquiet.event import complete
from conquiet.handler import NOTHING, Process, Result
from conquiet.message import Message, describe
from conquiet.stage import Stage
from conquiet.task import is_task, topic_of_tasks


class Outbox(ABC):
    """Middleware: stores the outputs of handlers and removes them from the results.

    `topic` is for outputs that name none.
    """

    stage = Stage.OUTBOX

    def __init__(self, topic: str) -> None:
        if not topic:
            raise ConfigError("an outbox needs the topic of its events, such as 'orders'")
        self.topic = topic
        self.takes_tasks = True
        """Whether Celery tasks may be added; an app without a Celery application refuses them."""

    @abstractmethod
    def store(self, outputs: Sequence[Message[Any]]) -> None:
        """Write the outputs in the ambient transaction, in their order."""

    def topic_of(self, message: Message[Any]) -> str:
        """Return the topic of a message that names none: that of events, or that of tasks."""
        if not is_task(message):
            return self.topic
        if not self.takes_tasks:
            raise ConfigError(
                f"{describe(message.attributes)}: the app cannot send Celery tasks; name the Celery"
                " application by App(…, celery=…)"
            )
        return topic_of_tasks(self.topic)

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            outputs: list[Message[Any]] = []
            for result in results:
                if isinstance(result, Exception):
                    raise result
                outputs.extend(result)
            for output in outputs:
                if not output.topic:
                    is_plain = "kind" not in output.attributes  # the most: no call for each
                    output.topic = self.topic if is_plain else self.topic_of(output)
            if outputs:
                self.store(outputs)
            return [NOTHING] * len(batch)

        return process


def complete_all(events: Iterable[Any], source: str) -> list[Message[Any]]:
    """Turn events that were added without a router into messages with a source.

    `events` are messages, or instances of event classes.
    """
    if isinstance(events, (Message, msgspec.Struct, dict, str, bytes)):
        raise ConfigError(f"events is one {type(events).__name__}; give a list of them")
    messages = [
        complete(event if isinstance(event, Message) else Message(event), source)
        for event in events
    ]
    for message in messages:
        if not message.attributes["source"]:
            raise ConfigError(
                f"{describe(message.attributes)}: an event needs a source;"
                " give add(…, source='/orders') or Outbox(…, source='/orders')"
            )
    return messages
