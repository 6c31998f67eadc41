"""Publish: what a chain lets through goes to a sink, before the input is acked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet.acking import Error
from conquiet.errors import HandlerError, SinkUnavailable
from conquiet.handler import NOTHING, Process, Result
from conquiet.message import Message, describe
from conquiet.sink import Sink
from conquiet.stage import Stage


class Publish:
    """Middleware: publishes outputs; an input whose outputs were not confirmed has failed.

    A worker adds it to its router's chain, inside retry and dead letter, which so get to see
    what cannot be published, and outside the transaction, which has committed by then.
    """

    stage = Stage.PUBLISH

    def __init__(self, sink: Sink | None) -> None:
        self.sink = sink

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            outputs = [
                output
                for result in results
                if not isinstance(result, Exception)
                for output in result
            ]
            if not outputs:
                return results
            answers = iter(self._answers(outputs))
            return [
                result if isinstance(result, Exception) or not result else _outcome(result, answers)
                for result in results
            ]

        return process

    def _answers(self, outputs: Sequence[Message[Any]]) -> Sequence[Error]:
        if self.sink is not None:
            return answers_of(self.sink, outputs)
        error = HandlerError(
            f"{describe(outputs[0].attributes)} was returned by a handler and has nowhere to"
            " go: give the worker a sink, or the router an outbox"
        )
        return [error] * len(outputs)


def _outcome(outputs: Sequence[Message[Any]], answers: Any) -> Result:
    """Nothing is left of outputs that have all gone out; else the first reason why not."""
    errors = [error for error in (next(answers) for _ in outputs) if error is not None]
    return errors[0] if errors else NOTHING


def answers_of(sink: Sink, messages: Sequence[Message[Any]]) -> Sequence[Error]:
    """Publish, and give one answer per message whatever the sink does."""
    try:
        answers = sink.publish(messages)
    except Exception as error:  # noqa: BLE001 - becomes the answer for every message
        return [error] * len(messages)
    if len(answers) != len(messages):
        wrong = SinkUnavailable(f"{sink!r} gave {len(answers)} answers to {len(messages)} messages")
        return [wrong] * len(messages)
    return answers
