"""Remember which messages took effect, and skip their duplicates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from conquiet.errors import ConfigError, HandlerError, InvalidMessage
from conquiet.handler import SKIPPED, Process, Result
from conquiet.message import Message, describe
from conquiet.stage import Stage

Entry: TypeAlias = tuple[str, str]
"""Subscriber and message identity."""


class Inbox(ABC):
    """Middleware: passes a message once per subscriber and handler; skips and acks duplicates.

    Several handlers may take one type, so the name of the handler is part of the subscriber:
    `billing/place_order`. Pin it with `name=` before renaming a function. With another `subscriber`
    every message is new.
    """

    stage = Stage.INBOX

    def __init__(self, subscriber: str) -> None:
        if not subscriber:
            raise ConfigError("an inbox needs the name of its subscriber, such as 'billing'")
        self.subscriber = subscriber

    @abstractmethod
    def remember(self, entries: Sequence[Entry]) -> Collection[Entry]:
        """Remember entries in the ambient transaction; return those that are new."""

    def admit(self, message: Message[Any]) -> None:
        """Refuse a message without id, whose duplicates could not be recognised."""
        if not message.attributes.get("id"):
            raise InvalidMessage(
                f"{describe(message.attributes)}: the inbox needs an id; let the producer set one"
            )

    def entry(self, message: Message[Any]) -> Entry:
        handler = message.handler
        name = f"{self.subscriber}/{handler.name}" if handler is not None else self.subscriber
        return name, message.identity

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            entries = [self.entry(message) for message in batch]
            # dict, not list: a message may occur twice in one batch
            unseen = set(self.remember(list(dict.fromkeys(entries))))
            fresh: list[int] = []
            for index, entry in enumerate(entries):
                if entry in unseen:
                    unseen.remove(entry)
                    fresh.append(index)
            results: list[Result] = [SKIPPED] * len(batch)
            if fresh:
                handled = next([batch[index] for index in fresh])
                for index, result in zip(fresh, handled, strict=True):
                    if not isinstance(result, Exception) and result:
                        raise outputs_without_outbox(batch[index])
                    results[index] = result
            return results

        return process


def outputs_without_outbox(message: Message[Any]) -> HandlerError:
    """Return the error of a message whose handler returned events that no outbox would store."""
    name = message.handler.name if message.handler is not None else "the handler"
    return HandlerError(
        f"{name} returned events for {describe(message.attributes)}, but the chain has an inbox"
        " and no outbox: after a crash they would never be sent. Add an Outbox inside the Inbox"
    )
