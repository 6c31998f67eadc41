"""A service to kill: consumer.py SOURCE DATABASE [BATCHES].

Counts messages in a table, with an inbox, until SIGTERM; if SOURCE names a database for the offsets
of Kafka, with these in place of an inbox. With BATCHES it dies by SIGKILL after it has committed so
many batches, before their acks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text

from conquiet import Message, Router, Worker
from conquiet.registry import SourceOptions, connect_source
from conquiet.sql import Inbox, Transaction, connection, engine

UPSERT = text(
    "INSERT INTO effects (id, times) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET times = effects.times + 1"
)


class Doomed:
    """A source whose process dies instead of sending the acks of the last batch."""

    def __init__(self, source: Any, batches: int) -> None:
        self._source = source
        self.inbox = getattr(source, "inbox", None)
        self._left = batches
        self._settle, source.settle = source.settle, self.settle

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        messages: Sequence[Message[Any]] = self._source.read(min(limit, 50), timeout)
        return messages

    def settle(self, acked: Any, nacked: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._settle(acked, nacked)

    def close(self) -> None:
        self._source.close()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the worker takes it
    source_url, database_url, *batches = sys.argv[1:]
    database = engine(database_url)
    router = Router()
    source: Any = connect_source(source_url, SourceOptions(max_attempts=1_000))
    router.use(Transaction(database))
    if getattr(source, "inbox", None) is None:
        router.use(Inbox("counter"))

    @router.raw(name="count", source="/contract")
    def count(message: Message[Any]) -> None:
        with connection(database) as current:
            current.execute(UPSERT, {"id": message.id})

    if batches:
        source = Doomed(source, int(batches[0]))
    Worker(source, router, batch_size=200).run()


if __name__ == "__main__":
    main()
