"""What Celery does with tasks, on two real workers of each pool that share a queue."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from uuid import uuid4

import pytest
from celery import chain, chord, group
from tests.integration.kombu import celery_app as tasks
from tests.integration.kombu.celery_worker import CeleryWorker
from tests.waiting import eventually

from conquiet import App
from conquiet.kombu import inspection

pytestmark = pytest.mark.filterwarnings("default")  # of Celery's own

SECONDS = 20  # for an answer, on a busy machine
POOLS = [
    "prefork",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("threads", "solo", "gevent")),
]
BEYOND_THE_LEASE = 2 * tasks.LEASE


@pytest.fixture(scope="module", params=POOLS)
def pool(request):
    return request.param


@pytest.fixture(scope="module")
def workers(pool, broker, app, notes, tmp_path_factory):
    """Two, so that one could take what the other has."""
    logs = tmp_path_factory.mktemp(pool)
    started = []
    try:
        for name in ("first", "second"):
            started.append(CeleryWorker(broker, logs / f"{name}.log", pool=pool))
            started[-1].is_ready()
        yield started
    finally:
        for worker in started:
            worker.stop()
        notes.client.flushall()  # the next pool starts with empty queues


@pytest.fixture(autouse=True)
def _running(workers):
    """Every test here needs the workers."""


@pytest.fixture
def name(notes):
    """Of what a test has noted; a task that it holds ends with it."""
    made = uuid4().hex
    yield made
    notes.allow(made)


def when_and_where(notes, name):
    return [(float(at), worker) for at, worker in (text.split() for text in notes.of(name))]


def test_a_task_answers():
    assert tasks.add.delay(2, 3).get(SECONDS) == 5


def test_many_tasks_run_once_each(notes, name):
    sent = [tasks.note.delay(name) for _ in range(200)]
    for result in sent:
        result.get(SECONDS)
    assert len(notes.of(name)) == 200


def test_a_retry_comes_back(notes, name):
    assert tasks.third_time.delay(name).get(SECONDS) == 2
    assert notes.of(name) == ["0", "1", "2"]


def test_a_chain_a_group_and_a_chord_come_together():
    assert chain(tasks.add.s(1, 1), tasks.add.s(10), tasks.add.s(100))().get(SECONDS) == 112
    assert group(tasks.add.s(n, n) for n in range(8))().get(SECONDS) == [2 * n for n in range(8)]
    assert chord((tasks.add.s(n, n) for n in range(8)), tasks.total.s())().get(SECONDS) == 56


def test_an_eta_beyond_the_lease_runs_once_and_not_too_early(notes, name):
    sent = time.time()
    tasks.note.apply_async([name], countdown=BEYOND_THE_LEASE).get(SECONDS)
    tasks.add.delay(1, 1).get(SECONDS)
    [(at, _)] = when_and_where(notes, name)
    assert at - sent >= BEYOND_THE_LEASE


def test_a_task_longer_than_the_lease_runs_once(notes, name):
    tasks.rest.delay(name, BEYOND_THE_LEASE).get(SECONDS)
    assert notes.of(name) == ["started", "ended"]


def test_a_late_ack_waits_for_the_end(notes, name):
    result = tasks.hold_late.delay(name)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    # Acks of tasks before this one may still be on their way.
    eventually(lambda: unsettled(notes) == 1, timeout=SECONDS)
    notes.allow(name)
    result.get(SECONDS)
    eventually(lambda: unsettled(notes) == 0)
    assert notes.of(name) == ["started", "ended"]


def unsettled(notes):
    """How many messages of the queue a worker has and has not acked."""
    [queue] = [one for one in inspection.queues(notes.client) if one.name == "work"]
    return queue.pending


def test_a_revoked_task_does_not_run(app, notes, name):
    result = tasks.note.apply_async([name], countdown=2)
    result.revoke()
    eventually(lambda: result.state == "REVOKED", timeout=SECONDS)
    assert notes.of(name) == []


def test_a_task_that_runs_is_terminated(app, pool, notes, name):
    if pool != "prefork":
        pytest.skip("only processes can be terminated")
    result = tasks.hold.delay(name)
    eventually(lambda: notes.of(name) == ["started"], timeout=SECONDS)
    result.revoke(terminate=True)
    eventually(lambda: result.state == "REVOKED", timeout=SECONDS)
    assert notes.of(name) == ["started"]


def test_a_task_whose_process_is_killed_runs_again(pool, notes, name):
    if pool != "prefork":
        pytest.skip("only a pool of processes outlives the loss of one")
    tasks.lose_the_process.delay(name).get(SECONDS)
    first, second = notes.of(name)
    assert first != second


def test_a_rate_limit_spreads_tasks(notes, name):
    for result in [tasks.limited.delay(name) for _ in range(6)]:
        result.get(SECONDS)
    runs = defaultdict(list)
    for at, worker in when_and_where(notes, name):
        runs[worker].append(at)
    assert sum(map(len, runs.values())) == 6
    for times in runs.values():
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert all(pause > 0.25 for pause in pauses)  # 2/s, less what a busy machine smears


# --- tasks of an outbox -----------------------------------------------------------------------


@dataclass
class Noted:
    name: str


def test_a_task_of_an_outbox_runs_beside_the_events_and_one_sent_twice_has_one_id(
    app, broker, notes, name, tmp_path
):
    shop = App(name, f"sqlite:///{tmp_path}/shop.db", broker=broker, celery=app)
    shop.create_tables()
    with shop.sessions.begin() as session:
        id, _ = shop.emit(session, tasks.show_id.s(name), Noted(name))
    dying = shop.relay()
    dying.sink.publish(dying.source.read(10, 5))  # killed before the rows are marked
    dying.source.close()
    dying.sink.close()
    relay = shop.relay()
    assert relay.run_once(5).published == 2
    relay.source.close()
    relay.sink.close()
    eventually(lambda: notes.of(name) == [id, id], timeout=SECONDS)
    assert notes.client.xlen(name) == 2
    shop.close()
    shop.engine.dispose()


# --- workers that hear of each other ----------------------------------------------------------


def test_a_new_worker_hears_from_the_others_by_mingle(workers):
    first, second = workers
    assert "mingle: all alone" in first.log
    assert "mingle: sync with 1 nodes" in second.log
    assert "mingle: sync complete" in second.log


def test_inspect_reaches_every_worker(app, workers, notes, name):
    names = {worker.name for worker in workers}
    inspect = app.control.inspect(timeout=SECONDS, limit=2)
    assert inspect.ping() == {name: {"ok": "pong"} for name in names}
    queues = inspect.active_queues()
    assert {queue["name"] for one in queues.values() for queue in one} == {"work"}
    assert set(inspect.registered()) == names
    assert set(inspect.stats()) == names
    later = tasks.note.apply_async([name], countdown=60)

    def is_scheduled():
        items = [item for one in inspect.scheduled().values() for item in one]
        return later.id in {item["request"]["id"] for item in items}

    eventually(is_scheduled, timeout=SECONDS)
    later.revoke()


def test_control_changes_what_workers_do(app, pool, workers, notes, name):
    control = {"reply": True, "timeout": SECONDS, "limit": 2}
    of_one = {**control, "limit": 1}
    replies = app.control.rate_limit("tests.integration.kombu.celery_app.add", "100/s", **control)
    assert [text for reply in replies for answer in reply.values() for text in answer] == ["ok"] * 2
    app.control.rate_limit("tests.integration.kombu.celery_app.add", "0", **control)
    replies = app.control.add_consumer(name, **control)
    assert len(replies) == 2
    tasks.note.apply_async([name], queue=name).get(SECONDS)
    assert len(notes.of(name)) == 1
    replies = app.control.cancel_consumer(name, **control)
    assert len(replies) == 2
    if pool == "prefork":
        first = workers[0].name
        app.control.pool_grow(1, destination=[first], **of_one)
        inspect = app.control.inspect([first], limit=1, timeout=SECONDS)
        eventually(lambda: len(inspect.stats()[first]["pool"]["processes"]) == 3, timeout=SECONDS)
        app.control.pool_shrink(1, destination=[first], **of_one)


def test_events_tell_the_life_of_a_task(app, name):
    seen = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context() as (its_connection, _, _):
            result = tasks.note.delay(name)

            def life():
                with contextlib.suppress(TimeoutError):
                    its_connection.drain_events(timeout=0.2)
                return {event["type"] for event in seen if event.get("uuid") == result.id}

            wanted = {"task-sent", "task-received", "task-started", "task-succeeded"}
            eventually(lambda: life() >= wanted, timeout=SECONDS)
