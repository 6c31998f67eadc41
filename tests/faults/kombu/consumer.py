"""A busy consumer for the fault tests: notes the number of each message in a file, then acks.

    python consumer.py URL FILE LEASE

A file, and not Redis: what it says is not lost with the server, nor with the consumer.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kombu import Connection, Queue
from kombu.mixins import ConsumerMixin

PREFETCH = 50
QUEUE = Queue("numbers")


def connect(url: str, lease: float) -> Connection:
    """Lists know a time for each message instead of a lease, the visibility timeout."""
    if url.startswith("redis://"):
        return Connection(url, transport_options={"visibility_timeout": lease})
    import conquiet.kombu  # noqa: F401 - registers the scheme

    return Connection(url, transport_options={"lease": lease})


class Numbers(ConsumerMixin):
    connect_max_retries = 100

    def __init__(self, connection: Connection, file: str) -> None:
        self.connection = connection
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        return [consumer([QUEUE], callbacks=[self._handle], prefetch_count=PREFETCH)]

    def _handle(self, body: int, message: Any) -> None:
        os.write(self._file, f"{body}\n".encode())
        message.ack()


def main() -> None:
    url, file, lease = sys.argv[1:]
    Numbers(connect(url, float(lease)), file).run()


if __name__ == "__main__":
    main()
