"""A small shop with something of everything: rows, a log, groups, dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from sqlalchemy import Engine, text

from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource
from conquiet.sql import Outbox, engine, schema


@dataclass
class Shop:
    """What the dashboard looks at, and what a test may do to it."""

    database: str
    redis: str
    engine: Engine
    client: Any
    readers: ExitStack = field(default_factory=ExitStack)

    def write(self, count: int = 1, type_: str = "order.placed", **data: Any) -> list[str]:
        """Rows of the outbox; their event ids."""
        made = [
            Message(
                {"order": f"o-{n}", "amount": 4200 + n, "currency": "EUR", **data},
                {"type": type_, "source": "/shop", "subject": f"o-{n}"},
            )
            for n in range(count)
        ]
        outbox = Outbox("orders", source="/shop")
        with self.engine.begin() as transaction:
            before = transaction.scalar(text("SELECT coalesce(max(id), 0) FROM outbox"))
            outbox.add(transaction, made)
            rows = transaction.execute(
                text("SELECT event_id FROM outbox WHERE id > :before ORDER BY id"),
                {"before": before},
            )
            return [row[0] for row in rows]

    def mark(self, ids: list[str], what: str, **values: Any) -> None:
        """Rows as a relay leaves them: `published_at` or `parked_at`, with their error."""
        with self.engine.begin() as transaction:
            for id_ in ids:
                transaction.execute(
                    text(
                        f"UPDATE outbox SET {what} = CURRENT_TIMESTAMP, attempts = :attempts,"
                        " last_error = :error WHERE event_id = :id"
                    ),
                    {"id": id_, "attempts": 0, "error": None, **values},
                )

    def publish(
        self, ids: list[str], stream: str = "orders", type_: str = "order.placed", data: bytes = b""
    ) -> None:
        messages = [
            Message(
                data or b'{"order":"o-%d","amount":%d}' % (n, 4200 + n),
                {"id": id_, "type": type_, "source": "/shop", "subject": f"o-{n}"},
            )
            for n, id_ in enumerate(ids)
        ]
        assert set(StreamSink(self.client, stream).publish_each(messages)) == {None}

    def take(
        self,
        count: int,
        group: str = "billing",
        consumer: str = "billing-1",
        stream: str = "orders",
    ) -> list[Message[Any]]:
        """Entries into the hands of a consumer, which stays."""
        source = StreamSource(self.client, stream, group, consumer)
        self.readers.callback(source.close)
        return list(source.read(count, 1.0))

    def bury(self, count: int = 1, stream: str = "orders", why: str = "no such customer") -> None:
        """Dead letters of a stream, in the stream `dead`."""
        source = StreamSource(
            self.client, stream, "shipping", "shipping-1", max_attempts=1, dead_letters="dead"
        )
        self.readers.callback(source.close)
        while source.dead < count:
            for message in source.read(count - source.dead, 1.0):
                try:
                    raise LookupError(why)
                except LookupError as error:
                    message.nack(error)


@contextmanager
def opened(database: str, redis_url: str) -> Iterator[Shop]:
    made = engine(database)
    schema.init(made)
    with redis.Redis.from_url(redis_url) as client, ExitStack() as readers:
        yield Shop(database, redis_url, made, client, readers)
    made.dispose()


def fill(shop: Shop) -> dict[str, str]:
    """Something on every page; the ids that a test asks for."""
    published = shop.write(8)
    shop.mark(published, "published_at")
    parked = shop.write(3, "order.paid")
    shop.mark(parked, "parked_at", attempts=10, error="SinkRefused: message too large: 1,048,999 B")
    waiting = shop.write(4, "order.shipped")
    shop.publish(published)
    shop.bury(3)
    shop.take(5)
    return {"published": published[0], "parked": parked[0], "waiting": waiting[0]}
