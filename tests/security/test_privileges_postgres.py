"""Each process does its work with the rights that docs/security.md grants, and can do no more."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest
from msgspec import structs
from sqlalchemy import make_url, text
from sqlalchemy.exc import ProgrammingError
from tests.security.rights import OF_EVENTS, OF_OUTBOX, ONCE, PAGE, ROLES
from tests.web.browsing import Browser
from tests.web.test_actions import form_of

from conquiet import Message, Router, cli
from conquiet.errors import StoreError
from conquiet.events import EventSource, emit
from conquiet.operations.history import Key, TableKeeper
from conquiet.relay import Relay
from conquiet.relay.inspection import Inspection
from conquiet.schedule import State
from conquiet.sql import (
    Cleanup,
    Inbox,
    LogSource,
    Outbox,
    OutboxLog,
    OutboxSource,
    Transaction,
    engine,
)
from conquiet.sql.schedules import Schedules
from conquiet.web import Open, dashboard
from marketplace.catalog import CATALOG, OrderCanceled, OrderKeys

EVENT = {"specversion": "1.0", "id": "1", "type": "sold", "source": "/shop", "subject": "7"}
ORDER = uuid4()
CANCELED = OrderCanceled(
    **{field.name: uuid4() for field in structs.fields(OrderKeys)},
    canceled_at=datetime.now(UTC),
    canceled_by="buyer",
    total_cents=499,
)
MIGRATE_EVENTS = ["--table", "outbox_events", "--catalog", "marketplace.catalog:CATALOG"]


@pytest.fixture
def as_role(database_url, capsys):
    """The URL of a login that has one role; tables are made by the owner's."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"DROP ROLE IF EXISTS {role}_login")
            connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(ONCE)
        for role in ROLES:
            connection.execute(f"CREATE ROLE {role}_login LOGIN PASSWORD 'secret' IN ROLE {role}")

    def url(role):
        made = make_url(database_url).set(username=f"{role}_login", password="secret")
        return made.render_as_string(hide_password=False)

    owner = f"{url('conquiet_owner')}?options=-crole%3Dconquiet_owner"
    assert cli.main(["outbox", "migrate", "--database", owner]) == 0
    assert cli.main(["outbox", "migrate", "--database", owner, *MIGRATE_EVENTS]) == 0
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute(OF_OUTBOX)
        connection.execute(OF_EVENTS)
    yield url
    with psycopg.connect(database_url, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}_login")
            connection.execute(f"DROP ROLE {role}")


@pytest.fixture
def engine_of(as_role):
    made = {}

    def of(role):
        return made.setdefault(role, engine(as_role(role)))

    yield of
    for one in made.values():
        one.dispose()


def write(service, *ids):
    """Events by a service: transaction, inbox and outbox around a handler."""
    router = Router()
    router.use(Transaction(service), Inbox("billing"), Outbox("orders"))

    @router.raw(type="ask", source="/shop")
    def sell(message: Message[bytes]) -> list[Message[bytes]]:
        return [Message(b"{}", {**EVENT, "id": message.id})]

    batch = [Message(b"{}", {**EVENT, "id": id_, "type": "ask"}) for id_ in ids]
    results = router.process(batch)
    assert not any(isinstance(result, Exception) for result in results), results


class Taking:
    """A sink that takes what is not called bad."""

    def __init__(self, bad="bad"):
        self.taken = []
        self._bad = bad

    def publish_each(self, messages):
        self.taken += [message.id for message in messages if message.id != self._bad]
        return [ValueError("no") if message.id == self._bad else None for message in messages]

    def close(self):
        pass


def publish(source, sink):
    outcome = Relay(source, sink).run_once()
    source.close()
    assert outcome.outage is None
    return sink.taken


def refused(made, *statements):
    for statement in statements:
        with (
            made.connect() as connection,
            pytest.raises(ProgrammingError, match=r"permission denied|must be owner"),
        ):
            connection.execute(text(statement))


DELETE, INSERT = "DELETE FROM outbox", "INSERT INTO outbox DEFAULT VALUES"


