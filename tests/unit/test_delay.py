"""When an event is due: what is refused, what is held, and what publishes at once."""

from __future__ import annotations

import ast
import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

import conquiet
from conquiet import App, Message
from conquiet.delay import due_of, is_delayed, utc_text
from conquiet.errors import ConfigError, Refused
from conquiet.memory import Log
from conquiet.sql import Outbox, OutboxSource, engine, schema


class Remind(msgspec.Struct):
    id: str


class Reminded(msgspec.Struct):
    id: str


@pytest.fixture
def app(tmp_path: Path) -> App:
    made = App("shop", database=f"sqlite:///{tmp_path}/shop.db")

    @made.on
    def remind(command: Remind) -> list[Message[Reminded]]:
        return [Message(Reminded(command.id), notbefore=timedelta(days=1))]

    @made.on
    def note(event: Reminded) -> None: ...

    made.create_tables()
    return made


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"at": datetime(2026, 1, 31)}, "no time zone"),
        ({"at": "2026-01-31T12:00:00Z"}, "give a datetime"),
        ({"after": "1 hour"}, "seconds or a timedelta"),
        ({"after": True}, "seconds or a timedelta"),
        ({"after": float("nan")}, "at most"),
        ({"after": float("inf")}, "at most"),
        ({"after": timedelta(days=400_000)}, "at most"),
        ({"at": datetime.now(UTC), "after": 1}, "one of them"),
    ],
)
def test_what_is_no_time_is_refused(given, why) -> None:
    with pytest.raises(ConfigError, match=why):
        due_of(**given)


def test_no_process_reads_its_own_clock_to_tell_what_is_due() -> None:
    """Times are those of the store; a process measures how long it sleeps, by a monotonic clock."""
    package = Path(conquiet.__file__).parent
    modules = ("schedule.py", "delay.py", "attempts.py", "middleware/retry.py")
    modules += ("sql/promotion.py", "sql/schedules.py", "sql/log_group.py", "sql/log_source.py")
    modules += ("redis/promotion.py", "redis/schedules.py", "redis/delay.py")
    for module in modules:
        tree = ast.parse((package / module).read_text())
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert called.isdisjoint({"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"})


def test_a_message_refuses_a_moment_without_a_time_zone() -> None:
    with pytest.raises(ConfigError, match="no time zone"):
        Message(b"", notbefore=datetime(2026, 1, 31))
    with pytest.raises(ConfigError, match="give a datetime"):
        Message(b"", notbefore=5)  # type: ignore[arg-type]


def test_a_while_of_zero_or_less_is_no_delay() -> None:
    whiles = (timedelta(), timedelta(seconds=-5), timedelta(microseconds=1))
    assert [is_delayed(Message(b"", notbefore=item)) for item in whiles] == [False, False, True]


def test_the_last_moment_of_the_calendar_can_be_written_in_every_zone() -> None:
    last = datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))
    assert utc_text(last) == "9999-12-31 23:59:59.999000"


def test_a_sink_refuses_what_it_would_publish_too_early() -> None:
    log = Log()
    later = Message(b"1", {"id": "1", "type": "t"}, notbefore=timedelta(hours=1))
    now = Message(b"2", {"id": "2", "type": "t"}, notbefore=timedelta(0))
    with pytest.raises(Refused, match="put it into an outbox"):
        log.sink("orders").publish([later, now])
    assert [message.data for message in log.source("all").read(10, 0)] == [b"2"]


def test_an_app_holds_what_it_emits_and_sends_until_it_is_due(app: App) -> None:
    with app.test() as shop:
        with app.sessions.begin() as session:
            [emitted] = app.emit(session, Reminded("o-1"), at=datetime(2999, 1, 1, tzinfo=UTC))
        sent = shop.send(Remind("o-2"), after=timedelta(hours=1))
        assert shop.outbox == []
        assert shop.rows("SELECT event_id FROM outbox_delayed ORDER BY id") == [(emitted,), (sent,)]
        assert shop.deliver_delayed() == 2
        assert [event.data for event in shop.outbox] == [{"id": "o-1"}]
        assert shop.deliver_delayed() == 1  # what the handler has delayed
        assert [event.data for event in shop.outbox] == [{"id": "o-1"}, {"id": "o-2"}]
        assert all("notbefore" not in event.attributes for event in shop.outbox)


def test_an_app_cancels_once_and_says_when_it_is_too_late(app: App) -> None:
    sent = app.send(Remind("o-1"), after=3600)
    assert app.cancel(sent) is True
    assert app.cancel(sent) is False
    assert app.cancel(app.send(Remind("o-2"))) is False


def test_a_cancel_in_a_transaction_is_undone_with_it(app: App) -> None:
    sent = app.send(Remind("o-1"), after=3600)
    with app.sessions.begin() as session:
        assert app.store.outbox.cancel(session, sent) is True
        session.rollback()
    assert app.cancel(sent) is True


def test_notbefore_is_no_attribute(app: App) -> None:
    with pytest.raises(ConfigError, match="at=… or after=…"):
        app.send(Remind("o-1"), notbefore="2027-01-01T00:00:00Z")


def test_a_statement_holds_what_is_delayed_and_refuses_a_mixture(tmp_path: Path) -> None:
    made = engine(f"sqlite:///{tmp_path}/shop.db")
    schema.init(made)
    outbox = Outbox("orders", source="/s")
    with made.begin() as connection:
        connection.execute(outbox.statement([Reminded("1"), Reminded("2")], after=60))
        connection.execute(outbox.statement([Reminded("3")]))
        assert connection.execute(text("SELECT count(*) FROM outbox_delayed")).scalar() == 2
        assert connection.execute(text("SELECT count(*) FROM outbox")).scalar() == 1
    with pytest.raises(ConfigError, match="another table"):
        outbox.statement([Message(Reminded("1"), notbefore=timedelta(1)), Reminded("2")])


def test_a_database_of_an_older_version_works_until_something_is_delayed(tmp_path: Path) -> None:
    made = engine(f"sqlite:///{tmp_path}/old.db")
    schema.migrate(made, revision="0002")
    outbox = Outbox("orders", source="/s")
    with made.begin() as connection:
        outbox.add(connection, [Reminded("now")])
    source = OutboxSource(made)
    [message] = source.read(10, 1.0)
    message.ack()
    source.close()
    for attempt in (
        lambda connection: outbox.add(connection, [Reminded("later")], after=1),
        lambda connection: outbox.cancel(connection, "x"),
    ):
        with (
            pytest.raises(ConfigError, match="conquiet outbox migrate"),
            made.begin() as connection,
        ):
            attempt(connection)
    schema.migrate(made)
    assert schema.verify(made) == []
    with made.begin() as connection:
        outbox.add(connection, [Reminded("later")], after=0.01)
    source = OutboxSource(made)
    [message] = source.read(10, 60.0)
    assert message.data == b'{"id":"later"}'
    message.ack()
    source.close()


def test_a_connection_of_the_driver_holds_and_cancels(tmp_path: Path) -> None:
    made = engine(f"sqlite:///{tmp_path}/shop.db")
    schema.init(made)
    outbox = Outbox("orders", source="/s")
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        [one, two] = outbox.add(connection, [Reminded("1"), Reminded("2")], after=60)
        assert outbox.cancel(connection, one) is True
    assert connection.execute("SELECT event_id FROM outbox_delayed").fetchall() == [(two,)]
    connection.close()
