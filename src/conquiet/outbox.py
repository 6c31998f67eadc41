"""Outbox: the events of a transaction become part of it, until a relay publishes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from conquiet.errors import ConfigError
from conquiet.handler import NOTHING, Process, Result
from conquiet.message import Message
from conquiet.stage import Stage


class Outbox(ABC):
    """Middleware: stores what handlers return and swallows it; the relay takes it from there."""

    stage = Stage.OUTBOX

    def __init__(self, topic: str) -> None:
        if not topic:
            raise ConfigError("an outbox needs the topic its events go to, such as 'orders'")
        self.topic = topic

    @abstractmethod
    def store(self, outputs: Sequence[Message[Any]]) -> None:
        """Write the outputs in the ambient transaction, in their order."""

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            outputs: list[Message[Any]] = []
            for result in results:
                if isinstance(result, Exception):
                    raise result
                outputs.extend(result)
            for output in outputs:
                output.topic = output.topic or self.topic
            if outputs:
                self.store(outputs)
            return [NOTHING] * len(batch)

        return process
