"""A service that kills itself at one step of the path: service.py DATABASE REDIS POINT COUNT.

Commands come from a Redis stream, effects and events go into the database in one transaction,
and a relay publishes the events to another stream. `POINT` is reached `COUNT` times before the
process dies by SIGKILL; with `-` for a point it works until SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager

import msgspec
import redis
from sqlalchemy import event, text

from conquiet import Acking, Message, Router, Worker
from conquiet.errors import SinkUnavailable
from conquiet.relay import Relay
from conquiet.sql import Inbox, Outbox, OutboxSource, Transaction, connection, engine

COMMANDS, EVENTS, GROUP = "commands", "events", "billing"
BATCH = 5

POINTS = (
    "before BEGIN",
    "after the inbox insert",
    "in the handler",
    "after the outbox insert",
    "before COMMIT",
    "after COMMIT",
    "before the ack",
    "after the ack",
    "after the claim",
    "before the publish",
    "amid the publish",
    "after the publish",
    "before the mark",
    "after the mark",
)

UPSERT = (
    "INSERT INTO orders (id, amount) VALUES (:id, 1)"
    " ON CONFLICT (id) DO UPDATE SET amount = orders.amount + 1"
)


class PlaceOrder(msgspec.Struct):
    id: str


class OrderPlaced(msgspec.Struct):
    id: str


class Fate:
    """Dies when its point has been reached often enough."""

    def __init__(self, point: str, count: int) -> None:
        self.point = point
        self.left = count

    def reached(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class StreamSource:
    """The least that a durable source is: what is pending is read again after a restart."""

    def __init__(self, client: redis.Redis, fate: Fate) -> None:
        self._client = client
        self._fate = fate
        self._after = "0"

    def read(self, limit, timeout):
        block = max(1, int(timeout * 1000)) if self._after == ">" else None
        reply = self._client.xreadgroup(
            GROUP, "only", {COMMANDS: self._after}, count=limit, block=block
        )
        entries = []
        if reply:
            entries = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))
        if self._after != ">":
            self._after = entries[-1][0] if entries else ">"
        return [
            Message(
                fields[b"data"],
                {"id": fields[b"id"].decode(), "type": "place.order", "source": "/web"},
                acking=Acking(self, entry_id),
            )
            for entry_id, fields in entries
        ]

    def settle(self, acked, nacked):
        self._fate.reached("before the ack")
        if acked:
            self._client.xack(COMMANDS, GROUP, *acked)
        if nacked:
            self._after = "0"
        self._fate.reached("after the ack")

    def close(self):
        self._client.close()


class StreamSink:
    def __init__(self, client: redis.Redis, fate: Fate) -> None:
        self._client = client
        self._fate = fate

    def publish_each(self, messages):
        self._fate.reached("before the publish")
        for number, message in enumerate(messages):
            try:
                self._client.xadd(EVENTS, {"id": message.id, "data": message.data})
            except redis.ConnectionError as error:
                raise SinkUnavailable(str(error)) from error
            if number == 1:
                self._fate.reached("amid the publish")
        self._fate.reached("after the publish")
        return [None] * len(messages)

    def close(self):
        self._client.close()


def fated(fate: Fate, made):
    """The middlewares, each of which meets its fate."""

    class FatedTransaction(Transaction):
        @contextmanager
        def scope(self, batch):
            fate.reached("before BEGIN")
            with super().scope(batch) as found:
                yield found
            fate.reached("after COMMIT")

    class FatedInbox(Inbox):
        def remember(self, entries):
            new = super().remember(entries)
            fate.reached("after the inbox insert")
            return new

    class FatedOutbox(Outbox):
        def store(self, outputs):
            super().store(outputs)
            fate.reached("after the outbox insert")

    event.listen(made, "commit", lambda connection: fate.reached("before COMMIT"))
    return FatedTransaction(made), FatedInbox("billing"), FatedOutbox("orders")


def fated_source(fate: Fate, made) -> OutboxSource:
    source = OutboxSource(made, poll=0.05)
    rows = source._claimer
    claim, settle = rows.claim, rows.settle

    def claim_and_die(*given):
        opened = claim(*given)
        if opened is not None:
            fate.reached("after the claim")
        return opened

    def settle_and_die(*given):
        fate.reached("before the mark")
        unmarked = settle(*given)
        fate.reached("after the mark")
        return unmarked

    rows.claim, rows.settle = claim_and_die, settle_and_die
    return source


def main(database: str, redis_url: str, point: str, count: str) -> int:
    fate = Fate(point, int(count))
    made = engine(database)
    client = redis.Redis.from_url(redis_url)
    router = Router()
    router.use(*fated(fate, made))

    @router.command(source="/shop")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        with connection(made) as found:
            found.execute(text(UPSERT), {"id": order.id})
        fate.reached("in the handler")
        return [OrderPlaced(order.id)]

    relay = Relay(fated_source(fate, made), StreamSink(client, fate), batch_size=BATCH)
    publishing = threading.Thread(target=relay.run)
    publishing.start()
    finished = Worker(StreamSource(client, fate), router, batch_size=BATCH).run()
    relay.stop()
    publishing.join()
    made.dispose()
    return 0 if finished else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
