"""A small shop with something of everything: rows, a log, groups, dead letters."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
from sqlalchemy import Engine, text

from conquiet.message import Message
from conquiet.operations.history import Key
from conquiet.redis import StreamSink, StreamSource
from conquiet.sql import Outbox, engine, schema

_HANDLERS = (
    ("place_order", "order.place", 21.0, 0.005),
    ("charge_card", "order.placed", 20.0, 0.05),
    ("send_receipt", "payment.captured", 4.0, 0.1),
    ("update_stock", "order.placed", 20.0, 0.001),
    ("export_invoice_to_the_accounting_system", "invoice.rendered", 0.4, 0.5),
)
"""Name, type, calls per second, and usual seconds of a call."""


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

    def remember(self, minutes: int = 60) -> None:
        """A history of so many minutes, as two workers and a relay leave it."""
        dice = random.Random(5)
        now = int(time.time() // 60)
        rows: list[tuple[int, Key, float]] = []
        for minute in range(now - minutes, now + 1):
            wave = 1 + 0.5 * math.sin(minute / 9)
            for name, type_, rate, usual in _HANDLERS:
                of = partial(Key, "handler", name, type_)
                count = int(60 * rate * wave * (0.8 + 0.4 * dice.random()))
                errors = int(count * dice.random() * 0.02) if name != "send_receipt" else count // 9
                slow = max(1, count // 12) if count else 0
                rows += [
                    (minute, of("calls"), count),
                    (minute, of("ok"), count - errors),
                    (minute, of("errors"), errors),
                    (minute, of("dead"), errors // 4),
                    (minute, of("retries"), errors),
                    (minute, of("seconds"), count * usual),
                    (minute, of(f"<={usual:g}"), count - slow),
                    (minute, of(f"<={5 * usual:g}"), slow),
                ]
            backlog = int(400 * abs(math.sin(minute / 14)) ** 3)
            rows += [
                (minute, Key("relay", "outbox", "", "published"), int(1_800 * wave)),
                (minute, Key("relay", "outbox", "", "waiting"), backlog // 3),
                (minute, Key("group", "billing", "orders", "lag"), backlog),
            ]
            for process, role in (("web-1-41", "worker"), ("web-2-17", "worker and relay")):
                rows.append((minute, Key("process", process, role, "seen"), time.time()))
                rows.append((minute, Key("process", process, role, "in_flight"), 3))
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO outbox_history"
                    " VALUES (:minute, :kind, :name, :type, :figure, :value)"
                ),
                [
                    {"minute": minute, **key._asdict(), "value": value}
                    for minute, key, value in rows
                    if value or key.kind != "handler"
                ],
            )

    def enqueue(self, queue: str, count: int, prefix: str = "") -> list[str]:
        """Messages in a queue of Celery, of two priorities; their streams."""
        streams = [f"{prefix}conquiet:kombu:q:{priority}:{queue}" for priority in (0, 9)]
        for stream in streams:
            self.client.xgroup_create(stream, "conquiet", "0", mkstream=True)
        for number in range(count):
            self.client.xadd(streams[number % 2], {"m": b"{}"})
        return streams

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
