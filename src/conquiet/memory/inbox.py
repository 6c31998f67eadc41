"""Inbox in a `Store`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from conquiet import inbox
from conquiet.memory.unit import ambient


class Inbox(inbox.Inbox):
    """Middleware: remembers in the store of the transaction around it."""

    def remember(self, entries: Sequence[inbox.Entry]) -> Collection[inbox.Entry]:
        return ambient("the inbox").remember(entries)
