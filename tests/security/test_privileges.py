"""Each process does its work with the rights that docs/security.md grants, and can do no more."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
import redis
from sqlalchemy import make_url, text
from sqlalchemy.exc import ProgrammingError

from conquiet import Message, Router
from conquiet.operations import peek, survey
from conquiet.operations.letters_in_stream import letter_streams
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.relay.inspection import Inspection
from conquiet.sql import Inbox, Outbox, OutboxSource, Transaction, engine, schema
from conquiet.sql.cleanup import Cleanup
from conquiet.sql.log import OutboxLog

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
[GRANTS] = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ACLS = {
    line.split()[2]: line.split()[3:]
    for line in PAGE.splitlines()
    if line.startswith("ACL SETUSER")
}
ROLES = re.findall(r"CREATE ROLE (\w+)", GRANTS)
EVENT = {"specversion": "1.0", "id": "1", "type": "sold", "source": "/shop", "subject": "7"}


# --- PostgreSQL -----------------------------------------------------------------------------


@pytest.fixture
def as_role(database_url):
    """An engine of this database for a login that has one role."""
    owner = engine(database_url)
    schema.init(owner)
    engines = [owner]
    with psycopg.connect(database_url, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"DROP ROLE IF EXISTS {role}_login")
            connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(GRANTS)
        for role in ROLES:
            connection.execute(f"CREATE ROLE {role}_login LOGIN PASSWORD 'secret' IN ROLE {role}")

    def made(role):
        if role == "owner":
            return owner
        url = make_url(database_url).set(username=f"{role}_login", password="secret")
        engines.append(engine(url))
        return engines[-1]

    yield made
    for one in engines:
        one.dispose()
    with psycopg.connect(database_url, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}_login")
            connection.execute(f"DROP ROLE {role}")


def write(as_role, *ids):
    """Events by a service: transaction, inbox and outbox around a handler."""
    service = as_role("conquiet_service")
    router = Router()
    router.use(Transaction(service), Inbox("billing"), Outbox("orders"))

    @router.raw(type="ask", source="/shop")
    def sell(message: Message[bytes]) -> list[Message[bytes]]:
        return [Message(b"{}", {**EVENT, "id": message.id})]

    batch = [Message(b"{}", {**EVENT, "id": id_, "type": "ask"}) for id_ in ids]
    results = router.process(batch)
    assert not any(isinstance(result, Exception) for result in results), results
    return service


class Taking:
    """A sink that takes what is not called bad."""

    def __init__(self):
        self.taken = []

    def publish(self, messages):
        self.taken += [message.id for message in messages if message.id != "bad"]
        return [ValueError("no") if message.id == "bad" else None for message in messages]

    def close(self):
        pass


def refused(made, *statements):
    for statement in statements:
        with (
            made.connect() as connection,
            pytest.raises(ProgrammingError, match=r"permission denied|must be owner"),
        ):
            connection.execute(text(statement))


DELETE, INSERT = "DELETE FROM outbox", "INSERT INTO outbox DEFAULT VALUES"


def test_postgresql_from_the_service_to_the_reader(as_role) -> None:
    service = write(as_role, "1", "2", "bad")
    refused(service, "SELECT * FROM outbox", DELETE, "UPDATE outbox SET published_at = now()")

    relay, sink = as_role("conquiet_relay"), Taking()
    source = OutboxSource(relay, max_attempts=1)
    outcome = Relay(source, sink).run_once()
    source.close()
    assert sink.taken == ["1", "2"]
    assert outcome.outage is None
    refused(
        relay, INSERT, DELETE, "UPDATE outbox SET data = ''", "SELECT * FROM processed_messages"
    )

    reader = as_role("conquiet_reader")
    assert [message.id for message in OutboxLog(reader).read()] == ["1", "2", "bad"]
    refused(reader, INSERT, DELETE, "UPDATE outbox SET attempts = 0", "TABLE processed_messages")

    operator = as_role("conquiet_operator")
    [parked] = Inspection(operator, "outbox").entries(parked=True)
    assert Inspection(operator, "outbox").retry([parked.id])
    refused(operator, INSERT, DELETE, "UPDATE outbox SET data = ''")

    cleanup = as_role("conquiet_cleanup")
    removed = Cleanup(cleanup, retention=timedelta(microseconds=1)).run_once()
    assert (removed.outbox, removed.inbox) == (2, 3)
    refused(cleanup, INSERT, "UPDATE outbox SET data = ''", "DROP TABLE outbox")
    for role in ROLES:
        refused(as_role(role), "CREATE TABLE mine (id int)", "ALTER TABLE outbox ADD mine int")


# --- Redis ----------------------------------------------------------------------------------


@pytest.fixture
def as_user(redis_client, redis_url):
    """A client that has logged in as one of the users of the page."""
    clients = []
    for name, rights in ACLS.items():
        redis_client.execute_command("ACL", "SETUSER", name, "reset", *rights)

    def made(name):
        url = redis_url.replace("redis://", f"redis://{name}:PASSWORD@", 1)
        clients.append(redis.Redis.from_url(url))
        return clients[-1]

    yield made
    for client in clients:
        client.close()
    for name in ACLS:
        redis_client.execute_command("ACL", "DELUSER", name)


def denied(client, *commands):
    for command in commands:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


def test_redis_from_the_relay_to_the_dashboard(as_user, redis_client) -> None:
    relay = as_user("conquiet_relay")
    messages = [Message(b"{}", {**EVENT, "id": str(number)}) for number in range(3)]
    sink = StreamSink(relay, "orders")
    assert sink.publish(messages) == [None] * 3
    sink.close()
    denied(relay, "XRANGE orders - +", "XDEL orders 1-1", "XADD others * a b", "KEYS *")
    redis_client.xadd("orders", {"no": "event"})

    worker = as_user("conquiet_worker")
    source = StreamSource(worker, "orders", "billing", max_deliveries=1, lease=5)
    found = source.read(10, 1.0)
    assert [message.id for message in found] == ["0", "1", "2"]
    assert all(message.ack() for message in found)
    while not source.dead:
        source.read(10, 0.1)
    source.close()
    assert redis_client.xlen("orders:dead") == 1
    assert redis_client.xpending("orders", "billing")["pending"] == 0
    denied(worker, "XDEL orders 1-1", "XTRIM orders MAXLEN 0", "DEL orders", "FLUSHALL", "KEYS *")
    denied(worker, "XADD others * a b", "CONFIG GET *", "ACL LIST")

    dashboard = as_user("conquiet_dashboard")
    assert len(peek(dashboard, "orders")) == 4
    [shown] = survey.streams(dashboard, "orders")
    assert (shown.name, shown.length, [group.name for group in shown.groups]) == (
        *("orders", 4),
        ["billing"],
    )
    assert letter_streams(dashboard) == {"orders:dead": 1}
    denied(dashboard, "XADD orders * a b", "XDEL orders 1-1", "XGROUP DESTROY orders billing")
    denied(dashboard, "FLUSHALL", "DEL orders", "CONFIG GET *", "EVAL return 0")