def test_the_outbox_from_the_service_to_the_cleanup(engine_of) -> None:
    service = engine_of("conquiet_service")
    write(service, "1", "2", "bad")
    refused(service, "SELECT * FROM outbox", DELETE, "UPDATE outbox SET published_at = now()")

    relay = engine_of("conquiet_relay")
    assert publish(OutboxSource(relay, max_attempts=1), Taking()) == ["1", "2"]
    refused(
        relay, INSERT, DELETE, "UPDATE outbox SET data = ''", "SELECT * FROM processed_messages"
    )

    reader = engine_of("conquiet_reader")
    assert [message.id for message in OutboxLog(reader).read()] == ["1", "2", "bad"]
    refused(reader, INSERT, DELETE, "UPDATE outbox SET attempts = 0", "TABLE processed_messages")

    operator = engine_of("conquiet_operator")
    [parked] = Inspection(operator, "outbox").entries(parked=True)
    assert Inspection(operator, "outbox").retry([parked.id])
    refused(operator, INSERT, DELETE, "UPDATE outbox SET data = ''")

    cleanup = engine_of("conquiet_cleanup")
    removed = Cleanup(cleanup, retention=1e-6).run_once()
    assert (removed.outbox, removed.inbox) == (2, 3)
    refused(cleanup, INSERT, "UPDATE outbox SET data = ''", "DROP TABLE outbox")
    for role in ROLES:
        if role != "conquiet_owner":
            refused(
                engine_of(role), "CREATE TABLE mine (id int)", "ALTER TABLE outbox ADD mine int"
            )


def test_delayed_events_with_the_rights_that_the_page_adds_for_them(
    engine_of, database_url
) -> None:
    event, outbox = Message(b"{}", EVENT), Outbox("orders")
    service, relay = engine_of("conquiet_service"), engine_of("conquiet_relay")
    with service.connect() as connection, pytest.raises(ProgrammingError, match="outbox_delayed"):
        outbox.add(connection, [event], after=0.001)
    cancel, move = "SELECT, DELETE", "SELECT, UPDATE, DELETE"
    assert f"`{cancel}` on it to\ncancel." in PAGE
    assert f"move them: `{move}` on `outbox_delayed`, `INSERT` on `outbox`" in PAGE
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute("GRANT INSERT ON outbox_delayed TO conquiet_service")
        owner.execute("GRANT USAGE ON SEQUENCE outbox_delayed_id_seq TO conquiet_service")
    with service.begin() as connection:
        outbox.add(connection, [event], after=0.001)
        outbox.add(connection, [Message(b"{}", {**EVENT, "id": "far"})], after=3600)
    refused(service, "TABLE outbox_delayed", "DELETE FROM outbox_delayed")

    assert publish(OutboxSource(relay), Taking()) == []  # it may not move them, and says so
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(f"GRANT {cancel} ON outbox_delayed TO conquiet_service")
        owner.execute(f"GRANT {move} ON outbox_delayed TO conquiet_relay")
        owner.execute("GRANT INSERT ON outbox TO conquiet_relay")
        owner.execute("GRANT USAGE ON SEQUENCE outbox_id_seq TO conquiet_relay")
    with service.begin() as connection:
        assert outbox.cancel(connection, "far") is True
    assert publish(OutboxSource(relay), Taking()) == [EVENT["id"]]


def test_the_history_with_the_rights_that_the_page_adds_for_it(engine_of, database_url) -> None:
    rights = re.search(
        r"workers and relays need `([A-Z, ]+)` on\s+`outbox_history`, the dashboard `SELECT`", PAGE
    )
    assert rights is not None
    key = Key("handler", "place_order", "order.place", "calls")
    service = TableKeeper(engine_of("conquiet_service"))
    with pytest.raises(StoreError, match="permission denied"):
        service.write({key: 1})
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(f"GRANT {rights[1]} ON outbox_history TO conquiet_service")
        owner.execute("GRANT SELECT ON outbox_history TO conquiet_reader")
    service.write({key: 1})
    reader = TableKeeper(engine_of("conquiet_reader"))
    assert [entry.value for entry in reader.read(5).entries] == [1]
    with pytest.raises(StoreError, match="permission denied"):
        reader.write({key: 1})


