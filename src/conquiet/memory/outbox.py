"""Outbox in a `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conquiet import outbox
from conquiet.memory.unit import ambient
from conquiet.message import Message


class Outbox(outbox.Outbox):
    """Middleware: events wait in the store of the transaction around it; see
    `Store.outbox_source`."""

    def store(self, outputs: Sequence[Message[Any]]) -> None:
        ambient("the outbox").emit(outputs)
