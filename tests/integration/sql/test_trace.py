"""A batch of one follows the flow that seed 003 describes, step by step."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event, text

from conquiet import Router
from conquiet.acking import Acking
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection, statement_queue
from conquiet.testing import message


@pytest.fixture
def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: statements by SQLAlchemy, by the driver and by libpq."""
    noted: list[str] = []

    def note(statement: Any) -> None:
        words = str(statement).split()
        noted.append(" ".join(words[:3] if words[0] == "INSERT" else words[:2]).upper())

    execute = psycopg.Cursor.execute

    def noting_execute(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        note(query)
        return execute(self, query, *arguments, **options)

    add = statement_queue.Exchange._add

    def noting_add(self: Any, statements: Any) -> None:
        found = list(statements)
        for one in found:
            note(one.text.decode())
        add(self, found)

    if engine.name == "postgresql":
        monkeypatch.setattr(psycopg.Cursor, "execute", noting_execute)
        monkeypatch.setattr(statement_queue.Exchange, "_add", noting_add)
    else:
        event.listen(
            engine, "before_cursor_execute", lambda c, cursor, statement, p, x, m: note(statement)
        )
        event.listen(engine, "commit", lambda c: noted.append("COMMIT"))
    event.listen(engine, "rollback", lambda c: noted.append("ROLLBACK"))
    return noted


def process(engine: Engine, steps: list[str], *, fails: bool = False) -> None:
    router = Router()
    # Relays are told from another thread, at any time: no step of this flow.
    router.use(Transaction(engine), Inbox("billing"), Outbox("orders", notify=False))

    @router.raw(name="place_order", source="/orders")
    def place_order(item: Message[Any]) -> list[Message[Any]]:
        steps.append("handler")
        with connection(engine) as found:
            found.execute(text("INSERT INTO orders (id) VALUES ('o-1')"))
        if fails:
            raise ZeroDivisionError
        return [Message(b"{}", {"type": "order.placed"})]

    before = len(steps)
    router.start()
    del steps[before:]  # the start looks for the tables
    item = message(id="abc-123")
    item.acking = Acking.calling(lambda: steps.append("ack"), lambda error: steps.append("nack"))
    router.process([item])


def begun(engine: Engine) -> str:
    return "BEGIN" if engine.name == "postgresql" else "BEGIN IMMEDIATE"


def test_a_new_message_takes_the_steps_of_the_seed(engine: Engine, steps: list[str]) -> None:
    process(engine, steps)
    assert steps == [
        begun(engine),
        "INSERT INTO PROCESSED_MESSAGES",
        "handler",
        "INSERT INTO ORDERS",
        "INSERT INTO OUTBOX",
        "COMMIT",
        "ack",
    ]


def test_a_duplicate_is_skipped_committed_and_acked(engine: Engine, steps: list[str]) -> None:
    process(engine, steps)
    steps.clear()
    process(engine, steps)
    assert steps == [begun(engine), "INSERT INTO PROCESSED_MESSAGES", "COMMIT", "ack"]


def test_a_failing_handler_is_rolled_back_and_nacked(engine: Engine, steps: list[str]) -> None:
    process(engine, steps, fails=True)
    assert steps == [
        begun(engine),
        "INSERT INTO PROCESSED_MESSAGES",
        "handler",
        "INSERT INTO ORDERS",
        "ROLLBACK",
        "nack",
    ]