def test_schedules_with_the_rights_that_the_page_adds_for_them(engine_of, database_url) -> None:
    rights = re.search(r"An app with schedules needs `([A-Z, ]+)` on `outbox_schedules`", PAGE)
    assert rights is not None
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(f"GRANT {rights[1]} ON outbox_schedules TO conquiet_service")
    states = Schedules(engine_of("conquiet_service"), Outbox("orders", source="/shop"), "orders")
    now, found = states.read()
    assert found == []
    state = State("tick", "* * * * *", now)
    assert states.replace(None, state, [Message(b"{}", EVENT)])
    assert states.replace(state, later := state._replace(next_at=now + 60))
    assert states.read()[1] == [later]
    assert states.replace(later, None)
    relay = engine_of("conquiet_relay")
    assert publish(OutboxSource(relay), Taking()) == [EVENT["id"]]


def test_an_ordered_relay(engine_of) -> None:
    write(engine_of("conquiet_service"), "1", "2", "3")
    source = OutboxSource(engine_of("conquiet_relay"), ordered=True)
    assert publish(source, Taking()) == ["1", "2", "3"]


@pytest.mark.parametrize("ordered", [False, True])
def test_domain_events_from_the_service_to_the_cleanup(engine_of, ordered) -> None:
    service = engine_of("conquiet_service")
    made = [CATALOG.event(CANCELED, aggregate_id=ORDER) for _ in range(2)]
    with service.begin() as connection:
        ids = [str(id_) for id_ in emit(connection, *made)]
    rows = "outbox_events"
    refused(service, f"TABLE {rows}", f"DELETE FROM {rows}", f"UPDATE {rows} SET last_error = ''")

    relay, sink = engine_of("conquiet_relay"), Taking(ids[-1])
    assert publish(EventSource(relay, ordered=ordered, max_attempts=1), sink) == [ids[0]]
    insert = f"INSERT INTO {rows} DEFAULT VALUES"
    refused(relay, insert, f"DELETE FROM {rows}", f"UPDATE {rows} SET payload_json = '1'")

    operator = Inspection(engine_of("conquiet_operator"), rows, max_attempts=1)
    assert operator.retry() == [ids[-1]]
    refused(engine_of("conquiet_operator"), insert, f"UPDATE {rows} SET published_at = NULL")

    assert len(Inspection(engine_of("conquiet_reader"), rows).entries()) == 1
    refused(engine_of("conquiet_reader"), insert, f"UPDATE {rows} SET attempt_count = 0")

    cleanup = engine_of("conquiet_cleanup")
    assert Inspection(cleanup, rows).prune(1e-6) == 1
    refused(cleanup, insert, f"UPDATE {rows} SET payload_json = '1'", f"DROP TABLE {rows}")


PAGES = (
    *("/", "/dead-letters", "/outbox", "/outbox?state=parked", "/processes", "/trace?id=bad"),
    "/outbox?error=no",
)


@pytest.mark.parametrize("role", ["conquiet_reader", "conquiet_operator"])
def test_a_dashboard_shows_every_page_and_does_what_its_role_may(
    as_role, engine_of, database_url, role
) -> None:
    write(engine_of("conquiet_service"), "1", "bad")
    publish(OutboxSource(engine_of("conquiet_relay"), max_attempts=1), Taking())
    owner = engine(database_url)
    with closing(LogSource(owner, "orders", "billing", max_attempts=1)) as source:
        while not source.dead:
            for message in source.read(10, 5.0):
                message.nack(ValueError("no"))
    owner.dispose()
    app = dashboard(database=as_role(role), broker=None, auth=Open())
    try:
        client = Browser(app)
        for path in PAGES:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            kept = "processed_messages was not searched" in answer.text  # the inbox is not theirs
            assert kept is path.startswith("/trace"), path
            assert answer.text.count("permission denied") == kept, path
        row = client.get("/outbox/row", params={"id": "bad"})
        done = client.post("/outbox/retry", data=form_of(row, "/outbox/retry"))
        has_it = role == "conquiet_operator"
        assert ("bad has new attempts" in done.text) is has_it
        assert ("permission denied" in done.text) is not has_it
        letters = {"stream": "?topic=orders&group=billing"}
        asked = client.get("/dead-letters/drop", params=letters)
        done = client.post("/dead-letters/drop", data=form_of(asked, "/dead-letters/drop"))
        assert ("messages dropped" in done.text) is has_it
        assert ("permission denied" in done.text) is not has_it
    finally:
        app.close()
