"""Transaction over a `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from conquiet import transaction
from conquiet.memory.store import Store
from conquiet.message import Message


class Transaction(transaction.Transaction):
    """Middleware: what handlers write to the store is committed with the batch, or dropped."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        return self._store.transaction()
