"""Transaction: what is committed and what is not, and its options."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import sessionmaker
from tests.integration.sql.orders import Order, remembered, run, save, saved

from conquiet import Message, Router
from conquiet.errors import ConfigError, GivenBack, HandlerError, StoreError
from conquiet.sql import Inbox, Outbox, Transaction, connection, session
from conquiet.sql import engine as make_engine
from conquiet.testing import deliver, message

# --- what is swallowed is not committed ---------------------------------------------------


def test_a_swallowed_sql_error_is_found_before_commit(postgres: Engine) -> None:
    def swallow() -> None:
        save(postgres, "a")
        try:
            save(postgres, "a")
        except IntegrityError:
            pass

    delivered = run(postgres, swallow)
    assert isinstance(delivered.errors[0], HandlerError)
    assert "duplicate key" in str(delivered.errors[0])
    assert (saved(postgres), remembered(postgres)) == ([], 0)


def test_an_error_swallowed_in_a_savepoint_harms_nobody(engine: Engine) -> None:
    def recover() -> None:
        save(engine, "a")
        with connection(engine) as found:
            try:
                with found.begin_nested():
                    save(engine, "a")
            except IntegrityError:
                save(engine, "b")

    assert len(run(engine, recover).acked) == 1
    assert saved(engine) == ["a", "b"]


def test_a_failed_flush_that_is_swallowed_is_found_before_commit(engine: Engine) -> None:
    factory = sessionmaker(engine)

    def swallow() -> None:
        save(engine, "a")
        try:
            with session(factory) as joined:
                joined.add(Order(id="a"))
        except IntegrityError:
            pass

    # Where the flush was queued, it fails at the commit, and there was nothing to swallow.
    assert isinstance(run(engine, swallow).errors[0], HandlerError | IntegrityError)
    assert saved(engine) == []


@pytest.mark.parametrize(
    "statement",
    [
        *("COMMIT", "commit work;", "ROLLBACK", "end", "ABORT", "begin", "Start  Transaction"),
        *("PREPARE TRANSACTION 'x'", "-- done\n/* really */ ;COMMIT", "COMMIT AND CHAIN"),
    ],
)
@pytest.mark.parametrize("queued", [True, False])
def test_statements_that_end_the_transaction_are_refused_before_they_are_sent(
    engine: Engine, statement: str, queued: bool
) -> None:
    factory = sessionmaker(engine)
    ways = [
        lambda found: found.exec_driver_sql(statement),
        lambda found: found.execute(text(statement)),
        lambda found: found.scalar(text(statement)),
    ]
    word = statement.split()[-1 if "--" in statement else 0].strip(";").upper()
    with Transaction(engine, queue_statements=queued).scope(()), connection(engine) as found:
        save(engine, "a")
        for way in ways:
            with pytest.raises(HandlerError, match=word):
                way(found)
        with session(factory) as joined, pytest.raises(HandlerError, match=word):
            joined.execute(text(statement))
        assert saved(engine) == []  # another connection does not see it: nothing was committed
        save(engine, "b")
    assert saved(engine) == ["a", "b"]


def test_a_handler_that_commits_by_text_leaves_nothing(engine: Engine) -> None:
    def end() -> None:
        save(engine, "a")
        with connection(engine) as found:
            found.exec_driver_sql("COMMIT")

    assert isinstance(run(engine, end).errors[0], HandlerError)
    assert (saved(engine), remembered(engine)) == ([], 0)


def test_a_cursor_of_the_driver_refuses_to_commit_too(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        save(postgres, "a")
        driver = found.connection.driver_connection
        with pytest.raises(HandlerError, match="COMMIT"):
            driver.execute("COMMIT")
        assert saved(postgres) == []


@pytest.mark.parametrize(
    "statement",
    [
        *("ROLLBACK TO SAVEPOINT mine", "rollback work to mine", "ROLLBACK TO mine"),
        *("PREPARE transactions AS SELECT 1", "SELECT 1 AS commit", "/* COMMIT */ SELECT 1"),
    ],
)
def test_savepoints_and_words_that_only_look_alike_are_let_through(
    postgres: Engine, statement: str
) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(text("SAVEPOINT mine"))
        found.execute(text(statement))


def test_a_transaction_ended_by_the_driver_is_an_error(engine: Engine) -> None:
    def end() -> None:
        with connection(engine) as found:
            found.connection.driver_connection.commit()

    assert isinstance(run(engine, end).errors[0], HandlerError)


def test_sqlite_that_rolls_back_by_itself_is_noticed(sqlite: Engine) -> None:
    def conflict() -> None:
        save(sqlite, "a")
        with connection(sqlite) as found:
            try:
                found.exec_driver_sql("INSERT OR ROLLBACK INTO orders (id) VALUES ('a')")
            except IntegrityError:
                pass

    assert isinstance(run(sqlite, conflict).errors[0], HandlerError)
    assert (saved(sqlite), remembered(sqlite)) == ([], 0)


# --- options ----------------------------------------------------------------------------------


def test_isolation_level_and_read_only_reach_the_database(postgres: Engine) -> None:
    seen: list[Any] = []

    def look() -> None:
        with connection(postgres) as found:
            seen.append(found.exec_driver_sql("SHOW transaction_isolation").scalar())
            seen.append(found.exec_driver_sql("SHOW transaction_read_only").scalar())

    for options in ({"isolation_level": "SERIALIZABLE", "read_only": True}, {}):
        with Transaction(postgres, **options).scope(()):  # type: ignore[arg-type]
            look()
    assert seen == ["serializable", "on", "read committed", "off"]


def test_a_write_in_a_read_only_transaction_is_the_handlers_fault(engine: Engine) -> None:
    reading = Transaction(engine, read_only=True)
    with pytest.raises(Exception, match=r"read.?only") as raised, reading.scope(()):
        save(engine, "a")
    assert not isinstance(raised.value, StoreError)
    save(engine, "b")  # and the connection is as it was
    assert saved(engine) == ["b"]


def test_an_isolation_level_that_commits_by_itself_is_refused(database_url: str) -> None:
    with pytest.raises(ConfigError, match="isolation_level"):
        Transaction(database_url, isolation_level="AUTOCOMMIT")  # type: ignore[arg-type]
    engine = make_engine(database_url, isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigError, match="AUTOCOMMIT"), Transaction(engine).scope(()):
        pass
    engine.dispose()


def test_a_url_is_as_good_as_an_engine(sqlite_url: str) -> None:
    transaction = Transaction(sqlite_url)
    with transaction.scope(()), connection(transaction.engine) as found:
        assert found.exec_driver_sql("SELECT 1").scalar() == 1
    transaction.engine.dispose()


def test_an_engine_that_was_made_by_hand_works_as_well(sqlite: Engine) -> None:
    plain = create_engine(sqlite.url)
    assert len(run(plain, lambda: save(plain, "a")).acked) == 1
    assert isinstance(run(plain, lambda: [save(plain, "b"), 1 / 0]).errors[0], ZeroDivisionError)
    assert saved(plain) == ["a"]
    plain.dispose()


def test_sqlite_waits_for_the_writer_before_it_and_never_fails_to_upgrade(sqlite: Engine) -> None:
    """A transaction that reads first and writes then would get SQLITE_BUSY at once."""
    errors: list[object] = []

    def count_up() -> None:
        with connection(sqlite) as found:
            amount = found.execute(text("SELECT amount FROM orders WHERE id = 'a'")).scalar()
            found.execute(
                text("UPDATE orders SET amount = :n WHERE id = 'a'"), {"n": (amount or 0) + 1}
            )

    def work() -> None:
        for _ in range(20):
            errors.extend(run(sqlite, count_up).errors)

    save(sqlite, "a")
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with sqlite.connect() as looking:
        assert looking.execute(text("SELECT amount FROM orders")).scalar() == 60
    assert errors == []


def test_sqlite_writes_ahead(sqlite: Engine) -> None:
    with sqlite.connect() as looking:
        assert looking.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


# --- a savepoint per message -------------------------------------------------------------------


def isolating(engine: Engine, ran: list[str], **options: Any) -> Router:
    """A router that isolates messages; those called bad fail after they wrote."""
    router = Router(**options)
    router.use(Transaction(engine, isolate="savepoint"), Inbox("test"), Outbox("orders"))

    @router.raw(name="handler", source="/test")
    def handle(item: Message[Any]) -> list[Message[Any]]:
        ran.append(item.id)
        save(engine, item.id)
        if item.id.startswith("twice"):
            save(engine, item.id)
        if item.id.startswith("bad"):
            raise LookupError(item.id)
        return [Message(b"{}", {"type": "done", "subject": item.id})]

    return router


def stored(engine: Engine) -> list[str]:
    """The keys of the events in the outbox."""
    with engine.connect() as looking:
        return list(looking.execute(text("SELECT key FROM outbox ORDER BY id")).scalars())


def test_with_savepoints_only_the_failed_messages_are_undone_and_no_handler_runs_twice(
    engine: Engine,
) -> None:
    ran: list[str] = []
    names = ["a", "bad-1", "b", "twice", "c", "bad-2"]
    delivered = deliver(isolating(engine, ran), *(message(id=name) for name in names))
    assert ran == names
    assert [item.id for item in delivered.acked] == ["a", "b", "c"]
    assert [type(error) for error in delivered.errors] == [LookupError, IntegrityError, LookupError]
    assert saved(engine) == stored(engine) == ["a", "b", "c"]
    assert remembered(engine) == 3


def test_with_savepoints_a_failed_message_runs_again_with_its_next_delivery(
    engine: Engine,
) -> None:
    ran: list[str] = []
    router = isolating(engine, ran)
    deliver(router, message(id="a"), message(id="bad"))
    deliver(router, message(id="a"), message(id="bad"))
    assert ran == ["a", "bad", "bad"]


def test_with_savepoints_ordered_messages_wait_for_a_failed_one(engine: Engine) -> None:
    ran: list[str] = []
    batch = [message(id=name) for name in ("bad", "after", "other")]
    for item, key in zip(batch, "aab", strict=True):
        item.order_key = key
    delivered = deliver(isolating(engine, ran), *batch)
    assert ran == ["bad", "other"]
    assert isinstance(delivered.errors[1], GivenBack)


def test_an_unknown_isolation_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="batch, savepoint"):
        Transaction(engine, isolate="row")  # type: ignore[arg-type]


# --- settings of one message -------------------------------------------------------------------


@pytest.mark.parametrize("isolate", ["batch", "savepoint"])
@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize(
    "statement",
    ["SET LOCAL app.tenant = 't-1'", "select SET_CONFIG ('app.tenant', 't-1', true)"],
)
def test_a_local_setting_of_one_message_does_not_hold_for_its_neighbours(
    postgres: Engine, isolate: Any, swallow: bool, statement: str
) -> None:
    seen: list[str] = []
    router = Router()
    router.use(Transaction(postgres, isolate=isolate), Inbox("test"), Outbox("orders"))

    @router.raw(name="handler")
    def handle(item: Message[Any]) -> None:
        with connection(postgres) as found:
            tenant = found.exec_driver_sql("SELECT current_setting('app.tenant', true)").scalar()
            seen.append(tenant or "")
            with suppress(Exception) if swallow else nullcontext():
                found.exec_driver_sql(statement)
            found.exec_driver_sql("INSERT INTO orders (id) VALUES (pg_current_xact_id()::text)")

    delivered = deliver(router, *(message(id=str(number)) for number in range(4)))
    assert len(delivered.acked) == 4
    assert set(seen) == {""}
    assert len(saved(postgres)) == 4  # each in a transaction of its own
    seen.clear()
    deliver(router, *(message(id=f"later-{number}") for number in range(4)))
    assert seen == [""] * 4  # without a first try as a batch
