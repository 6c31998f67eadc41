"""Checks of `conquiet.django` inside a process of the example, which test_django.py starts.

Django's settings are for a whole process. Each function is one check; the process prints what
became of each, as JSON.
"""

import io
import json
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from typing import Any

import django

django.setup()

import msgspec  # noqa: E402
from celery import Celery  # noqa: E402
from django.contrib.auth.models import User  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import (  # noqa: E402
    DatabaseError,
    IntegrityError,
    OperationalError,
    connection,
    transaction,
)
from django.test import Client  # noqa: E402
from shop.messages import OrderPlaced, app  # noqa: E402
from shop.models import Order, Parcel  # noqa: E402
from tests.waiting import eventually  # noqa: E402

from conquiet import Message  # noqa: E402
from conquiet.django import App  # noqa: E402
from conquiet.django.models import DeadLetter, OutboxEvent  # noqa: E402
from conquiet.errors import (  # noqa: E402
    ConfigError,
    DeadlineExceeded,
    HandlerError,
    PermanentError,
    StoreError,
)
from conquiet.sql import schema  # noqa: E402
from conquiet.worker import Publish  # noqa: E402


class Do(msgspec.Struct):
    """Asks the handler of a check to do what `behaviour` says."""

    text: str = ""


behaviour: list[Callable[[], object]] = []


@app.on
def do(command: Do) -> None:
    Parcel.objects.create(order=command.text)
    behaviour[-1]()


def handle(*messages: Message[Any]) -> list[Any]:
    """Run messages through the chain of the app, without a source; return the results."""
    app.router.close()
    chain = app.router.start(Publish(None, app.router))
    return list(app.router.run(messages, chain).results)


def handle_do(what: Callable[[], object]) -> Any:
    behaviour.append(what)
    [result] = handle(app.message(msgspec.json.encode(Do("done")), type="do"))
    return result


def parcels() -> list[str]:
    return list(Parcel.objects.order_by("id").values_list("order", flat=True))


def refused(call: Callable[[], object], part: str) -> bool:
    try:
        call()
    except ConfigError as error:
        return part in str(error)
    return False


# --- checks ---------------------------------------------------------------------------------


def the_migration_makes_the_tables_of_the_schema() -> None:
    assert schema.verify(app.store.log.log_engine) == []
    app.check_tables()


def an_order_and_its_event_are_committed_together_or_not_at_all() -> None:
    orders = ({"id": "a", "amount": 7}, {"id": "a", "amount": 8}, {"id": "b", "amount": -1})
    post = [Client().post("/orders", order, content_type="application/json") for order in orders]
    assert [answer.status_code for answer in post] == [201, 409, 422]
    assert [order.id for order in Order.objects.all()] == ["a"]
    [row] = OutboxEvent.objects.all()
    assert (row.topic, row.event_type) == ("shop", "order.placed")
    assert bytes(row.data) == b'{"order":"a","amount":7}'
    assert row.attributes["source"] == "/shop"


def several_events_are_stored_in_order_with_any_bytes() -> None:
    data = [b"\x00\xff%s", "ümlaut 'quoted' \\ {}".encode(), b""]
    with transaction.atomic():
        ids = app.emit(*(Message(item, {"type": "t"}) for item in data), subject="o'7 %s")
    rows = list(OutboxEvent.objects.order_by("id"))
    assert [row.event_id for row in rows] == ids
    assert [bytes(row.data) for row in rows] == data
    assert {row.attributes["subject"] for row in rows} == {"o'7 %s"}


def an_event_outside_a_transaction_is_refused() -> None:
    assert refused(lambda: app.emit(OrderPlaced("a", 1)), "emit() needs transaction.atomic()")
    assert OutboxEvent.objects.count() == 0


