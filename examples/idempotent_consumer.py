"""The reference consumer of domain events: reads what a relay published, handles each event once.

Duplicates are possible; consumers must be idempotent. The guard claims the event before the side
effects and remembers it after them. An event that has failed, or that another process handles, is
not acked and is delivered again; a duplicate is acked and has no effect.

    REDIS_URL=redis://localhost:6379/0 python examples/idempotent_consumer.py
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import redis

from conquiet import Message
from conquiet.backoff import Backoff
from conquiet.errors import Blameless, InvalidMessage, StoreError
from conquiet.events import Idempotency
from conquiet.redis import StreamSource
from marketplace.catalog import CATALOG, NOTIFICATIONS, OrderCreated

logger = logging.getLogger("notifications")


class Consumer:
    """A loop over the stream of domain events."""

    def __init__(self, client: redis.Redis) -> None:
        self.idempotency = Idempotency(client)
        self.source = StreamSource(
            client,
            "domain-events",
            group=NOTIFICATIONS.name,
            max_attempts=10,
            dead_letters="domain-events.dead",
        )
        self.sent: list[str] = []

    def run(self, stopping: threading.Event) -> None:
        """Consume until `stopping` is set; while Redis is away, wait and try again."""
        pauses = Backoff(first=0.1, cap=5.0)
        try:
            while not stopping.is_set():
                try:
                    self.run_once(1.0)
                    pauses.reset()
                except StoreError as error:
                    wait = pauses.next()
                    logger.warning("Redis is away, next try in %.1f s: %s", wait, error)
                    stopping.wait(wait)
        finally:
            self.source.close()

    def run_once(self, timeout: float = 0.0) -> int:
        messages = self.source.read(50, timeout)
        for message in messages:
            self.settle(message)
        return len(messages)

    def settle(self, message: Message[Any]) -> None:
        """Ack what took effect, now or before; give everything else back."""
        try:
            if message.type in NOTIFICATIONS.accepts:
                self.handle(message)
            message.ack()
        except Blameless as error:  # in progress elsewhere, or Redis is away: not its fault
            message.nack(error)
        except InvalidMessage as error:  # it will never fit: after its deliveries, a dead letter
            logger.error("event_id=%s event_type=%s: %s", message.id, message.type, error)
            message.nack(error)
        except Exception as error:
            logger.exception("event_id=%s event_type=%s failed", message.id, message.type)
            message.nack(error)

    def handle(self, message: Message[Any]) -> None:
        received = CATALOG.open(message.type, message.data)
        with self.idempotency.guard(NOTIFICATIONS.name, received.envelope.event_id) as fresh:
            if fresh:
                self.notify(received.data)
            else:
                logger.info("duplicate event_id=%s", received.envelope.event_id)

    def notify(self, data: Any) -> None:
        """The side effect, which must happen once."""
        about = data.order_number if isinstance(data, OrderCreated) else type(data).__name__
        self.sent.append(str(about))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    url = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with redis.Redis.from_url(url) as client:
        Consumer(client).run(stopping)
