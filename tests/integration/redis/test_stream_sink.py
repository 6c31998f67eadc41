"""The stream sink: partitions, mapping, and messages that fail alone."""

from __future__ import annotations

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers.base import BaseParser
from tests.integration.redis.conftest import numbered

from conquiet.errors import ConfigError, GivenBack, InvalidMessage, SinkUnavailable
from conquiet.message import Message
from conquiet.redis import StreamSink, Topic
from conquiet.redis.topic import beside, streams_of
from conquiet.redis.wire import is_unwilling


def fields(client, stream):
    return [entry for _, entry in client.xrange(stream)]


def test_a_message_is_one_entry_with_a_field_per_attribute(redis_client):
    StreamSink(redis_client, "orders").publish(numbered(1, subject="order-7"))
    [entry] = fields(redis_client, "orders")
    assert entry == {
        b"id": b"m-0",
        b"type": b"sample",
        b"source": b"/test",
        b"subject": b"order-7",
        b"specversion": b"1.0",
        b"data": b"0",
    }


def test_a_batch_is_one_round_trip_and_no_stream_is_ever_trimmed(recorded, redis_client):
    sink = StreamSink(redis_client, "orders")
    sink.publish(numbered(1))
    commands = [c for c in recorded(lambda: sink.publish_each(numbered(50))) if c.startswith("X")]
    assert len(commands) == 50
    assert all(command.startswith("XADD orders * ") for command in commands)


def test_a_topic_goes_where_it_is_mapped(redis_client):
    sink = StreamSink(redis_client, streams={"orders": "shop.orders", "sales": Topic("s", 2)})
    messages = numbered(3)
    for message, topic in zip(messages, ["orders", "sales", "other"], strict=True):
        message.topic = topic
    assert sink.publish_each(messages) == [None, None, None]
    streams = {key.decode() for key in redis_client.scan_iter()}
    assert streams in ({"shop.orders", "s:{0}", "other"}, {"shop.orders", "s:{1}", "other"})


def test_a_message_without_a_topic_fails_alone(redis_client):
    messages = numbered(2)
    messages[1].topic = "orders"
    first, second = StreamSink(redis_client).publish_each(messages)
    assert isinstance(first, ConfigError)
    assert second is None


def test_the_messages_of_a_key_share_a_stream_in_their_order(redis_client):
    messages = [m for n in range(20) for m in numbered(10, n * 10, partitionkey=f"customer-{n}")]
    StreamSink(redis_client, "orders", partitions=4).publish(messages)
    seen = {}
    for stream in Topic("orders", 4).streams:
        assert redis_client.exists(stream)
        for entry in fields(redis_client, stream):
            seen.setdefault(entry[b"partitionkey"], []).append((stream, int(entry[b"data"])))
    for places in seen.values():
        assert len({stream for stream, _ in places}) == 1
        assert [n for _, n in places] == sorted(n for _, n in places)


def test_what_has_no_key_is_spread(redis_client):
    StreamSink(redis_client, "orders", partitions=4).publish(numbered(200))
    lengths = [redis_client.xlen(stream) for stream in Topic("orders", 4).streams]
    assert min(lengths) > 20


@given(key=st.text(), partitions=st.integers(1, 64))
def test_every_key_has_a_partition(key, partitions):
    topic = Topic("orders", partitions)
    assert 0 <= topic.partition(key) < partitions
    assert topic.stream(key) in topic.streams


def test_where_a_key_lives_never_changes():
    # A change here would break the order of every key of every user.
    keys = ["", "größer", *(f"customer-{n}" for n in range(8))]
    partitions = [Topic("orders", 8).partition(key) for key in keys]
    assert partitions == [0, 7, 4, 7, 3, 0, 4, 7, 3, 0]


def test_the_keys_of_one_partition_differ_in_their_lower_bits():
    import zlib

    topic = Topic("orders", 4)
    mine = [key for key in map(str, range(1_000)) if topic.partition(key) == 0]
    lanes = [sum(zlib.crc32(key.encode()) % 4 == lane for key in mine) for lane in range(4)]
    assert min(lanes) > len(mine) / 10


@pytest.mark.parametrize("ordered", [False, True])
def test_a_key_of_another_type_is_not_the_fault_of_the_message(redis_client, ordered):
    redis_client.set("broken", "text")
    messages = numbered(3)
    messages[1].topic = "broken"
    answers = StreamSink(redis_client, "orders", ordered=ordered).publish_each(messages)
    assert [answer is None for answer in answers] == [True, False, True]
    assert "WRONGTYPE" in str(answers[1])
    assert isinstance(answers[1], SinkUnavailable)


