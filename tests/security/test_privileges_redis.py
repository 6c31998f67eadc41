"""Each process does its work with the ACL that docs/security.md shows, and can do no more."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pyarrow as pa
import pytest
import redis
from pyspark import TaskContext
from tests.integration.kombu.brokers import connected
from tests.integration.kombu.test_connections import round_trip
from tests.security.rights import ACLS, PAGE
from tests.spark.log.conftest import Log, Query
from tests.waiting import eventually
from tests.web.browsing import Browser
from tests.web.test_actions import form_of

from conquiet import Message, cli
from conquiet.errors import TryLater
from conquiet.operations.history import Key, RedisKeeper
from conquiet.redis import Outbox, OutboxSource, StreamSink, StreamSource
from conquiet.spark.log.connection import disconnect
from conquiet.spark.log.writer import stream_writer
from conquiet.web import Open, dashboard

EVENT = {"specversion": "1.0", "id": "1", "type": "sold", "source": "/shop", "subject": "7"}


@pytest.fixture
def url_of(redis_client, redis_url):
    """The URL of one of the users of the page."""
    for name, rights in ACLS.items():
        redis_client.execute_command("ACL", "SETUSER", name, "reset", *rights)
    yield lambda name: redis_url.replace("redis://", f"redis://{name}:PASSWORD@", 1)
    disconnect()
    for name in ACLS:
        redis_client.execute_command("ACL", "DELUSER", name)


@pytest.fixture
def as_user(url_of):
    """A client that has logged in as one of them."""
    clients = []

    def made(name):
        clients.append(redis.Redis.from_url(url_of(name)))
        return clients[-1]

    yield made
    for client in clients:
        client.close()


def denied(client, *commands):
    for command in commands:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


def publish(client, *ids, stream="orders"):
    sink = StreamSink(client, stream)
    answers = sink.publish_each([Message(b'{"n": 1}', {**EVENT, "id": str(id_)}) for id_ in ids])
    sink.close()
    assert set(answers) == {None}


def bury(worker, count):
    """Entries that are no events become dead letters."""
    source = StreamSource(worker, "orders", "billing", max_attempts=1, lease=5)
    while source.dead < count:
        for message in source.read(10, 0.1):
            assert message.ack()
    source.close()


def test_a_relay(as_user) -> None:
    relay = as_user("conquiet_relay")
    publish(relay, 1, 2)
    denied(relay, "XRANGE orders - +", "XDEL orders 1-1", "XADD others * a b", "KEYS *")


def test_a_worker(as_user, redis_client) -> None:
    publish(redis_client, 0, 1, 2)
    redis_client.xadd("orders", {"no": "event"})
    worker = as_user("conquiet_worker")
    source = StreamSource(worker, "orders", "billing", max_attempts=1, lease=5)
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


def allow(redis_client, user, sentence):
    """Give a user the commands that a sentence of the page adds."""
    found = re.search(re.escape(sentence) + r".*?`((?:\s*\+[a-z|]+)+)`", PAGE, re.DOTALL)
    assert found is not None, sentence
    redis_client.execute_command("ACL", "SETUSER", user, *found[1].split())


def test_a_worker_that_tries_again_later(as_user, redis_client) -> None:
    publish(redis_client, 0, 1)
    allow(redis_client, "conquiet_worker", "a worker also needs")
    source = StreamSource(as_user("conquiet_worker"), "orders", "billing", lease=5)
    source.allow_delays(3, ordered=False)
    done = []

    def handle():
        for message in source.read(10, 0.1):
            if message.deliveries == 1:
                message.nack(TryLater(0.05, ValueError("not yet")))
            elif message.ack():
                done.append(message.id)
        return len(done) == 2

    eventually(handle, timeout=60)
    source.close()
    assert redis_client.xpending("orders", "billing")["pending"] == 0


def test_the_history_of_handlers(as_user, redis_client) -> None:
    found = re.search(r"need the keys `(~conquiet:history:\*)` and `([^`]+)`", PAGE)
    assert found is not None
    name = "conquiet_relay"
    redis_client.execute_command("ACL", "SETUSER", name, found[1], *found[2].split())
    keeper = RedisKeeper(as_user(name))
    keeper.write({Key("relay", "outbox", "", "published"): 3, Key("process", "p", "", "seen"): 0})
    read = RedisKeeper(as_user("conquiet_dashboard")).read(5)
    assert [entry.value for entry in read.entries if entry.key.kind == "relay"] == [3]


def test_delayed_events_of_an_outbox(as_user, redis_client) -> None:
    outbox = Outbox("orders", "orders", source="/shop")
    user = "conquiet_worker"
    allow(redis_client, user, "An outbox in Redis that holds delayed events needs")
    of_any_outbox = ("+multi", "+exec", "+xdel")  # what is published is deleted
    redis_client.execute_command("ACL", "SETUSER", user, *of_any_outbox)
    client = as_user(user)
    with client.pipeline() as pipeline:
        for id_, seconds in (("soon", 0.05), ("far", 3600)):
            outbox.add(pipeline, [Message(b"{}", {**EVENT, "id": id_})], after=seconds)
        pipeline.execute()
    assert outbox.cancel(client, "far") is True
    relay, published = OutboxSource(client, "orders", consumer="relay"), []

    def publish_some():
        for message in relay.read(10, 0.1):
            published.append(message.id)
            message.ack()
        return bool(published)

    eventually(publish_some, timeout=60)
    relay.close()
    assert published == ["soon"]


def test_spark_reads(as_user, url_of, redis_client, tmp_path) -> None:
    publish(redis_client, *range(120))
    log = Log(None, redis_client, url_of("conquiet_spark"), tmp_path)
    limits = {"maxOffsetsPerTrigger": 50, "readerName": "spark", "mirrorGroup": "spark"}
    query = Query(log, streams="orders*", **limits)
    found = []
    while numbers := query.batch():
        found += numbers
    assert sorted(found) == list(range(120))
    query.reader.commit(query.offset)
    assert redis_client.keys("conquiet:readers:*")
    user = as_user("conquiet_spark")
    denied(user, "XADD orders * a b", "XDEL orders 1-1", "XTRIM orders MAXLEN 0", "DEL orders")
    denied(user, "XRANGE others - +", "GET conquiet:inbox:a", "FLUSHALL", "CONFIG GET *")


def test_spark_writes(as_user, url_of, redis_client) -> None:
    context = TaskContext._getOrCreate()
    known = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "7", "spark.jobGroup.id": "r"}
    context._partitionId = context._attemptNumber = context._taskAttemptId = 0
    context._localProperties = known
    options = {"url": url_of("conquiet_spark_sink"), "topic": "orders", "source": "/shop"}
    options |= {"type": "sold", "sliceRows": "2"}
    columns = {"event_id": [str(n) for n in range(5)], "data": ["{}"] * 5}
    for _ in range(2):  # an attempt, and the one after it
        writer = stream_writer(options, SimpleNamespace(names=list(columns)), False)
        writer.write(iter([pa.record_batch(columns)]))
    context._localProperties = {**known, "spark.jobGroup.id": "another run"}
    writer = stream_writer(options, SimpleNamespace(names=list(columns)), False)
    writer.write(iter([pa.record_batch(columns)]))
    assert redis_client.xlen("orders") == 5
    user = as_user("conquiet_spark_sink")
    denied(user, "XDEL orders 1-1", "DEL orders", "XADD others * a b", "SET conquiet:inbox:a 1")
    denied(user, "FLUSHALL", "CONFIG GET *", "KEYS *")


def test_kombu(as_user, url_of) -> None:
    with connected(url_of("kombu"), lease=1) as connection:
        round_trip(connection)
        lease = connection.default_channel.consumer.subscribe("orders")
        for work in (lease.renew, lease.reap, lease.sweep):
            work()  # in the background, a missing right would only be logged
    denied(as_user("kombu"), "XADD orders * a b", "FLUSHALL", "CONFIG GET *", "KEYS *")


# --- who looks, and who acts ----------------------------------------------------------------


@pytest.fixture
def filled(as_user, redis_client):
    publish(redis_client, 1, 2, 3)
    for _ in range(2):
        redis_client.xadd("orders", {"no": "event"})
    bury(as_user("conquiet_worker"), 2)
    publish(redis_client, 4)
    redis_client.xreadgroup("billing", "somebody", {"orders": ">"})


PAGES = (
    *("/", "/streams", "/stream?name=orders", "/group?stream=orders&name=billing", "/processes"),
    *("/dead-letters", "/dead-letters?stream=orders:dead", "/trace?id=1"),
)


@pytest.mark.parametrize("user", ["conquiet_dashboard", "conquiet_operator"])
def test_a_dashboard_shows_every_page_and_does_what_its_user_may(
    url_of, redis_client, filled, user
) -> None:
    app = dashboard(database=None, broker=url_of(user), auth=Open())
    try:
        client = Browser(app)
        for path in PAGES:
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            assert "permissions" not in answer.text, path
        page = client.get("/dead-letters/replay", params={"stream": "orders:dead"})
        done = client.post("/dead-letters/replay", data=form_of(page, "/dead-letters/replay"))
        has_it = user == "conquiet_operator"
        assert ("2 messages sent again" in done.text) is has_it, done.text
        assert ("permissions" in done.text) is not has_it
        assert redis_client.xlen("orders:dead") == (0 if has_it else 2)
    finally:
        app.close()


def test_an_operator_at_the_command_line(as_user, url_of, filled, redis_client, capsys) -> None:
    url = ["--broker", url_of("conquiet_operator")]
    for command in (
        *("streams list", "streams lag orders", "queue stats orders"),
        *("queue pending orders billing", "dead-letters list orders:dead"),
        *("dead-letters drop orders:dead --all --yes", "streams trim orders --yes"),
        "queue claim orders billing --to me --min-idle 0",
    ):
        assert cli.main([*command.split(), *url]) == 0, (command, capsys.readouterr())
    assert redis_client.xlen("orders:dead") == 0
    operator = as_user("conquiet_operator")
    denied(operator, "FLUSHALL", "DEL orders", "CONFIG GET *", "XGROUP DESTROY orders billing")
    reader = as_user("conquiet_dashboard")
    denied(reader, "XADD orders * a b", "XDEL orders 1-1")
    for script in ("redis.call('XADD', 'orders', '*', 'a', 'b')", "redis.call('FLUSHALL')"):
        with pytest.raises(redis.ResponseError, match=r"ACL failure|NOPERM|can't run"):
            reader.eval(script, 0)
