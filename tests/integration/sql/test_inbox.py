"""Inbox in SQL: one statement per batch, no duplicate-key errors, no deadlocks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text

from conquiet import Router
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection
from conquiet.testing import Delivered, deliver, message


def router_of(engine: Engine, runs: list[str], *, inbox: str = "test", **options: Any) -> Router:
    router = Router()
    router.use(Transaction(engine, **options), Inbox(inbox), Outbox("orders"))

    @router.raw(name="handler")
    def handle(item: Message[Any]) -> None:
        runs.append(item.id)

    return router


def test_a_duplicate_is_acked_and_the_transaction_commits(engine: Engine) -> None:
    runs: list[str] = []
    router = router_of(engine, runs)
    first = deliver(router, message(id="a"))
    again = deliver(router, message(id="a"), message(id="b"))
    assert [len(first.acked), len(again.acked)] == [1, 2]
    assert runs == ["a", "b"]


def test_a_row_holds_subscriber_handler_source_and_id(engine: Engine) -> None:
    deliver(router_of(engine, []), message(id="a", source="/shop"))
    with engine.connect() as looking:
        row = looking.execute(text("SELECT * FROM processed_messages")).one()
    assert tuple(row)[:2] == ("test/handler", "/shop a")
    assert row.created_at is not None


@pytest.mark.parametrize("size", [1, 400, 5000])
def test_a_batch_of_any_size_is_one_statement(engine: Engine, size: int) -> None:
    inbox = Inbox("test")
    entries = [("test", f"/s {number}") for number in range(size)]
    with Transaction(engine).scope(()):
        assert set(inbox.remember(entries[::2])) == set(entries[::2])
        assert set(inbox.remember(entries)) == set(entries[1::2])
        assert list(inbox.remember(entries)) == []


@pytest.mark.parametrize(
    "attributes",
    [{"id": "a\0b"}, {"source": "/s\0"}, {"id": "x" * 2001}, {"id": "\ud800"}, {"id": "ü" * 1100}],
)
def test_an_id_that_no_row_can_hold_fails_for_good(
    engine: Engine, attributes: dict[str, str]
) -> None:
    delivered = deliver(router_of(engine, []), message(**attributes), message(id="good"))
    assert [item.id for item in delivered.acked] == ["good"]
    assert isinstance(delivered.errors[0], InvalidMessage)


def test_an_id_of_the_greatest_length_fits(engine: Engine) -> None:
    long = "".join(chr(33 + (number * 7919) % 90) for number in range(1994))
    assert len(deliver(router_of(engine, []), message(id=long, source="/test")).acked) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_concurrent_duplicate_under_a_snapshot_is_a_retryable_error(
    postgres: Engine, level: Any
) -> None:
    """The second has its snapshot before the first commits, and then meets its row."""
    inside, go = threading.Event(), threading.Event()
    second = Transaction(postgres, isolation_level=level)

    def first() -> None:
        with Transaction(postgres).scope(()):
            Inbox("test").remember([("test", "a")])
            inside.set()
            go.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)

    def duplicate() -> None:
        with second.scope(()), connection(postgres) as found:
            found.exec_driver_sql("SELECT count(*) FROM processed_messages")  # takes the snapshot
            go.set()
            thread.join(20)
            Inbox("test").remember([("test", "a")])

    with pytest.raises(StoreError):
        duplicate()


def test_two_workers_with_the_same_messages_in_opposite_order_do_not_deadlock(
    postgres: Engine,
) -> None:
    runs: list[str] = []
    results: list[Delivered] = []
    batch = [f"m-{number}" for number in range(300)]

    def work(names: list[str]) -> None:
        router = router_of(postgres, runs)
        results.append(deliver(router, *(message(id=name) for name in names)))

    threads = [threading.Thread(target=work, args=(names,)) for names in (batch, batch[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(delivered.acked) for delivered in results] == [300, 300]
    assert sorted(runs) == sorted(batch)


def test_rows_are_locked_in_one_order_whatever_the_order_of_the_batch(postgres: Engine) -> None:
    entries = [("billing", f"m-{number}") for number in (3, 1, 2)]
    with Transaction(postgres).scope(()):
        Inbox("billing").remember(entries)
    with postgres.connect() as looking:
        found = looking.execute(text("SELECT message_id FROM processed_messages ORDER BY ctid"))
        assert found.scalars().all() == ["m-1", "m-2", "m-3"]


@pytest.mark.parametrize("name", ['x"; DROP TABLE x', "Upper", "a.b.c", "a" * 49, "", "a b"])
def test_names_that_would_need_quoting_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="table name"):
        Inbox("test", table=name)
    with pytest.raises(ConfigError, match="table name"):
        Outbox("orders", table=name)
