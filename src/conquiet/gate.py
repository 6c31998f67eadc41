"""Refuse messages that cannot be handled, before any transaction begins.

A refused message costs the rest of its batch nothing: no rollback, no second run. When a message
of an ordered worker fails, later ones of its key are refused too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from conquiet.errors import (
    ConquietError,
    GivenBack,
    HandlerError,
    InvalidMessage,
    NoHandler,
    UnknownType,
)
from conquiet.handler import SKIPPED, Handler, Process, Result
from conquiet.message import Message, check_kinds, describe

logger = logging.getLogger("conquiet.router")

Unknown = Literal["nack", "dead", "ack"]
"""What a router does with a message that no handler takes."""

Judge = Callable[["Message[Any]"], Unknown]
"""Decides it for each such message."""


class FailedKeys:
    """Remembers the keys that failed in one batch, so that later messages of them wait.

    Only messages with an `order_key` count; an ordered worker sets it. Shares of one message do not
    wait for each other: each has a handler of its own.
    """

    __slots__ = ("_failed",)

    def __init__(self) -> None:
        self._failed: dict[str, Message[Any]] = {}

    def blocking_error(self, message: Message[Any]) -> GivenBack | None:
        """Return why a message must wait if an earlier one of its key failed, else None."""
        if message.order_key is None:
            return None
        failed = self._failed.get(message.order_key)
        if failed is None or failed is message.origin:
            return None
        return GivenBack(f"an earlier message of key {message.order_key!r:.80} failed; it waits")

    def check(self, message: Message[Any]) -> None:
        """Raise if an earlier message of its key failed."""
        error = self.blocking_error(message)
        if error is not None:
            raise error

    def add(self, message: Message[Any]) -> None:
        """Remember the key of a failed message, and which was the first to fail."""
        if message.order_key is not None:
            self._failed.setdefault(message.order_key, message.origin)


Admit = Callable[[Message[Any]], None]
"""Raises if a message must be refused; a middleware may have one as its method `admit`."""


class Gate:
    """Admits messages that have a handler, an allowed size and data that the handler decodes."""

    def __init__(
        self,
        handlers: Sequence[Handler],
        max_data_bytes: int,
        unknown: Unknown | Judge,
        admissions: Sequence[Admit],
    ) -> None:
        self._handlers = handlers
        self._max_data_bytes = max_data_bytes
        self._judge: Judge = unknown if callable(unknown) else lambda message: unknown
        self._admissions = admissions

    def __call__(self, next: Process) -> Process:
        def gate(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            refused: dict[int, Result] = {}
            failed_keys: FailedKeys | None = None
            for index, message in enumerate(batch):
                try:
                    if failed_keys is not None:
                        failed_keys.check(message)
                    if message.handler is None and message.type and self._judge(message) == "ack":
                        logger.debug("ack, no handler: %s", describe(message.attributes))
                        refused[index] = SKIPPED
                        continue
                    self._admit(message)
                except Exception as error:  # noqa: BLE001 - becomes this message's result
                    failed_keys = failed_keys or FailedKeys()
                    failed_keys.add(message)
                    refused[index] = error
            if not refused:
                return next(batch)
            admitted = [message for index, message in enumerate(batch) if index not in refused]
            passed = iter(next(admitted) if admitted else ())
            return [
                refused[index] if index in refused else next_result(passed)
                for index in range(len(batch))
            ]

        return gate

    def _admit(self, message: Message[Any]) -> None:
        check_kinds(message.attributes)
        handler = message.handler
        if handler is None:
            raise self._unroutable(message)
        data = message.data
        if isinstance(data, bytes) and len(data) > self._max_data_bytes:
            raise InvalidMessage(
                f"{describe(message.attributes)}: {len(data):,} bytes of data; at most"
                f" {self._max_data_bytes:,} are accepted: raise Router(max_data_bytes=…) or send"
                " a reference to the data instead"
            )
        for admit in self._admissions:
            admit(message)
        message.decoded = handler.decode(message)

    def _unroutable(self, message: Message[Any]) -> ConquietError:
        if not message.type:
            return InvalidMessage(
                f"{describe(message.attributes)}: no type, so no handler can be found;"
                " let the producer set the attribute 'type'"
            )
        kind = UnknownType if self._judge(message) == "dead" else NoHandler
        same = [handler for handler in self._handlers if handler.type == message.type]
        if same:
            names = ", ".join(handler.name for handler in same)
            return kind(f"{describe(message.attributes)}: the matchers of {names} refused it")
        known = sorted({handler.type for handler in self._handlers if handler.type})
        return kind(
            f"{describe(message.attributes)}: no handler for this type; known are:"
            f" {', '.join(known)[:300] or '(none)'}. Register one, or one for all other types by"
            " @router.fallback(), or pass them over by Router(unknown='ack')"
        )


def next_result(results: Iterator[Result]) -> Result:
    """Return the next result, or an error if the chain returned too few."""
    return next(results, HandlerError("a middleware returned too few results"))
