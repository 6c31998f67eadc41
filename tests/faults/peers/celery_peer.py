"""Celery: `lists` are Kombu's own Redis transport, `streams` is conquiet's."""

from __future__ import annotations

import functools

import ground
from celery import Celery

OPTIONS = {
    # Kombu looks for what has become visible every 100 seconds, unless it is told otherwise.
    "lists": {
        "visibility_timeout": ground.RETURN_SECONDS,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": ground.RETURN_SECONDS,
    },
    "streams": {"lease": ground.RETURN_SECONDS},
}
broker = ground.REDIS
if ground.KIND == "streams":
    import conquiet.kombu  # noqa: F401 - registers the scheme

    broker = broker.replace("redis://", "redis-streams://", 1)

app = Celery("peer", broker=broker)
if ground.IS_SAFE:
    app.conf.task_acks_late = True
    app.conf.task_reject_on_worker_lost = True
    app.conf.broker_transport_options = OPTIONS[ground.KIND]
effects = functools.cache(ground.connect)


@app.task(name="handle", ignore_result=True)
def handle(command):
    effects().execute(ground.EFFECT, [command])
    app.send_task("event", [command], queue="events")


def send(command):
    handle.delay(command)


def work():
    app.worker_main(["worker", "--loglevel=WARNING"])


if __name__ == "__main__":
    ground.main(work=work, send=send)
