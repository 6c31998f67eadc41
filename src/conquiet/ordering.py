"""Order by key: when a message fails, the later ones of its key wait for it."""

from __future__ import annotations

from typing import Any

from conquiet.errors import GivenBack
from conquiet.message import Message


class Turns:
    """Remembers, within one batch, the keys whose turn was lost by a failure.

    Only messages with an `order_key` take part; an ordered worker sets it.
    """

    __slots__ = ("_failed",)

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def lost(self, message: Message[Any]) -> GivenBack | None:
        """Why this message must not run now, if an earlier one of its key failed."""
        if message.order_key is None or message.order_key not in self._failed:
            return None
        return GivenBack(f"an earlier message of key {message.order_key!r:.80} failed; it waits")

    def take(self, message: Message[Any]) -> None:
        """Raise if it has lost its turn."""
        lost = self.lost(message)
        if lost is not None:
            raise lost

    def failed(self, message: Message[Any]) -> None:
        if message.order_key is not None:
            self._failed.add(message.order_key)