def a_celery_task_is_sent_if_its_transaction_commits() -> None:
    celery = Celery("shop", broker="memory://")
    sends = App("tasks", celery=celery)
    ship = celery.signature("ship", ("o-1",))
    with suppress(ValueError), transaction.atomic():
        sends.emit(ship)
        raise ValueError("rolled back")
    with transaction.atomic():
        [task_id] = sends.emit(ship)
        assert sends.emit(OrderPlaced("o-1", 1))
    relay = sends.relay()
    assert relay is not None
    assert relay.run_once(5).published == 1
    with celery.connection_for_read() as link:
        [task] = [link.SimpleQueue("celery").get(timeout=5)]
        assert task.headers["id"] == task_id
    relay.source.close()
    relay.sink.close()
    sends.close()


def a_savepoint_that_is_rolled_back_takes_its_event_along() -> None:
    with transaction.atomic():
        app.emit(OrderPlaced("kept", 1))
        try:
            with transaction.atomic():
                app.emit(OrderPlaced("undone", 1))
                raise ValueError
        except ValueError:
            pass
    [row] = OutboxEvent.objects.all()
    assert b"kept" in bytes(row.data)


def a_message_that_comes_twice_takes_effect_once() -> None:
    with running():
        for _ in range(2):
            app.send(OrderPlaced("a", 1), id="same")
        with transaction.atomic():
            app.emit(OrderPlaced("b", 1))
        eventually(lambda: len(parcels()) == 2)
        eventually(lambda: pending() == 0)
    assert sorted(parcels()) == ["a", "b"]
    assert OutboxEvent.objects.filter(event_type="parcel.sent").count() == 2


def a_handler_that_fails_leaves_nothing() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert isinstance(handle_do(fail), ValueError)
    assert parcels() == []
    assert rows("SELECT count(*) FROM processed_messages") == [(0,)]


def an_error_that_a_handler_catches_cannot_lose_its_effects() -> None:
    """PostgreSQL answers the COMMIT of an aborted transaction by a ROLLBACK, without an error."""
    Order.objects.create(id="a", amount=1)

    def swallow_by_model() -> None:
        try:
            Order.objects.create(id="a", amount=2)
        except IntegrityError:
            pass

    def swallow_by_cursor() -> None:
        try:
            rows_written("INSERT INTO shop_order (id, amount) VALUES (%s, %s)", "a", 2)
        except IntegrityError:
            pass

    result = handle_do(swallow_by_model)
    assert isinstance(result, HandlerError)
    assert "was rolled back inside" in str(result)
    result = handle_do(swallow_by_cursor)
    if connection.vendor == "postgresql":
        assert isinstance(result, HandlerError)
        assert "is aborted" in str(result)
        assert parcels() == []
    else:  # SQLite rolls back the statement alone
        assert not isinstance(result, Exception)
        assert parcels() == ["done"]


def a_rollback_by_hand_is_an_error_of_the_handler() -> None:
    result = handle_do(lambda: transaction.set_rollback(True))
    assert isinstance(result, HandlerError)
    assert "was rolled back inside" in str(result)
    assert parcels() == []


def a_commit_by_the_driver_is_an_error_of_the_handler() -> None:
    result = handle_do(lambda: connection.connection.commit())
    assert isinstance(result, HandlerError)
    assert "was ended inside" in str(result)


def a_lost_connection_costs_nothing_and_is_opened_again() -> None:
    if connection.vendor != "postgresql":
        return
    tries: list[int] = []

    def lose() -> None:
        tries.append(1)
        if len(tries) == 1:
            pid = connection.connection.info.backend_pid
            rows(f"SELECT pg_terminate_backend({pid})")
            Parcel.objects.count()

    result = handle_do(lose)
    assert not isinstance(result, Exception), "".join(traceback.format_exception(result))
    assert len(tries) == 2
    assert parcels() == ["done"]


def a_missing_table_is_an_outage_of_the_store() -> None:
    rename = "ALTER TABLE {} RENAME TO {}"
    with connection.cursor() as cursor:
        cursor.execute(rename.format("processed_messages", "away"))
    try:
        result = handle_do(lambda: None)
        assert refused(app.check_tables, "run manage.py migrate")
    finally:
        with connection.cursor() as cursor:
            cursor.execute(rename.format("away", "processed_messages"))
    assert isinstance(result, StoreError)
    assert result.is_outage


