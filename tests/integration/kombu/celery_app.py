"""The Celery application of the tests: tasks that note in Redis what they did.

`python -m celery -A tests.integration.kombu.celery_app worker`, with the server in REDIS_URL.
"""

from __future__ import annotations

import os
import signal
import time

import redis
from celery import Celery, Task, shared_task
from kombu import Queue

LEASE = 2.0
SCHEME = os.environ.get("SUITE_SCHEME", "redis-streams")
"""`redis` runs the same tests on Kombu's list transport, to see what they say of it."""

if SCHEME != "redis":
    import conquiet.kombu  # noqa: F401 - registers the scheme


def make(url: str) -> Celery:
    """An application on a server, for broker and results; the tasks below are its."""
    made = Celery("tests.integration.kombu.celery_app", set_as_current=False)
    made.conf.update(
        accept_content=["json"],
        broker_connection_retry_on_startup=True,
        broker_transport_options={} if SCHEME == "redis" else {"lease": LEASE},
        broker_url=url.replace("redis://", f"{SCHEME}://", 1),
        result_backend=url,
        result_expires=600,
        task_default_queue="work",
        task_queues=[Queue("work")],
        task_send_sent_event=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_soft_shutdown_timeout=float(os.environ.get("SOFT_SHUTDOWN_SECONDS", "0")),
    )
    made.set_current()
    return made


class Notes:
    """Lists in Redis: what happened, in which order, by whom."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)

    def add(self, name: str, what: object = "") -> None:
        self.client.rpush(f"notes:{name}", str(what))

    def of(self, name: str) -> list[str]:
        return self.client.lrange(f"notes:{name}", 0, -1)

    def wait_for(self, name: str) -> None:
        while not self.client.exists(f"allowed:{name}"):
            time.sleep(0.02)

    def allow(self, name: str) -> None:
        self.client.set(f"allowed:{name}", 1)


def notes() -> Notes:
    return Notes(os.environ["REDIS_URL"])


@shared_task
def add(x: int, y: int) -> int:
    return x + y


@shared_task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task(bind=True)
def note(self: Task, name: str) -> None:
    notes().add(name, f"{time.time()} {self.request.hostname}")


@shared_task(bind=True)
def show_id(self: Task, name: str) -> None:
    notes().add(name, self.request.id)


@shared_task
def rest(name: str, seconds: float) -> None:
    """Note the start and the end of a pause."""
    notes().add(name, "started")
    time.sleep(seconds)
    notes().add(name, "ended")


@shared_task
def hold(name: str) -> None:
    """Run until the test allows the end."""
    notes().add(name, "started")
    notes().wait_for(name)
    notes().add(name, "ended")


@shared_task(acks_late=True)
def hold_late(name: str) -> None:
    hold(name)


@shared_task(bind=True, max_retries=3)
def third_time(self: Task, name: str) -> int:
    """Fail twice, asking to be run again."""
    notes().add(name, self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@shared_task(acks_late=True, reject_on_worker_lost=True)
def lose_the_process(name: str) -> None:
    """Kill the process of the pool, the first time."""
    notes().add(name, os.getpid())
    if len(notes().of(name)) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@shared_task(bind=True, rate_limit="2/s")
def limited(self: Task, name: str) -> None:
    notes().add(name, f"{time.time()} {self.request.hostname}")


if "REDIS_URL" in os.environ:
    app = make(os.environ["REDIS_URL"])
