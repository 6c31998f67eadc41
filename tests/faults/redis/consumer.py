"""A consumer process for the fault tests: reads a stream, notes what it handles in a list.

    python consumer.py URL MODE [CONSUMER]

`hold`: read a batch, say so, never settle. `work`: note each message in `handled`, then ack.
"""

from __future__ import annotations

import sys
import time

import redis

from conquiet.message import Message
from conquiet.redis import StreamSource
from conquiet.router import Router
from conquiet.worker import Worker


def main() -> None:
    url, mode, *name = sys.argv[1:]
    client = redis.Redis.from_url(url)
    consumer = name[0] if name else None
    source = StreamSource(client, "orders", "billing", consumer, lease=0.5, claim_interval=0.1)
    if mode == "hold":
        messages = source.read(5, 10.0)
        print("holding", len(messages), flush=True)
        time.sleep(600)
    router = Router()

    @router.raw()
    def handle(message: Message[bytes]) -> None:
        client.rpush("handled", message.id)

    Worker(source, router, batch_size=5).run()


if __name__ == "__main__":
    main()
