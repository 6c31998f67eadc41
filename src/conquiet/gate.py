"""The gate: what nobody can handle is refused before any transaction begins.

It costs its neighbours nothing: no rollback, no second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conquiet.errors import ConquietError, HandlerError, InvalidMessage, NoHandler
from conquiet.handler import Handler, Process, Result
from conquiet.message import Message, check_kinds, describe
from conquiet.ordering import Turns

Admit = Callable[[Message[Any]], None]
"""Raises if the message must not pass; middlewares may bring one, as method `admit`."""


class Gate:
    """Lets pass what has a handler, a bearable size and data of the right shape, decoded."""

    def __init__(
        self, handlers: Sequence[Handler], max_data_bytes: int, admissions: Sequence[Admit]
    ) -> None:
        self._handlers = handlers
        self._max_data_bytes = max_data_bytes
        self._admissions = admissions

    def __call__(self, next: Process) -> Process:
        def gate(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            refused: dict[int, Exception] = {}
            turns = Turns()
            for index, message in enumerate(batch):
                try:
                    if message.order_key is not None:
                        turns.take(message)
                    self._admit(message)
                except Exception as error:  # noqa: BLE001 - becomes this message's result
                    turns.failed(message)
                    refused[index] = error
            if not refused:
                return next(batch)
            admitted = [message for index, message in enumerate(batch) if index not in refused]
            passed = iter(next(admitted) if admitted else ())
            return [
                refused[index] if index in refused else following(passed)
                for index in range(len(batch))
            ]

        return gate

    def _admit(self, message: Message[Any]) -> None:
        check_kinds(message.attributes)
        handler = message.handler
        if handler is None:
            raise self._nobody(message)
        data = message.data
        if isinstance(data, bytes) and len(data) > self._max_data_bytes:
            raise InvalidMessage(
                f"{describe(message.attributes)}: {len(data):,} bytes of data; at most"
                f" {self._max_data_bytes:,} are taken: raise Router(max_data_bytes=…) or send"
                " a reference to the data instead"
            )
        for admit in self._admissions:
            admit(message)
        message.decoded = handler.decode(message)

    def _nobody(self, message: Message[Any]) -> ConquietError:
        if not message.type:
            return InvalidMessage(
                f"{describe(message.attributes)}: no type, so no handler can be found;"
                " let the producer set the attribute 'type'"
            )
        same = [handler for handler in self._handlers if handler.type == message.type]
        if same:
            names = ", ".join(handler.name for handler in same)
            return NoHandler(f"{describe(message.attributes)}: the matchers of {names} refused it")
        known = sorted({handler.type for handler in self._handlers if handler.type})
        return NoHandler(
            f"{describe(message.attributes)}: no handler for this type; known are:"
            f" {', '.join(known)[:300] or '(none)'}. Register one, or a catch-all by @router.raw()"
        )


def following(results: Iterator[Result]) -> Result:
    """The next result of a chain that may have given too few."""
    return next(results, HandlerError("a middleware gave too few results"))
