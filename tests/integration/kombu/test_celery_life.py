"""Celery workers that stop, restart and are killed: what they had comes back."""

from __future__ import annotations

import signal
import time
from uuid import uuid4

import pytest
from tests.integration.kombu import celery_app as tasks
from tests.integration.kombu.versions import OLDEST
from tests.waiting import eventually

from conquiet.kombu import inspection

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of Celery's own
    pytest.mark.usefixtures("app"),
]

SECONDS = 30
POOLS = [
    "prefork",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("threads", "solo", "gevent")),
]


@pytest.fixture
def name():
    return uuid4().hex


def heartbeat_of(app, worker):
    """Wait for one; those who gossip have then heard of the worker, too."""
    heard = set()
    handlers = {"worker-heartbeat": lambda event: heard.add(event["hostname"])}
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers=handlers)
        with receiver.consumer_context() as (its_connection, _, _):
            while worker.name not in heard:
                its_connection.drain_events(timeout=SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_worker_gives_back_what_it_had_within_the_lease(app, start, notes, name, pool):
    victim = start("victim", pool=pool)
    late = tasks.hold_late.delay(name)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    waiting = tasks.note.apply_async([f"{name}-eta"], countdown=1)
    heir = start("heir", pool=pool)
    beats = pool != "solo"  # whose loop is blocked while the task runs
    if beats:
        heartbeat_of(app, victim)
    victim.kill()
    killed = time.time()
    notes.allow(name)
    late.get(SECONDS)
    assert notes.of(name) == ["started", "started", "ended"]
    assert time.time() - killed < tasks.LEASE + SECONDS / 2
    waiting.get(SECONDS)
    assert len(notes.of(f"{name}-eta")) == 1
    if beats:  # gossip: the heir heard the victim's heart, and then no more
        eventually(lambda: "missed heartbeat from victim@tests" in heir.log, timeout=SECONDS)
    heir.signal(signal.SIGTERM)
    assert heir.has_ended() == 0


@pytest.mark.slow
def test_a_worker_that_was_suspended_does_not_start_what_others_have_done(start, notes, name):
    victim = start("victim", concurrency=1)
    runs = tasks.hold_late.delay(name)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    rest = [tasks.note.delay(f"{name}-rest") for _ in range(3)]
    eventually(lambda: pending(notes) == 4, timeout=SECONDS)
    victim.suspend()
    start("heir", concurrency=4)
    for result in rest:
        result.get(SECONDS)
    victim.resume()
    notes.allow(name)
    runs.get(SECONDS)
    eventually(lambda: "was silent for longer than its lease" in victim.log, timeout=SECONDS)
    victim.signal(signal.SIGTERM)
    victim.has_ended()
    assert len(notes.of(f"{name}-rest")) == 3


def pending(notes):
    [queue] = [one for one in inspection.queues(notes.client) if one.name == "work"]
    return queue.pending


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_stop_ends_what_runs_and_gives_the_rest_back_at_once(start, notes, name, pool):
    first = start("first", pool=pool, concurrency=1)
    runs = tasks.rest.delay(name, 1.5)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    rest = [tasks.note.delay(f"{name}-rest") for _ in range(6)]
    later = tasks.note.apply_async([f"{name}-later"], countdown=3)
    first.signal(signal.SIGTERM)
    assert first.has_ended() == 0
    assert notes.of(name) == ["started", "ended"]
    start("second", pool=pool, concurrency=1)
    for result in (runs, *rest, later):
        result.get(SECONDS)
    assert len(notes.of(f"{name}-rest")) == 6
    assert len(notes.of(f"{name}-later")) == 1


@pytest.mark.slow
def test_a_soft_shutdown_lets_tasks_end_and_gives_the_rest_back(start, notes, name):
    settings = {"pool": "prefork", "concurrency": 1, "SOFT_SHUTDOWN_SECONDS": "3"}
    first = start("first", **settings)
    runs = tasks.rest.delay(name, 1.5)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    later = tasks.note.apply_async([f"{name}-later"], countdown=3)
    first.signal(signal.SIGQUIT)
    first.has_ended()
    assert notes.of(name) == ["started", "ended"]
    start("second", pool="threads")
    for result in (runs, later):
        result.get(SECONDS)
    assert len(notes.of(f"{name}-later")) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_on_the_oldest_kombu_share_a_queue_with_ours(start, notes, name, interpreter):
    victim = start("victim", python=interpreter(f"kombu[redis]=={OLDEST}", "celery"))
    assert tasks.add.delay(1, 2).get(SECONDS) == 3
    late = tasks.hold_late.delay(name)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    victim.kill()
    start("heir", python=interpreter(f"kombu[redis]=={OLDEST}", "celery"))
    notes.allow(name)
    late.get(SECONDS)
    assert notes.of(name) == ["started", "started", "ended"]


def test_a_worker_restarts_on_a_hangup(start, notes, name):
    worker = start("worker", pool="threads")
    worker.signal(signal.SIGHUP)
    worker.is_ready(times=2)
    tasks.note.delay(name).get(SECONDS)
    assert len(notes.of(name)) == 1


def test_a_worker_ends_when_it_is_told_by_broadcast(app, start):
    worker = start("worker", pool="threads")
    app.control.shutdown()
    assert worker.has_ended() == 0
    # A broadcast is for those who are there: one that starts later does not hear of it.
    start("next", pool="threads")
    assert tasks.add.delay(1, 2).get(SECONDS) == 3
