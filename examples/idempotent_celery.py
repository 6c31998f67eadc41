"""The reference consumer as a Celery task.

With `acks_late`, a worker that dies gives its task back, so a task may run twice: the guard makes
its effects happen once. If another worker handles the event, or the handler fails, the task is
retried later, since Celery acks a task that returns and one that fails. An event that can never be
handled fails at once.

    REDIS_URL=redis://localhost:6379/0 celery -A examples.idempotent_celery worker
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import redis
from celery import Celery

from conquiet.errors import InvalidMessage
from conquiet.events import Idempotency
from marketplace.catalog import CATALOG

CONSUMER = "notifications"

logger = logging.getLogger("notifications")

app = Celery("notifications", broker=os.environ.get("CELERY_BROKER_URL", "redis://"))
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
)


@cache
def idempotency() -> Idempotency:
    """Made in the process that uses it, not in the one that forks it."""
    url = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    return Idempotency(redis.Redis.from_url(url))


sent: list[str] = []


@app.task(  # type: ignore[untyped-decorator]  # Celery has no types
    bind=True,
    name="notify",
    autoretry_for=(Exception,),
    dont_autoretry_for=(InvalidMessage,),
    retry_backoff=True,
    retry_backoff_max=300,
    max_retries=None,
)
def notify(self: Any, event_type: str, payload: str) -> None:
    """Handle one domain event: its type and its envelope, as the relay published them."""
    received = CATALOG.open(event_type, payload)
    with idempotency().guard(CONSUMER, received.envelope.event_id) as fresh:
        if fresh:
            send(received.data)


def send(data: Any) -> None:
    """The side effect, which must happen once."""
    sent.append(type(data).__name__)
    logger.info("sent %s", type(data).__name__)