def a_deadline_is_the_messages_fault_also_if_it_breaks_the_connection() -> None:
    def take_long() -> None:
        try:
            rows_written("SELECT no_such_function(%s)", 1)
        except DatabaseError:
            connection.connection.close()
            lost = sqlite3.OperationalError("closed database")
            raise DeadlineExceeded("too long") from lost

    assert isinstance(handle_do(take_long), DeadlineExceeded)
    assert parcels() == []


def a_database_that_is_not_ours_is_left_alone_by_the_migration() -> None:
    from importlib import import_module
    from types import SimpleNamespace

    migration = import_module("conquiet.django.migrations.0001_tables")
    editor = SimpleNamespace(connection=SimpleNamespace(vendor="mysql"))
    migration.create_tables(None, editor)  # it would fail without execute()


def the_tables_can_be_dropped_and_made_again() -> None:
    call_command("migrate", "conquiet", "zero", verbosity=0)
    assert len(app.store.missing_tables()) == 7
    call_command("migrate", "conquiet", verbosity=0)
    assert schema.verify(app.store.log.log_engine) == []


def the_table_of_an_older_database_gets_the_errors_of_attempts() -> None:
    call_command("migrate", "conquiet", "0003", verbosity=0)
    differences = [str(one) for one in schema.verify(app.store.log.log_engine)]
    assert differences == [
        "outbox_history: table should be there, is missing",
        "outbox_retries: column errors should be text, is missing",
    ]
    call_command("migrate", "conquiet", verbosity=0)
    assert schema.verify(app.store.log.log_engine) == []


def the_table_of_an_older_database_gets_the_settings_of_autovacuum() -> None:
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE outbox RESET (autovacuum_vacuum_scale_factor)")
        cursor.execute(
            "ALTER TABLE outbox_delayed RESET (autovacuum_vacuum_scale_factor,"
            " autovacuum_vacuum_insert_scale_factor, autovacuum_analyze_scale_factor)"
        )
    call_command("migrate", "conquiet", "0005", verbosity=0)
    call_command("migrate", "conquiet", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, cardinality(reloptions) FROM pg_class WHERE relname IN"
            " ('outbox', 'outbox_delayed', 'processed_messages')"
        )
        found = dict(cursor.fetchall())
    assert found == {"outbox": 2, "outbox_delayed": 3, "processed_messages": 3}


def a_delayed_event_waits_and_can_be_cancelled() -> None:
    with transaction.atomic():
        [waiting, now] = app.emit(Do("a"), Message(Do("b"), notbefore=timedelta()), after=3600)
    assert [row.event_id for row in OutboxEvent.objects.all()] == [now]
    assert [app.cancel(waiting), app.cancel(waiting), app.cancel(now)] == [True, False, False]


def an_error_of_another_database_is_not_the_stores() -> None:
    def fail() -> None:
        raise OperationalError("another one") from sqlite3.OperationalError("closed database")

    result = handle_do(fail)
    assert isinstance(result, OperationalError)


def what_does_not_fit_django_is_refused() -> None:
    async def later(command: Do) -> None: ...

    async def at_times() -> None: ...

    assert refused(lambda: app.on(later), "leave `async` away")
    assert refused(lambda: app.every(minutes=5)(at_times), "leave `async` away")
    assert refused(app.create_tables, "manage.py migrate")
    assert refused(app.test, "django.test.TestCase")
    assert "inside a handler" in str(handle_do(lambda: app.send(OrderPlaced("a", 1))))


def the_command_describes_the_app() -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        call_command("conquiet", "describe")
    document = json.loads(printed.getvalue())
    assert {"send_parcel", "send.parcel.sent"} <= set(document["operations"])


def the_command_knows_schedules() -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        call_command("conquiet", "schedule", "list")
    assert "the app has no schedules" in printed.getvalue()


