"""Propagate the correlation id of an input to its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet.handler import Process, Result
from conquiet.message import Message
from conquiet.stage import Stage


class Correlation:
    """Gives outputs the `correlationid` of their input, or its id if it has none.

    A `correlationid` that the handler set is kept. An input without either changes nothing.
    """

    stage = Stage.OUTPUT

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            for message, result in zip(batch, results, strict=True):
                if not result or isinstance(result, Exception):
                    continue
                attributes = message.attributes
                thread = attributes.get("correlationid") or attributes.get("id")
                if type(thread) is not str:  # attributes come from outside and may be of any type
                    continue
                for output in result:
                    if not output.attributes.get("correlationid"):
                        output.attributes["correlationid"] = thread
            return results

        return process
