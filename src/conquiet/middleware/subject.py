"""Set the subject of outputs, which is also their ordering key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conquiet.errors import ConfigError, HandlerError
from conquiet.handler import Outputs, Process, Result
from conquiet.message import Message, describe
from conquiet.stage import Stage


class Subject:
    """Sets the `subject` of outputs from their data; a subject set by the handler is kept.

    `of` is a function of the output's data, or the name of a field. If the function returns None
    or the data lacks the field, the subject is not set.

    >>> mark = Subject("order_id")(lambda batch: [[Message({"order_id": 7})] for _ in batch])
    >>> [[output]] = mark([Message(b"")])
    >>> output.subject
    '7'
    """

    stage = Stage.OUTPUT

    def __init__(self, of: Callable[[Any], object] | str) -> None:
        if isinstance(of, str):
            self._of = _field(of)
        elif callable(of):
            self._of = of
        else:
            raise ConfigError(
                f"Subject({of!r}): give a field's name or a function of the event's data,"
                " such as Subject('order_id')"
            )

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            failed: dict[int, Exception] = {}
            for index, result in enumerate(results):
                if not result or isinstance(result, Exception):
                    continue
                try:
                    self._mark(result)
                except HandlerError as error:
                    failed[index] = error
            if not failed:
                return results
            return [failed.get(index, result) for index, result in enumerate(results)]

        return process

    def _mark(self, outputs: Outputs) -> None:
        for output in outputs:
            if output.attributes.get("subject"):
                continue
            try:
                subject = self._of(output.data)
            except Exception as error:
                raise HandlerError(
                    f"the function of Subject failed on the output {describe(output.attributes)}:"
                    f" {error!r:.200}; let it return None for events that have no subject"
                ) from error
            if subject is not None and subject != "":
                output.attributes["subject"] = str(subject)


def _field(name: str) -> Callable[[Any], object]:
    if not name:
        raise ConfigError("Subject('') names no field; give one, such as Subject('order_id')")

    def read(data: Any) -> object:
        if isinstance(data, Mapping):
            return data.get(name)
        return getattr(data, name, None)

    return read
