"""The source of a relay: an outbox stream, read as seed 000 says."""

from __future__ import annotations

import socket
from typing import Any

from conquiet.redis.source import StreamSource


def outbox_source(
    client: Any,
    stream: str,
    *,
    group: str = "outbox-publisher",
    consumer: str | None = None,
    batch_size: int = 100,
    block: float = 1.0,
    claim_interval: float = 30.0,
    max_idle: float = 60.0,
    max_deliveries: int = 10,
    dead_letters: str | None = None,
) -> StreamSource:
    """Reads an outbox stream; what is acked is gone from it, what fails is tried again.

    The consumer is called as the host, so that a relay that crashed goes on where it was. Give
    names yourself if several relays of one outbox share a host: two of one name deliver twice.
    A batch is 100, not the seed's 10: a round trip costs more than an entry.
    """
    return StreamSource(
        client,
        stream,
        group,
        consumer or socket.gethostname(),
        lease=max_idle,
        claim_interval=claim_interval,
        block=block,
        batch=batch_size,
        max_deliveries=max_deliveries,
        dead_letters=dead_letters,
        delete=True,
    )
