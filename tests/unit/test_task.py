"""Celery tasks in an outbox: what is stored, what the relay sends by Celery, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu.pools
import pytest
from celery import Celery, group
from celery.canvas import Signature
from sqlalchemy import text
from sqlalchemy.orm import Session

from conquiet import App, Message
from conquiet.errors import ConfigError, InvalidMessage, SinkUnavailable
from conquiet.memory import Log, LogSink
from conquiet.registry import open_sink
from conquiet.relay.sinks import CelerySink, Refused
from conquiet.sink import collect_answers
from conquiet.sql import Outbox
from conquiet.task import KIND, pack_task
from conquiet.testing import eventually


@dataclass
class OrderPlaced:
    id: str


@pytest.fixture
def celery() -> Iterator[Celery]:
    made = Celery("shop", broker=f"memory://{uuid4().hex}", set_as_current=False)
    made.conf.task_routes = {"mail": {"queue": "slow", "priority": 3}}

    @made.task(name="ship", shared=False)
    def ship(order: str, at: Any = None) -> None: ...

    @made.task(name="mail", shared=False)
    def mail(to: str) -> None: ...

    yield made
    made.close()
    kombu.pools.reset()


@pytest.fixture
def app(tmp_path: Path, celery: Celery) -> Iterator[App]:
    made = App("shop", f"sqlite:///{tmp_path}/shop.db", celery=celery)
    made.create_tables()
    yield made
    made.close()
    made.engine.dispose()


def sent(celery: Celery, queue: str = "celery") -> list[Any]:
    """Take the messages of a queue, as a Celery worker would read them."""
    with celery.connection_for_read() as connection, connection.SimpleQueue(queue) as waiting:
        found = []
        while waiting.qsize():
            found.append(waiting.get(block=False))
            found[-1].ack()
        return found


def relay(app: App) -> int:
    made = app.relay()
    assert made is not None
    outcome = made.run_once(5)
    made.source.close()
    made.sink.close()
    assert outcome.outage is None
    return outcome.published


def test_a_task_is_sent_if_its_transaction_commits_and_only_then(app: App, celery: Celery) -> None:
    ship = celery.tasks["ship"]
    with app.sessions() as session:
        app.emit(session, ship.s("lost"))
        session.rollback()
    with app.sessions.begin() as session:
        [id] = app.emit(session, ship.s("o-1", at=datetime(2026, 1, 1, tzinfo=UTC)))
    assert sent(celery) == []
    assert relay(app) == 1
    [message] = sent(celery)
    args, kwargs, _ = message.decode()
    assert (args, kwargs) == (["o-1"], {"at": datetime(2026, 1, 1, tzinfo=UTC)})
    assert message.headers["task"] == "ship"
    assert message.headers["id"] == message.properties["correlation_id"] == id


def test_celery_routes_the_task_and_keeps_its_options(app: App, celery: Celery) -> None:
    ship, mail = celery.tasks["ship"], celery.tasks["mail"]
    before = datetime.now(UTC)
    with app.sessions.begin() as session:
        app.emit(session, mail.s("a@example.com"))
        app.emit(session, mail.s("b@example.com").set(queue="fast", headers={"tenant": "7"}))
        app.emit(
            session, ship.s("o-1").set(countdown=60, expires=90, priority=9, link=mail.si("c"))
        )
    after = datetime.now(UTC)
    relay(app)
    [routed] = sent(celery, "slow")
    assert routed.properties["priority"] == 3
    [chosen] = sent(celery, "fast")
    assert chosen.headers["tenant"] == "7"
    [late] = sent(celery)
    assert late.properties["priority"] == 9
    eta = datetime.fromisoformat(late.headers["eta"])
    assert before <= eta - timedelta(seconds=60) <= after  # from the emit, not from the relay
    expires = datetime.fromisoformat(late.headers["expires"])
    assert before <= expires - timedelta(seconds=90) <= after
    [link] = late.decode()[2]["callbacks"]
    assert link["task"] == "mail"


def test_a_task_that_a_handler_returns_is_stored_once(app: App, celery: Celery) -> None:
    @app.on
    def on_placed(placed: OrderPlaced, session: Session) -> Signature:
        return celery.tasks["ship"].s(placed.id)

    with app.test() as shop:
        shop.send(OrderPlaced("o-1"))
        assert shop.redeliver() == 0
        [task] = [message for message in shop.outbox if message.topic == "shop.tasks"]
        assert task.data["args"] == ["o-1"]


def test_the_id_of_a_task_may_be_chosen(app: App, celery: Celery) -> None:
    with app.sessions.begin() as session:
        assert app.emit(session, celery.tasks["ship"].s("o-1").set(task_id="t-1")) == ["t-1"]
        assert app.emit(session, celery.tasks["ship"].s("o-2"), id="t-2") == ["t-2"]


def test_a_relay_that_dies_before_the_mark_sends_the_task_again_with_its_id(
    app: App, celery: Celery
) -> None:
    with app.sessions.begin() as session:
        [id] = app.emit(session, celery.tasks["ship"].s("o-1"))
    dying = app.relay()
    assert dying is not None
    [message] = dying.source.read(10, 5)
    dying.sink.publish([message])  # and no ack
    dying.source.close()
    assert relay(app) == 1
    assert [each.headers["id"] for each in sent(celery)] == [id, id]


def test_an_outbox_without_an_app_takes_tasks(app: App, celery: Celery) -> None:
    outbox = Outbox("orders", source="/orders")
    with app.sessions.begin() as session:
        outbox.add(session, [OrderPlaced("o-1"), celery.tasks["ship"].s("o-1")])
    with app.engine.connect() as connection:
        rows = connection.execute(text("SELECT topic, event_type FROM outbox ORDER BY id")).all()
    assert [tuple(row) for row in rows] == [("orders", "order.placed"), ("orders.tasks", "ship")]


def test_the_sink_opens_by_url(celery: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.test_task.application", celery, raising=False)
    sink = open_sink("celery:tests.unit.test_task:application?timeout=5")
    assert isinstance(sink, CelerySink)
    assert sink.app is celery
    sink.check()
    with pytest.raises(ConfigError, match="unknown setting 'queue'"):
        open_sink("celery:tests.unit.test_task:application?queue=x")
    with pytest.raises(ConfigError, match="no Celery application"):
        open_sink("celery:json:dumps")


def task_message(data: dict[str, Any], id: str = "t-1") -> Message[bytes]:
    attributes = {"id": id, "type": data["task"], "source": "/shop", "kind": KIND}
    return Message(json.dumps(data).encode(), attributes)


def test_a_task_that_celery_refuses_does_not_stop_the_others(celery: Celery) -> None:
    wrong = task_message({"task": "ship", "args": [], "kwargs": {"color": "red"}, "options": {}})
    good = task_message({"task": "ship", "args": ["o-1"], "kwargs": {}, "options": {}}, "t-2")
    other = Message(b"{}", {"id": "e-1", "type": "order.placed", "source": "/shop"})
    sink = CelerySink(celery)
    refused, done, no_task = sink.publish_each([wrong, good, other])
    sink.close()
    assert isinstance(refused, Refused)
    assert "unexpected keyword argument 'color'" in str(refused)
    assert done is None
    assert isinstance(no_task, InvalidMessage)
    assert [each.headers["id"] for each in sent(celery)] == ["t-2"]


def test_a_broker_that_does_not_answer_is_an_outage() -> None:
    celery = Celery("shop", broker="amqp://127.0.0.1:1//", set_as_current=False)
    sink = CelerySink(celery, timeout=1)
    with pytest.raises(SinkUnavailable, match="broker of Celery"):
        sink.publish_each([task_message({"task": "ship"})])
    with pytest.raises(SinkUnavailable):
        sink.check()


def test_what_cannot_be_kept_is_refused_at_once(app: App, celery: Celery, tmp_path: Path) -> None:
    ship = celery.tasks["ship"]
    plain = App("plain", f"sqlite:///{tmp_path}/plain.db")
    with app.sessions() as session:
        with pytest.raises(ConfigError, match="a group sends several messages"):
            app.emit(session, group(ship.s("o-1"), ship.s("o-2")))
        with pytest.raises(ConfigError, match="must be JSON"):
            app.emit(session, ship.s(object()))
        with pytest.raises(ConfigError, match=r"App\(…, celery=…\)"):
            plain.emit(session, ship.s("o-1"))
    with pytest.raises(ConfigError, match=r"apply_async\(\)"):
        app.send(ship.s("o-1"))
    celery.conf.task_always_eager = True
    with pytest.raises(ConfigError, match="task_always_eager"):
        app.relay()
    plain.engine.dispose()


def test_a_sink_of_events_gets_no_task(celery: Celery) -> None:
    task = pack_task(Message(celery.tasks["ship"].s("o-1")), "/shop")
    events = [Message({}, {"id": id, "type": "placed", "source": "/shop"}) for id in ("a", "b")]
    log = Log()
    sink = LogSink(log, "orders")
    first, refused, last = collect_answers(sink, [events[0], task, events[1]])
    assert (first, last) == (None, None)
    assert isinstance(refused, Refused)
    assert "celery:MODULE:NAME" in str(refused)
    assert [message.id for message in log.replay()] == ["a", "b"]


def test_an_app_that_runs_sends_the_tasks_of_its_handlers(app: App, celery: Celery) -> None:
    @app.on
    def on_placed(placed: OrderPlaced) -> list[Any]:
        return [celery.tasks["ship"].s(placed.id)]

    running = app.open()
    running.start()
    app.send(OrderPlaced("o-1"))
    found: list[Any] = []

    def arrives() -> bool:
        found.extend(sent(celery))
        return bool(found)

    eventually(arrives)
    assert running.stop()
    assert found[0].decode()[0] == ["o-1"]
