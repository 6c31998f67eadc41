"""Queued statements: nobody notices."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from itertools import groupby
from typing import Any

import psycopg
import pytest
from psycopg.pq import PipelineStatus
from sqlalchemy import CursorResult, Engine, delete, event, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError, ResourceClosedError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from tests.integration.sql.queueing import (
    DOCUMENTS,
    METADATA,
    ORDERS,
    SAVE,
    SKIP,
    UPSERT,
    amounts,
    run,
)

from conquiet import Router
from conquiet.errors import HandlerError
from conquiet.message import Message
from conquiet.sql import Inbox, Transaction, connection, schema, session
from conquiet.sql import engine as make_engine
from conquiet.sql.statement_queue import MAX_QUEUED, Exchange, QueuedResult, is_silent, parse
from conquiet.testing import deliver, message


class Base(DeclarativeBase):
    metadata = METADATA


class Order(Base):
    __table__ = ORDERS


@pytest.fixture
def sent(postgres: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes to the server: each statement of a cursor, each exchange of the queue."""
    noted: list[str] = []
    execute, finish = psycopg.Cursor.execute, Exchange._finish

    def noting_execute(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        noted.append(str(query).split()[0])
        return execute(self, query, *arguments, **options)

    def noting_finish(self: Any, last: Any) -> Any:
        words = [statement.text.split()[0].decode() for statement in (*self._sent, *last)]
        noted.append(", ".join(f"{word} x {len(list(run))}" for word, run in groupby(words)))
        return finish(self, last)

    monkeypatch.setattr(psycopg.Cursor, "execute", noting_execute)
    monkeypatch.setattr(Exchange, "_finish", noting_finish)
    return noted


def test_inserts_are_sent_together(postgres: Engine, sent: list[str]) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        for number in range(5):
            found.execute(UPSERT, {"id": str(number % 3)})
        assert sent == ["SELECT"]
    assert sent == ["SELECT", "INSERT x 5, COMMIT x 1"]
    assert amounts(postgres) == {"0": 1, "1": 1, "2": 0}


def test_rows_of_an_executemany_are_sent_with_the_others(postgres: Engine, sent: list[str]) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(SAVE, [{"id": str(number)} for number in range(5)])
        found.execute(SAVE, {"id": "last"})
        with found.connection.cursor() as cursor:
            rows = [("0",), ("new",)]
            cursor.executemany("INSERT INTO orders VALUES (%s, 0) ON CONFLICT DO NOTHING", rows)
            rows[1] = ("changed",)
            assert cursor.rowcount == 1
    assert sent == ["SELECT", "INSERT x 8", "COMMIT x 1"]
    assert sorted(amounts(postgres)) == ["0", "1", "2", "3", "4", "last", "new"]


def test_a_message_takes_two_round_trips(postgres: Engine, sent: list[str]) -> None:
    assert len(run(postgres, lambda found: found.execute(SAVE, {"id": "a"})).acked) == 1
    assert sent[-2:] == ["BEGIN x 1, INSERT x 1", "INSERT x 2, COMMIT x 1"]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_begin_has_the_isolation_level_of_the_transaction(postgres: Engine, level: Any) -> None:
    router = Router()
    router.use(Transaction(postgres, isolation_level=level), Inbox("test"))
    seen: list[str] = []

    @router.raw(name="handler")
    def handler(item: Message[Any]) -> None:
        with connection(postgres) as found:
            seen.append(found.exec_driver_sql("SHOW transaction_isolation").scalar_one())

    assert len(deliver(router, message()).acked) == 1
    assert seen == [level.lower()]


def prepared_names(connection: Any) -> list[str]:
    query = (
        "SELECT name FROM pg_prepared_statements"
        " WHERE name LIKE '%conquiet%' AND statement NOT LIKE '%pg_prepared%'"
    )
    return [name for (name,) in connection.connection.execute(query).fetchall()]


def save_one(engine: Engine, number: int) -> list[str]:
    """Handle a message in a transaction of its own; return what its connection has prepared."""
    router = Router()
    router.use(Transaction(engine), Inbox("billing"))

    @router.command(source="/shop", type="test")
    def save(data: dict[str, int]) -> None:
        with connection(engine) as found:
            found.execute(SAVE, {"id": f"o-{number}", "amount": 1})

    assert deliver(router, message({}, id=f"m-{number}")).acked
    with engine.connect() as found:
        return prepared_names(found)


def test_statements_that_come_back_are_prepared_once_for_all_transactions(
    database_url: str,
) -> None:
    made = one_connection(database_url)
    names = [save_one(made, number) for number in range(12)]
    assert names[4] == []
    assert len(names[-1]) == 2  # that of the inbox and that of the handler
    assert names[-1] == names[6]
    assert len(amounts(made)) == 12
    made.dispose()


def test_nothing_is_prepared_where_psycopg_may_not(database_url: str) -> None:
    made = one_connection(database_url, prepare_threshold=None)
    assert [save_one(made, number) for number in range(12)][-1] == []
    made.dispose()


@pytest.mark.parametrize("how", ["DEALLOCATE ALL", "DISCARD ALL"])
def test_statements_that_somebody_deallocated_are_prepared_again(
    database_url: str, how: str
) -> None:
    made = one_connection(database_url)
    for number in range(12):
        save_one(made, number)
    with made.connect() as found:
        found.connection.driver_connection.autocommit = True
        found.connection.driver_connection.execute(how, prepare=False)
        found.connection.driver_connection.autocommit = False
    for number in range(12, 24):
        save_one(made, number)
    assert len(amounts(made)) == 24
    made.dispose()


def test_a_pool_that_discards_all_costs_no_message_an_error(
    database_url: str, sent: list[str]
) -> None:
    made = one_connection(database_url)

    def discard(driver: Any, record: Any) -> None:
        driver.rollback()
        driver.autocommit = True
        driver.execute("DISCARD ALL", prepare=False)
        driver.autocommit = False

    event.listen(made, "checkin", discard)
    for number in range(40):
        save_one(made, number)
    assert len(amounts(made)) == 40
    begun = sum(exchange.startswith("BEGIN") for exchange in sent)
    assert begun == 40 + 3  # from the fourth time on, nothing is prepared
    made.dispose()


def test_a_transaction_that_fails_while_it_prepares_spoils_no_later_one(
    database_url: str,
) -> None:
    made = one_connection(database_url)
    for number in range(4):
        save_one(made, number)
    for _ in range(8):  # the inbox is prepared, and the handler's insert fails
        with pytest.raises(IntegrityError), Transaction(made).scope(()) as found:
            found.execute(insert(ORDERS), {"id": "o-1", "amount": 1})
    names = [save_one(made, number) for number in range(4, 16)]
    assert len(names[-1]) == len(names[-2]) <= 4
    assert len(amounts(made)) == 16
    made.dispose()


def one_connection(database_url: str, **options: Any) -> Engine:
    made = make_engine(database_url, pool_size=1, max_overflow=0, connect_args=options)
    schema.init(made)
    METADATA.create_all(made)
    return made


def test_pipelines_of_psycopg_work_inside(postgres: Engine) -> None:
    def work(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        driver = found.connection.driver_connection
        with driver.pipeline(), driver.cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s, 0)", ("b",))
            assert cursor.execute("SELECT count(*) FROM orders").fetchone() == (2,)
        found.execute(SAVE, {"id": "c"})

    assert run(postgres, work).errors == []
    assert sorted(amounts(postgres)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("VALUES (%s, %b, '50 %%')", b"VALUES ($1, $2, '50 %')"),
        ("VALUES (%(a)s, %(b)s, %(a)s)", b"VALUES ($1, $2, $1)"),
        ("VALUES (%(a)s, %s)", None),
        ("VALUES (%(a)s, %(a)b)", None),
        ("VALUES (%d)", None),
        ("VALUES (%s) %", None),
    ],
)
def test_placeholders_are_those_of_psycopg(query: str, text: bytes | None) -> None:
    parsed = parse(query, "utf-8")
    assert (None if parsed is None else parsed[0]) == text