def the_admin_shows_dead_letters_and_replays_them() -> None:
    faults = [PermanentError("the printer is on fire")]

    def fail_once() -> None:
        if faults:
            raise faults.pop()

    behaviour.append(fail_once)
    browser = admin()
    with running():
        app.send(Message(msgspec.json.encode(Do("done")), {"type": "do"}))
        eventually(lambda: DeadLetter.objects.filter(dead_at__isnull=False).exists())
        assert parcels() == []
        listed = browser.get("/admin/conquiet/deadletter/")
        assert "the printer is on fire" in listed.content.decode()
        [letter] = DeadLetter.objects.all()
        shown = browser.get(f"/admin/conquiet/deadletter/{letter.pk}/change/")
        assert shown.status_code == 200
        assert 'name="_save"' not in shown.content.decode()
        chosen = {"action": "replay", "_selected_action": [letter.pk]}
        answer = browser.post("/admin/conquiet/deadletter/", chosen, follow=True)
        assert "1 will be tried again" in answer.content.decode()
        eventually(lambda: parcels() == ["done"])


def the_admin_shows_the_outbox_and_lets_parked_events_be_published() -> None:
    with transaction.atomic():
        app.emit(OrderPlaced("parked", 1), OrderPlaced("stored", 1))
    parked, stored = OutboxEvent.objects.order_by("id")
    rows_written("UPDATE outbox SET parked_at = created_at, attempts = 10 WHERE id = %s", parked.pk)
    browser = admin()
    page = "/admin/conquiet/outboxevent/"
    assert parked.event_id in browser.get(page).content.decode()
    shown = browser.get(f"{page}{parked.pk}/change/").content.decode()
    assert "parked" in shown
    assert browser.get(f"{page}add/").status_code == 403
    chosen = {"action": "publish_again", "_selected_action": [parked.pk, stored.pk]}
    answer = browser.post(page, chosen, follow=True).content.decode()
    assert "1 will be tried again; 1 were not parked" in answer
    parked.refresh_from_db()
    assert (parked.parked_at, parked.attempts) == (None, 0)


def the_admin_without_the_permission_changes_nothing() -> None:
    from django.contrib.auth.models import Permission

    user = User.objects.create_user("reader", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="view_outboxevent"))
    browser = Client()
    browser.force_login(user)
    with transaction.atomic():
        app.emit(OrderPlaced("parked", 1))
    rows_written("UPDATE outbox SET parked_at = created_at WHERE id > %s", 0)
    page = "/admin/conquiet/outboxevent/"
    [row] = OutboxEvent.objects.all()
    browser.post(page, {"action": "publish_again", "_selected_action": [row.pk]})
    assert browser.get("/admin/conquiet/deadletter/").status_code == 403
    row.refresh_from_db()
    assert row.parked_at is not None


# --- the process ----------------------------------------------------------------------------


@contextmanager
def running() -> Iterator[None]:
    app.router.close()
    parts = app.open()
    parts.start()
    try:
        yield
    finally:
        assert parts.stop()


def admin() -> Client:
    browser = Client()
    browser.force_login(User.objects.create_superuser("root"))
    return browser


def rows(statement: str) -> list[Any]:
    with app.store.log.log_engine.connect() as looking:
        return [tuple(row) for row in looking.exec_driver_sql(statement)]


def rows_written(statement: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


def pending() -> int:
    from conquiet.operations.log_groups import survey

    return sum(group.lag + group.retries for group in survey(app.store.log.log_engine))


def empty() -> None:
    with connection.cursor() as cursor:
        for table in (
            "outbox",
            "outbox_delayed",
            "outbox_positions",
            "outbox_retries",
            "processed_messages",
        ):
            cursor.execute(f"DELETE FROM {table}")
    for model in (Order, Parcel, User):
        model.objects.all().delete()


def main() -> None:
    call_command("migrate", verbosity=0)
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
    checks = [
        item
        for item in list(globals().values())
        if getattr(item, "__module__", "") == "__main__" and getattr(item, "__name__", "") in NAMES
    ]
    outcome = {}
    for check in checks:
        empty()
        try:
            check()
            outcome[check.__name__] = ""
        except Exception:
            outcome[check.__name__] = traceback.format_exc()
    app.close()
    json.dump(outcome, sys.stdout)


NAMES = sys.argv[1:]

if __name__ == "__main__":
    main()
