"""The reference consumers run as they are written."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from examples.idempotent_consumer import Consumer
from sqlalchemy.orm import Session
from tests import zygote
from tests.integration.events.samples import filled, notification
from tests.waiting import eventually

from conquiet.errors import InvalidMessage
from conquiet.events import EventSource, Idempotency, emit, schema
from conquiet.events.check import check
from conquiet.message import Message
from conquiet.redis import StreamSink
from conquiet.sql import engine as make_engine
from marketplace.catalog import CATALOG, AdPaused, OrderCreated

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def published(sqlite_url: str, redis_client):
    """Emits an order and an ad, and publishes them as often as asked."""
    engine = make_engine(sqlite_url)
    schema.init(engine, CATALOG)
    order = CATALOG.event(filled(OrderCreated), aggregate_id=uuid.uuid4())
    ad = CATALOG.event(filled(AdPaused), aggregate_id=uuid.uuid4())
    with Session(engine) as session, session.begin():
        emit(session, order, ad)
    source = EventSource(engine, cloudevents=True)
    messages = source.read(10, 1.0)
    sink = StreamSink(redis_client)
    for _ in range(3):  # a relay that dies before it marks publishes again
        assert sink.publish_each(messages) == [None, None]
    sink.close()
    source.close()
    engine.dispose()
    return order


def test_the_reference_consumer_handles_duplicates_once_and_acks_them(
    published, redis_client
) -> None:
    consumer = Consumer(redis_client)
    assert consumer.run_once(5.0) == 6
    assert consumer.sent == ["7"]
    assert redis_client.xpending("domain-events", "notifications")["pending"] == 0
    consumer.source.close()


def test_the_reference_consumer_does_not_ack_what_is_in_progress_elsewhere(
    published, redis_client
) -> None:
    claim = Idempotency(redis_client).claim("notifications", published.id)
    consumer = Consumer(redis_client)
    consumer.run_once(5.0)
    assert consumer.sent == []
    assert redis_client.xpending("domain-events", "notifications")["pending"] == 3
    claim.release()
    eventually(lambda: consumer.run_once(0.1) and consumer.sent == ["7"])
    consumer.source.close()


def test_the_reference_consumer_gives_back_what_failed(published, redis_client) -> None:
    consumer = Consumer(redis_client)
    real, consumer.notify = consumer.notify, lambda data: 1 / 0
    consumer.run_once(5.0)
    consumer.notify = real
    eventually(lambda: consumer.run_once(0.1) and consumer.sent == ["7"])
    consumer.source.close()


def test_the_reference_consumer_outlives_its_redis_and_ends_when_told(private_redis) -> None:
    stopping = threading.Event()
    order = CATALOG.event(filled(OrderCreated), aggregate_id=uuid.uuid4())
    message = Message(
        check(order).payload_json.encode(),
        {"id": str(order.id), "type": "order_created", "source": "/test"},
        topic="domain-events",
    )
    with redis.Redis.from_url(private_redis.url) as client:
        consumer = Consumer(client)
        thread = threading.Thread(target=consumer.run, args=(stopping,))
        thread.start()
        try:
            private_redis.kill()
            private_redis.restart()
            with (
                redis.Redis.from_url(private_redis.url) as other,
                closing(StreamSink(other)) as sink,
            ):
                assert sink.publish_each([message]) == [None]
            assert eventually(lambda: consumer.sent == ["7"], timeout=20)
        finally:
            stopping.set()
            thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_reference_consumer_ends_at_a_signal_without_a_word_too_many(
    published, redis_url: str, redis_client, number: int
) -> None:
    process = zygote.Popen(
        [sys.executable, ROOT / "examples" / "idempotent_consumer.py"],
        env={**os.environ, "REDIS_URL": redis_url},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        key = f"pf:evt:processed:notifications:{published.id}"
        assert eventually(lambda: redis_client.exists(key), timeout=30)
        process.send_signal(number)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in said


@pytest.fixture
def _logs_as_before() -> Iterator[None]:
    """A Celery worker in this process sets up the logs of all of it."""
    root, disabled = logging.getLogger(), logging.root.manager.disable
    handlers, level = list(root.handlers), root.level
    loggers = [
        item for item in root.manager.loggerDict.values() if isinstance(item, logging.Logger)
    ]
    states = [(item, item.level, item.propagate, item.disabled) for item in loggers]
    yield
    root.handlers[:], root.manager.disable = handlers, disabled
    root.setLevel(level)
    for item, level, item.propagate, item.disabled in states:
        item.setLevel(level)


@pytest.mark.usefixtures("_logs_as_before")
@pytest.mark.filterwarnings("default")  # of Celery's own
def test_the_celery_task_handles_duplicates_once(redis_url: str, monkeypatch) -> None:
    celery = pytest.importorskip("celery")
    from celery.contrib.testing.worker import start_worker
    from examples import idempotent_celery as example

    assert celery
    monkeypatch.setenv("REDIS_URL", redis_url)
    example.idempotency.cache_clear()
    example.sent.clear()
    example.app.conf.broker_url = "memory://"
    event = notification()
    payload = check(event).payload_json
    other = check(notification()).payload_json
    with start_worker(example.app, pool="threads", concurrency=4, perform_ping_check=False):
        for sent in (payload, payload, other, payload):
            example.notify.delay(event.event_type, sent)
        eventually(lambda: len(example.sent) == 2, timeout=30)
        with redis.Redis.from_url(redis_url) as client:
            keys = client.keys("pf:evt:processed:notifications:*")
            eventually(lambda: {client.get(key)[:5] for key in keys} == {b"done:"})
    assert example.sent == ["NotificationRequested"] * 2
    assert len(keys) == 2


def test_the_celery_task_is_tried_again_until_its_handler_succeeds(
    redis_url: str, monkeypatch
) -> None:
    pytest.importorskip("celery")
    from examples import idempotent_celery as example

    monkeypatch.setenv("REDIS_URL", redis_url)
    example.idempotency.cache_clear()
    calls = []

    def fails_twice(data: object) -> None:
        calls.append(data)
        if len(calls) < 3:
            raise RuntimeError("the mail server is away")

    monkeypatch.setattr(example, "send", fails_twice)
    event = notification()
    for _ in range(2):  # a duplicate, too
        example.notify.apply([event.event_type, check(event).payload_json])
    assert len(calls) == 3
    refused = example.notify.apply([event.event_type, "{}"])
    assert refused.failed()
    assert isinstance(refused.result, InvalidMessage)


@pytest.mark.slow
@pytest.mark.usefixtures("_logs_as_before")
@pytest.mark.filterwarnings("default")  # of Celery's own
def test_the_celery_task_is_tried_again_when_its_handler_fails(redis_url: str, monkeypatch) -> None:
    pytest.importorskip("celery")
    from celery.contrib.testing.worker import start_worker
    from examples import idempotent_celery as example

    monkeypatch.setenv("REDIS_URL", redis_url)
    example.idempotency.cache_clear()
    example.sent.clear()
    example.app.conf.broker_url = "memory://"
    real, calls = example.send, []

    def fails_once(data: object) -> None:
        calls.append(data)
        if len(calls) == 1:
            raise RuntimeError("the mail server is away")
        real(data)

    monkeypatch.setattr(example, "send", fails_once)
    event = notification()
    with start_worker(example.app, pool="threads", concurrency=1, perform_ping_check=False):
        example.notify.delay(event.event_type, check(event).payload_json)
        assert eventually(lambda: example.sent == ["NotificationRequested"], timeout=30)
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Celery's own
def test_celery_workers_on_redis_share_the_tasks_and_handle_duplicates_once(
    redis_url: str, redis_client, tmp_path: Path
) -> None:
    celery = pytest.importorskip("celery")
    command = [sys.executable, "-m", "celery", "-A", "examples.idempotent_celery", "worker"]
    command += ["--pool", "solo", "--loglevel", "INFO", "--without-mingle", "--without-gossip"]
    environment = {**os.environ, "REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    started = []
    for log in logs:
        with log.open("w") as said:
            named = [*command, "--hostname", log.stem]
            started.append(zygote.Popen(named, cwd=ROOT, env=environment, stderr=said))
    try:
        events = [notification() for _ in range(5)]
        with celery.Celery(broker=redis_url) as producer:
            for _ in range(3):
                for event in events:
                    arguments = [event.event_type, check(event).payload_json]
                    producer.send_task("notify", arguments, ignore_result=True)
        eventually(lambda: _count(logs, "succeeded in") == 15, timeout=60)
    finally:
        for process in started:
            process.terminate()
            process.wait(30)
    assert _count(logs, "sent NotificationRequested") == 5
    assert len(redis_client.keys("pf:evt:processed:notifications:*")) == 5


def _count(logs: list[Path], what: str) -> int:
    return sum(log.read_text().count(what) for log in logs)
