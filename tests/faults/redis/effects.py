"""A worker process for the fault tests: takes messages of a stream into effect, in Redis.

    python effects.py URL POINT [--lease SECONDS] [--slow SECONDS]

Kills itself at a point: `after-lease`, `before-exec`, `after-exec` (before the reply is read),
`before-ack`, or at none.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import redis

from conquiet.message import Message
from conquiet.redis import Inbox, Outbox, StreamSource, Transaction, commands
from conquiet.redis.connection import Connection
from conquiet.redis.lease import Leases
from conquiet.router import Router
from conquiet.worker import Worker

STREAM, GROUP, OUTBOX = "orders", "billing", "outbox"


def make_router(client, lease: float = 1.0, slow: float = 0.0) -> Router:
    router = Router()
    router.use(Transaction(client), Inbox("billing", lease=lease), Outbox("sales", OUTBOX))

    @router.raw(name="handler", source="/billing")
    def handle(message: Message[bytes]) -> list[Message[bytes]]:
        commands(client).hincrby("effects", message.id, 1)
        time.sleep(slow)
        return [Message(b"", {"type": "billed", "id": f"{message.id}/billed"})]

    return router


def make_source(client, lease: float = 1.0) -> StreamSource:
    settings = {"lease": lease, "claim_interval": 0.1, "max_backoff": 0.2}
    return StreamSource(client, STREAM, GROUP, **settings)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(point: str) -> None:
    """Make the process end where it is told to."""
    if point == "after-lease":
        acquire = Leases.acquire

        def lease_and_die(self, keys, terms):
            acquire(self, keys, terms)
            die()

        Leases.acquire = lease_and_die
    elif point in ("before-exec", "after-exec"):
        send = Connection.send

        def send_and_die(self, packed):
            commits = len(packed) > 2 and b"EXEC" in packed[-1]
            if not commits or point == "after-exec":
                send(self, packed)
            if commits:
                time.sleep(0.2)  # the server has run it by now, if it was sent
                die()

        Connection.send = send_and_die
    elif point == "before-ack":
        Router.settle = lambda self, handled: die()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("point")
    parser.add_argument("--lease", type=float, default=1.0)
    parser.add_argument("--slow", type=float, default=0.0)
    given = parser.parse_args()
    plant(given.point)
    client = redis.Redis.from_url(given.url)
    source = make_source(client, given.lease)
    Worker(source, make_router(client, given.lease, given.slow), batch_size=5).run()


if __name__ == "__main__":
    main()