@pytest.mark.parametrize("ordered", [False, True])
def test_publish_raises_if_redis_refused_a_message(redis_client, ordered):
    sink = StreamSink(redis_client, "orders", ordered=ordered)
    redis_client.set("broken", "text")
    broken = numbered(2)
    broken[1].topic = "broken"
    with pytest.raises(SinkUnavailable, match="WRONGTYPE"):
        sink.publish(broken)
    with pytest.raises(InvalidMessage, match="id"):
        sink.publish([Message(b"{}", {"type": "sold", "source": "/shop"})])
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(SinkUnavailable, match="takes nothing now"):
            sink.publish(numbered(2))
    finally:
        redis_client.config_set("maxmemory", 0)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_an_acl_forbids_is_not_the_fault_of_the_message(redis_client, ordered):
    redis_client.acl_setuser(
        "shop",
        enabled=True,
        nopass=True,
        keys=["orders"],
        commands=["+xadd", "+multi", "+exec"],
        reset=True,
    )
    settings = redis_client.connection_pool.connection_kwargs
    try:
        with redis.Redis(port=settings["port"], username="shop", password="x") as client:
            messages = numbered(2)
            messages[0].topic = "secret"
            answers = StreamSink(client, "orders", ordered=ordered).publish_each(messages)
        assert "fix its ACL" in str(answers[0])
        assert isinstance(answers[0], SinkUnavailable)
        assert answers[1] is None
    finally:
        redis_client.acl_deluser("shop")


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("setting", ["maxmemory", "min-replicas-to-write"])
def test_a_server_that_takes_no_writes_now_is_nobodys_fault(redis_client, setting, ordered):
    redis_client.config_set(setting, 1)
    try:
        answers = StreamSink(redis_client, "orders", ordered=ordered).publish_each(numbered(2))
    finally:
        redis_client.config_set(setting, 0)
    assert all(isinstance(answer, SinkUnavailable) for answer in answers)
    assert "takes nothing now" in str(answers[0])


@pytest.mark.parametrize(
    ("line", "is_the_servers_fault"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", True),
        ("READONLY You can't write against a read only replica.", True),
        ("LOADING Redis is loading the dataset in memory", True),
        ("MASTERDOWN Link with MASTER is down", True),
        ("CLUSTERDOWN The cluster is down", True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True),
        ("MOVED 3999 127.0.0.1:6381", True),
        ("EXECABORT Transaction discarded because of: OOM command not allowed", True),
        ("MISCONF Redis is configured to save RDB snapshots, but it cannot", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("BUSY Redis is busy running a script.", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("BUSYKEY Target key name already exists.", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("NOPERM User shop has no permissions", False),
    ],
)
def test_whose_fault_an_error_is(line, is_the_servers_fault):
    assert is_unwilling(BaseParser.parse_error(line)) is is_the_servers_fault


def test_an_ordered_sink_lets_nothing_overtake_a_message_that_failed(redis_client):
    sink = StreamSink(redis_client, "orders", partitions=4, ordered=True)
    assert sink.keeps_order
    messages = [m for n in range(5) for key in "abc" for m in numbered(1, n, partitionkey=key)]
    messages[3].attributes["price"] = 1.5  # the second of `a` can never be written
    answers = sink.publish_each(messages)
    failed = [m.key for m, answer in zip(messages, answers, strict=True) if answer is not None]
    assert failed == ["a"] * 4
    assert [isinstance(a, GivenBack) for a in answers if a is not None] == [False, True, True, True]


def test_an_ordered_sink_publishes_a_stream_whole_or_not_at_all(redis_client):
    redis_client.set("broken", "text")
    messages = numbered(4)
    messages[1].topic = messages[3].topic = "broken"
    answers = StreamSink(redis_client, "orders", ordered=True).publish_each(messages)
    assert [answer is None for answer in answers] == [True, False, True, False]
    assert redis_client.xlen("orders") == 2


@pytest.mark.parametrize("settings", [{"partitions": 0}, {"partitions": 1.5}, {"mode": "xml"}])
def test_settings_that_cannot_work_are_refused(settings, redis_client):
    with pytest.raises(ConfigError):
        StreamSink(redis_client, "orders", **settings)


def test_clients_that_cannot_serve_are_refused(redis_client):
    for client in (redis_client.pipeline(), object()):
        with pytest.raises(ConfigError, match="cannot be used"):
            StreamSink(client, "orders")


def test_keys_beside_a_stream_share_its_slot():
    from redis.crc import key_slot

    for stream in ("orders", "orders:{0}", "{a}b"):
        assert key_slot(beside(stream, "conquiet:x:").encode()) == key_slot(stream.encode())


def test_streams_know_their_topic():
    given = ["plain", Topic("sales", 2), "orders:{3}"]
    assert streams_of(given) == {
        "plain": "plain",
        "sales:{0}": "sales",
        "sales:{1}": "sales",
        "orders:{3}": "orders",
    }
