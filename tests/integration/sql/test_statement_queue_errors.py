"""Queued statements: their errors are told to whom they belong, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Column, Engine, MetaData, Table, Text, event, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, IntegrityError
from tests.integration.sql.queueing import (
    DOCUMENTS,
    METADATA,
    ORDERS,
    SAVE,
    UPSERT,
    amounts,
    run,
)
from tests.waiting import eventually

from conquiet import Router, Worker
from conquiet.errors import HandlerError
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.sql import Inbox, Outbox, Transaction, connection
from conquiet.testing import deliver, message


def test_an_error_surfaces_before_commit_as_that_of_its_message(postgres: Engine) -> None:
    def save_twice(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "a"})

    [error] = run(postgres, save_twice).errors
    assert isinstance(error, IntegrityError)
    assert "orders_pkey" in str(error)
    assert amounts(postgres) == {}


def test_an_error_in_a_batch_is_blamed_on_its_message_alone(postgres: Engine) -> None:
    router = Router()
    router.use(Transaction(postgres), Inbox("test"), Outbox("orders"))

    @router.raw(name="handler", source="/test")
    def handler(item: Message[Any]) -> list[Message[Any]]:
        with connection(postgres) as found:
            found.execute(SAVE, {"id": item.subject})
        return [Message(b"", {"type": "done"})]

    names = ["a", "b", "a", "c"]
    batch = [message(id=str(n), subject=name) for n, name in enumerate(names)]
    delivered = deliver(router, *batch)
    assert [item.id for item in delivered.acked] == ["0", "1", "3"]
    assert isinstance(delivered.errors[0], IntegrityError)
    assert sorted(amounts(postgres)) == ["a", "b", "c"]
    with postgres.connect() as looking:
        assert looking.execute(text("SELECT count(*) FROM outbox")).scalar() == 3


def test_an_error_that_a_read_raises_names_the_queued_statement(postgres: Engine) -> None:
    def read_after(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "a"})
        found.execute(select(ORDERS))

    [error] = run(postgres, read_after).errors
    assert isinstance(error, IntegrityError)
    assert any("INSERT INTO orders" in note for note in error.orig.__notes__)  # type: ignore[union-attr]


def test_a_swallowed_error_of_a_queued_statement_is_found(postgres: Engine) -> None:
    def swallow(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "a"})
        try:
            found.execute(select(ORDERS))
        except DBAPIError:
            pass

    assert isinstance(run(postgres, swallow).errors[0], HandlerError)
    assert amounts(postgres) == {}


def test_an_error_in_a_savepoint_surfaces_there(postgres: Engine) -> None:
    def recover(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        try:
            with found.begin_nested():
                found.execute(SAVE, {"id": "a"})
        except IntegrityError:
            found.execute(SAVE, {"id": "b"})

    assert len(run(postgres, recover).acked) == 1
    assert sorted(amounts(postgres)) == ["a", "b"]


def test_a_value_that_cannot_be_sent_fails_its_message(postgres: Engine) -> None:
    [error] = run(postgres, lambda found: found.execute(SAVE, {"id": "a\0"})).errors
    assert isinstance(error, DBAPIError | psycopg.DataError)
    assert amounts(postgres) == {}


def test_a_deferred_constraint_still_fails_the_commit(postgres: Engine) -> None:
    with postgres.begin() as prepared:
        prepared.execute(
            text("CREATE TABLE lines (o text REFERENCES orders DEFERRABLE INITIALLY DEFERRED)")
        )
    lines = Table("lines", MetaData(), Column("o", Text))
    [error] = run(postgres, lambda found: found.execute(insert(lines), {"o": "none"})).errors
    assert isinstance(error, IntegrityError)


def test_a_connection_lost_while_statements_wait_is_replaced(postgres: Engine) -> None:
    tries: list[int] = []

    def kill(found: Any) -> None:
        pid = found.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        found.execute(SAVE, {"id": "a"})
        tries.append(1)
        if len(tries) == 1:
            with postgres.connect() as other:
                other.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))

    assert len(run(postgres, kill).acked) == 1
    assert (len(tries), list(amounts(postgres))) == (2, ["a"])


def test_an_error_that_a_savepoint_took_care_of_is_not_blamed_for_a_lost_connection(
    postgres: Engine,
) -> None:
    tries: list[int] = []

    def kill(found: Any) -> None:
        pid = found.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        found.execute(SAVE, {"id": "a"})
        with suppress(IntegrityError), found.begin_nested():
            found.execute(SAVE, {"id": "a"})
        found.execute(SAVE, {"id": "b"})
        tries.append(1)
        if len(tries) == 1:
            with postgres.connect() as other:
                other.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))

    assert len(run(postgres, kill).acked) == 1
    assert (len(tries), sorted(amounts(postgres))) == (2, ["a", "b"])


# --- nothing is lost ------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 50])
@pytest.mark.parametrize("queued", [True, False])
def test_inbox_without_outbox_stores_every_effect(
    postgres: Engine, batch_size: int, queued: bool
) -> None:
    count = 100
    commands = Log()
    commands.append([message(str(number % count), id=str(number)) for number in range(count)] * 2)
    router = Router()
    router.use(Transaction(postgres, queue_statements=queued), Inbox("billing"))

    @router.raw(source="/shop", type="test")
    def handle(item: Message[Any]) -> None:
        with connection(postgres) as found:
            found.execute(UPSERT, {"id": item.id, "amount": 0})

    worker = Worker(commands.source("billing"), router, batch_size=batch_size, threads=2)
    worker.start()
    try:
        eventually(lambda: not commands.unsettled("billing"), timeout=60)
    finally:
        worker.stop(10)
    assert amounts(postgres) == {str(number): 0 for number in range(count)}


def in_transaction(engine: Engine, handle: Callable[[Any], object]) -> None:
    with Transaction(engine).scope(()), connection(engine) as found:
        handle(found)


@pytest.mark.parametrize("queued", [False, True])
def test_a_value_that_the_driver_refuses_fails_its_own_call_as_without_a_queue(
    postgres: Engine, queued: bool
) -> None:
    with Transaction(postgres, queue_statements=queued).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        for name in ("a", "nul\0", "b"):
            with pytest.raises(DBAPIError) if "\0" in name else nullcontext():
                found.execute(SAVE, {"id": name})
    assert sorted(amounts(postgres)) == ["a", "b"]


@pytest.mark.parametrize("held", [False, True])
def test_an_error_in_the_middle_of_the_queue_loses_no_neighbour_silently(
    postgres: Engine, held: bool
) -> None:
    kept: list[Any] = []

    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        for name in ("a", "b", "a", "c", "d"):
            result = found.execute(SAVE, {"id": name})
            if held:
                kept.append(result)
        with suppress(DBAPIError):
            found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "e"})

    with pytest.raises((HandlerError, DBAPIError), match=r"queued statement failed|aborted"):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


def test_an_error_that_was_caught_with_a_row_count_is_not_forgotten(postgres: Engine) -> None:
    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
        last = found.execute(SAVE, {"id": "a"})
        with suppress(psycopg.Error):
            last.rowcount  # noqa: B018 - it waits

    with pytest.raises(HandlerError, match="queued statement failed"):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


def test_an_error_names_the_statement_that_failed_and_no_other(postgres: Engine) -> None:
    METADATA.create_all(postgres, [DOCUMENTS])

    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        for _ in range(2):  # statements that come back after others have a name in PostgreSQL
            found.execute(insert(DOCUMENTS), {"id": "1"})
            found.execute(SAVE, {"id": "a"})

    with pytest.raises(IntegrityError) as caught:
        in_transaction(postgres, handle)
    [note] = caught.value.orig.__notes__  # type: ignore[union-attr]
    assert "INSERT INTO orders" in note
    assert "documents" not in note
    with postgres.connect() as looking:
        assert looking.execute(text("SELECT count(*) FROM documents")).scalar() == 0
        names = looking.execute(text("SELECT name FROM pg_prepared_statements")).scalars()
        assert not [name for name in names if name.startswith("conquiet")]


def test_what_a_listener_adds_at_the_commit_is_committed(postgres: Engine) -> None:
    def add(ending: Any) -> None:
        ending.execute(SAVE, {"id": "at the commit"})

    event.listen(postgres, "commit", add)
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
    event.remove(postgres, "commit", add)
    assert sorted(amounts(postgres)) == ["a", "at the commit"]


def test_a_kept_cursor_queues_nothing_after_the_end(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        driver = found.connection.driver_connection
        cursor = driver.cursor()
        cursor.execute("INSERT INTO orders (id) VALUES ('a')")
    with psycopg.connect(driver.info.dsn) as other:
        assert other.execute("SELECT id FROM orders").fetchall() == [("a",)]
    with postgres.connect() as again:
        assert again.connection.driver_connection is driver
        again.execute(select(ORDERS))
        cursor.execute("INSERT INTO orders (id) VALUES ('b')")
        driver.commit()
    assert sorted(amounts(postgres)) == ["a", "b"]


def test_a_savepoint_of_the_driver_rolls_back_nothing_that_came_before_it(
    postgres: Engine,
) -> None:
    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "before"})
        driver = found.connection.driver_connection
        with suppress(psycopg.errors.DivisionByZero), driver.transaction():
            driver.execute("INSERT INTO orders (id) VALUES ('inside')")
            driver.execute("SELECT 1 / 0")
        found.execute(SAVE, {"id": "behind"})

    in_transaction(postgres, handle)
    assert sorted(amounts(postgres)) == ["before", "behind"]


def test_an_error_in_a_savepoint_of_the_driver_surfaces_there(postgres: Engine) -> None:
    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
        driver = found.connection.driver_connection
        cursor = driver.cursor()
        with pytest.raises(psycopg.errors.UniqueViolation), driver.transaction():
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", ("a",))

    in_transaction(postgres, handle)
    assert sorted(amounts(postgres)) == ["a"]


def test_a_savepoint_of_the_driver_as_the_first_statement_commits_nothing(
    postgres: Engine,
) -> None:
    def handle(found: Any) -> None:
        driver = found.connection.driver_connection
        with driver.transaction():
            driver.execute("INSERT INTO orders (id) VALUES ('a')")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_driver_that_ends_the_transaction_leaves_nothing_of_it(
    postgres: Engine, end: str
) -> None:
    """Else what was queued, or what follows, would be committed without the inbox's row."""

    def handle(found: Any) -> None:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "before"})
        getattr(found.connection, end)()
        found.execute(SAVE, {"id": "behind"})

    with pytest.raises(HandlerError, match=rf"{end}\(\) on the connection"):
        in_transaction(postgres, handle)
    assert amounts(postgres) == {}


def test_a_text_without_parameters_may_hold_a_percent_sign(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        plain = found.execution_options(no_parameters=True)
        plain.exec_driver_sql("INSERT INTO orders (id) VALUES ('50% off')")
    assert sorted(amounts(postgres)) == ["50% off"]