def test_pipeline_may_be_switched_off(postgres: Engine, sent: list[str]) -> None:
    with Transaction(postgres, queue_statements=False).scope(()), connection(postgres) as found:
        for number in range(3):
            found.execute(SAVE, {"id": str(number)})
    assert sent == ["INSERT"] * 3


def test_a_read_finds_what_was_queued(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(SAVE, {"id": "a"})
        assert found.execute(select(ORDERS.c.id)).scalars().all() == ["a"]
        found.execute(SAVE, {"id": "b"})
        found.execute(update(ORDERS).values(amount=7))
        assert found.execute(SKIP.returning(ORDERS.c.id), {"id": "c"}).scalar() == "c"
    assert amounts(postgres) == {"a": 7, "b": 7, "c": 0}


def test_row_counts_are_right_at_once_and_later(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        assert found.execute(SKIP, {"id": "a"}).rowcount == 1
        assert found.execute(SKIP, {"id": "a"}).rowcount == 0
        kept = [found.execute(SKIP, {"id": name}) for name in "abbc"]
        found.execute(SKIP, {"id": "d"})
        assert [result.rowcount for result in kept] == [0, 1, 0, 1]
        plain = "INSERT INTO orders VALUES ('e', 0) ON CONFLICT DO NOTHING"
        assert found.execute(text(plain)).rowcount == 1
        assert found.exec_driver_sql(plain).rowcount == 0
    assert sorted(amounts(postgres)) == ["a", "b", "c", "d", "e"]


def test_the_result_of_a_known_insert_is_that_of_sqlalchemy(postgres: Engine) -> None:
    known = insert(DOCUMENTS)
    METADATA.create_all(postgres, [DOCUMENTS])
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        results = [found.execute(known, {"id": str(number)}) for number in range(3)]
        assert type(results[0]) is CursorResult
        assert isinstance(results[1], QueuedResult)
        for result in results:
            assert isinstance(result, CursorResult)
            assert result.is_insert
            assert not result.returns_rows
            assert result.context.compiled_parameters[0].keys() == {"id"}
            with pytest.raises(ResourceClosedError):
                result.all()
        assert [result.rowcount for result in results] == [1, 1, 1]
    assert results[2].rowcount == 1
    with postgres.connect() as looking:
        rows = looking.execute(select(DOCUMENTS.c.id)).scalars()
        assert sorted(rows) == ["0", "1", "2"]


def test_a_known_insert_takes_other_names_and_defaults_by_sqlalchemy(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        for _ in range(2):  # the second time the statements are known
            found.execute(delete(ORDERS))
            found.execute(SAVE, {"id": "a", "amount": 1})
            found.execute(SAVE, {"id": "b"})  # the default of its column is one of Python
            found.execute(SAVE.values(amount=7), {"id": "c"})
            found.execute(SAVE, [{"id": "d", "amount": 3}, {"id": "e", "amount": 4}])
    assert amounts(postgres) == {"a": 1, "b": 0, "c": 7, "d": 3, "e": 4}


@pytest.mark.parametrize("name", ["before_execute", "after_execute"])
def test_a_listener_of_statements_sees_each_insert(postgres: Engine, name: str) -> None:
    seen: list[Any] = []

    def note(connection: Any, statement: Any, *unused: Any) -> None:
        seen.append(statement)

    event.listen(postgres, name, note)
    with Transaction(postgres).scope(()), connection(postgres) as found:
        for number in range(3):
            found.execute(SKIP, {"id": str(number), "amount": 0})
    event.remove(postgres, name, note)
    assert seen == [SKIP] * 3


def test_a_known_insert_after_the_end_of_the_transaction_is_refused(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        for number in range(2):
            found.execute(SAVE, {"id": str(number), "amount": 0})
    with pytest.raises(HandlerError, match="ended"):
        found.execute(SAVE, {"id": "late", "amount": 0})
    assert sorted(amounts(postgres)) == ["0", "1"]


def test_parameters_are_taken_as_they_were(postgres: Engine) -> None:
    METADATA.create_all(postgres, [DOCUMENTS])
    body = {"version": 1}
    values = {"id": "a", "body": body}
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        found.execute(insert(DOCUMENTS), values)
        body["version"] = 2
        values["id"] = "b"
        found.execute(SAVE, values := {"id": "first"})
        values["id"] = "changed"
        with found.connection.driver_connection.cursor() as cursor:
            for given in ({"id": "second"}, ["third"]):
                mark = "%(id)s" if isinstance(given, dict) else "%s"
                cursor.execute(f"INSERT INTO orders (id, amount) VALUES ({mark}, 0)", given)
                given["id" if isinstance(given, dict) else 0] = "changed"
    with postgres.connect() as looking:
        assert looking.execute(select(DOCUMENTS)).all() == [("a", {"version": 1})]
    assert list(amounts(postgres)) == ["first", "second", "third"]


def test_statements_keep_their_order(postgres: Engine) -> None:
    METADATA.create_all(postgres, [DOCUMENTS])
    with postgres.begin() as prepared:
        prepared.execute(text("ALTER TABLE documents ADD seq serial"))
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        kept = []
        for number in range(30):
            if number % 3 == 0:
                found.execute(insert(DOCUMENTS), {"id": str(number), "body": {}})  # sent at once
            elif number % 3 == 1:
                kept.append(found.execute(insert(DOCUMENTS), {"id": str(number)}))
            else:
                found.execute(insert(DOCUMENTS), {"id": str(number)})
    with postgres.connect() as looking:
        rows = looking.execute(text("SELECT id FROM documents ORDER BY seq")).scalars()
        assert list(rows) == [str(number) for number in range(30)]


def test_more_than_the_queue_holds(postgres: Engine) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(ORDERS))
        for number in range(2 * MAX_QUEUED + 7):
            found.execute(SAVE, {"id": str(number)})
    assert len(amounts(postgres)) == 2 * MAX_QUEUED + 7


# --- the connection afterwards --------------------------------------------------------------


def test_a_connection_leaves_as_it_came(postgres: Engine) -> None:
    run(postgres, lambda found: found.execute(SAVE, {"id": "a"}))
    run(
        postgres, lambda found: [found.execute(SAVE, {"id": "a"}), found.execute(SAVE, {"id": "b"})]
    )
    with postgres.connect() as plain:
        driver = plain.connection.driver_connection
        assert driver is not None
        assert driver.cursor_factory is psycopg.Cursor
        assert driver.server_cursor_factory is psycopg.ServerCursor
        assert driver.info.pipeline_status == psycopg.pq.PipelineStatus.OFF


def test_copy_and_server_side_cursors_work_inside(postgres: Engine) -> None:
    def copy(found: Any) -> None:
        found.execute(SAVE, {"id": "a"})
        with found.connection.cursor().copy("COPY orders FROM STDIN") as sink:
            sink.write_row(("b", 1))
        found.execute(SAVE, {"id": "c"})
        streamed = found.execution_options(stream_results=True).execute(select(ORDERS.c.id))
        assert sorted(streamed.scalars()) == ["a", "b", "c"]
        found.execution_options(stream_results=False)
        found.execute(SAVE, {"id": "d"})

    delivered = run(postgres, copy)
    assert delivered.errors == []
    assert sorted(amounts(postgres)) == ["a", "b", "c", "d"]


def test_orm_flushes_are_queued_and_right(postgres: Engine) -> None:
    factory = sessionmaker(postgres)

    def work(found: Any) -> None:
        with session(factory) as joined:
            joined.add_all([Order(id="a"), Order(id="b")])
            joined.flush()
            joined.get_one(Order, "a").amount = 5

    assert len(run(postgres, work).acked) == 1
    assert amounts(postgres) == {"a": 5, "b": 0}
    with Session(postgres) as looking:
        assert looking.get_one(Order, "a").amount == 5


def test_two_threads_queue_apart(postgres: Engine) -> None:
    def work(name: str) -> None:
        for number in range(50):
            with Transaction(postgres).scope(()), connection(postgres) as found:
                found.execute(select(ORDERS).limit(1))
                found.execute(SAVE, {"id": f"{name}{number}"})

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(amounts(postgres)) == 100


def test_threads_of_one_handler_share_the_connection_without_harm(postgres: Engine) -> None:
    wanted: dict[str, int] = {}

    def work(first: int) -> None:
        for number in range(first, first + 20, 5):
            with connection(postgres) as found:
                for id_ in range(number, number + 5):
                    found.execute(SAVE, {"id": str(id_), "amount": id_})
                assert found.execute(select(text(str(number)))).scalar() == number

    async def fan_out() -> None:
        await asyncio.gather(*(asyncio.to_thread(work, first) for first in range(0, 80, 20)))

    for turn in range(3):
        with Transaction(postgres).scope(()), connection(postgres) as found:
            found.execute(SAVE, {"id": f"first-{turn}", "amount": turn})
            context = copy_context()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(context.run, asyncio.run, fan_out()).result(30)
            found.execute(SAVE, {"id": f"last-{turn}", "amount": turn})
        with postgres.begin() as cleaning:
            driver = cleaning.connection.driver_connection
            assert driver.pgconn.pipeline_status == PipelineStatus.OFF
            wanted = {str(n): n for n in range(80)} | {f"first-{turn}": turn, f"last-{turn}": turn}
            assert {r.id: r.amount for r in cleaning.execute(select(ORDERS))} == wanted
            cleaning.execute(delete(ORDERS))


def test_another_thread_executes_the_queue_and_switches_it_off(
    postgres: Engine, sent: list[str]
) -> None:
    with Transaction(postgres).scope(()), connection(postgres) as found:
        found.execute(select(1))
        for number in range(5):
            found.execute(SAVE, {"id": str(number)})
        del sent[:]
        context = copy_context()
        with ThreadPoolExecutor(1) as pool:
            rows = pool.submit(context.run, lambda: found.execute(select(ORDERS)).all()).result(30)
        assert len(rows) == 5
        assert sent == ["INSERT x 5", "SELECT"]
        found.execute(SAVE, {"id": "5"})
        driver = found.connection.driver_connection
        assert driver.pgconn.pipeline_status == PipelineStatus.OFF
        past_the_queue = psycopg.Cursor(driver).execute("SELECT count(*) FROM orders")
        assert past_the_queue.fetchone() == (6,)


def test_a_connection_that_is_stuck_in_pipeline_mode_never_returns_to_the_pool(
    postgres: Engine,
) -> None:
    with suppress(ZeroDivisionError), Transaction(postgres).scope(()):
        with connection(postgres) as found:
            found.execute(SAVE, {"id": "a"})
            mode = found.connection.driver_connection.pipeline()
            mode.__enter__()
        raise ZeroDivisionError
    with postgres.begin() as next_:
        assert next_.connection.driver_connection.pgconn.pipeline_status == PipelineStatus.OFF
        assert next_.execute(select(ORDERS)).all() == []


class Shouting(psycopg.Cursor[Any]):
    def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        super().execute(query, *arguments, **options)
        executed.append(self.statusmessage)
        return self


executed: list[str | None] = []


def test_a_cursor_factory_of_the_engine_is_kept_and_nothing_queued(database_url: str) -> None:
    engine = make_engine(database_url, connect_args={"cursor_factory": Shouting})
    METADATA.create_all(engine, tables=[ORDERS])
    del executed[:]
    with Transaction(engine).scope(()), connection(engine) as found:
        for number in range(3):
            found.execute(SAVE, {"id": str(number)})
        assert executed[-3:] == ["INSERT 0 1"] * 3
    engine.dispose()


@pytest.mark.parametrize("name", ["after_cursor_execute", "do_execute"])
def test_a_listener_of_cursors_sees_executed_statements(postgres: Engine, name: str) -> None:
    seen: list[str | None] = []

    def after(connection: Any, cursor: Any, *unused: Any) -> None:
        seen.append(cursor.statusmessage)

    def instead(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        cursor.execute(statement, parameters)
        seen.append(cursor.statusmessage)
        return True

    event.listen(postgres, name, instead if name == "do_execute" else after)
    with Transaction(postgres).scope(()), connection(postgres) as found:
        for number in range(3):
            found.execute(SAVE, {"id": str(number)})
    assert seen == ["INSERT 0 1"] * 3


@pytest.mark.parametrize(
    ("query", "silent"),
    [
        ("INSERT INTO a VALUES (1)", True),
        ("\n  insert into a VALUES (1)", True),
        ("INSERT INTO a VALUES (1) RETURNING id", False),
        ("INSERT INTO a VALUES (1) returning id", False),
        ("UPDATE a SET b = 1", False),
        ("SELECT 1", False),
        ("WITH x AS (SELECT 1) INSERT INTO a SELECT * FROM x", False),
        ("INSERTED", False),
        ("-- INSERT\nSELECT 1", False),
    ],
)
def test_only_inserts_that_return_nothing_are_queued(query: str, silent: bool) -> None:
    assert is_silent(query) is silent
