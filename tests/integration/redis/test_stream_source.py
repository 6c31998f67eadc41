"""The stream source: groups, bounds, several streams, servers that refuse or are away."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import redis
from tests.integration.redis.conftest import GROUP, STREAM, ids, numbered
from tests.integration.redis.reading import read
from tests.waiting import eventually

from conquiet.errors import ConfigError, StoreError
from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource, Topic

# --- the group --------------------------------------------------------------------------------


def test_a_group_starts_at_the_beginning(publish, source):
    publish(3)
    assert len(read(source(), 3)) == 3


def test_a_group_that_starts_now_misses_what_was_before(publish, source):
    publish(3)
    late = source(start="now")
    publish(1, first=3)
    assert ids(late.read(10, 1.0)) == ["m-3"]


def test_the_stream_is_created_with_its_group(source, redis_client):
    source()
    assert redis_client.xinfo_groups(STREAM)[0]["name"] == GROUP.encode()


@pytest.mark.parametrize("how", ["stream", "group"])
def test_a_group_that_vanished_is_created_again(how, source, publish, redis_client, caplog):
    one = source()
    publish(1)
    read(one, 1)[0].ack()
    if how == "stream":
        redis_client.delete(STREAM)
        publish(1, first=1)
        expected = ["m-1"]
    else:
        redis_client.xgroup_destroy(STREAM, GROUP)
        publish(1, first=1)
        expected = ["m-0", "m-1"]  # delivered again rather than lost: the inbox knows m-0
    assert ids(read(one, len(expected))) == expected
    assert "created again" in caplog.text


def test_a_group_from_now_that_vanished_begins_where_it_began(source, publish, redis_client):
    publish(2)
    one = source(start="now")
    publish(1, first=2)
    redis_client.xgroup_destroy(STREAM, GROUP)
    publish(1, first=3)
    assert ids(read(one, 2)) == ["m-2", "m-3"]


def test_a_stream_deleted_during_a_blocking_read_is_created_again(source, publish, redis_client):
    one = source()
    got = []
    reader = threading.Thread(target=lambda: got.extend(read(one, 1)))
    reader.start()
    eventually(lambda: redis_client.info("clients")["blocked_clients"])
    redis_client.delete(STREAM)
    publish(1)
    reader.join()
    assert ids(got) == ["m-0"]


# --- bounds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"block": 0},
        {"lease": 0},
        {"claim_interval": -1},
        {"max_in_flight": 0},
        {"max_attempts": 0},
        {"start": "yesterday"},
        {"group": ""},
        {"consumer": ""},
        {"streams": []},
        {"streams": ["a", "a"]},
    ],
)
def test_settings_that_cannot_work_are_refused(settings, source):
    with pytest.raises(ConfigError):
        source(**settings)


def test_a_key_that_is_no_stream_is_refused_with_the_reason(source, redis_client):
    redis_client.set(STREAM, "text")
    with pytest.raises(ConfigError, match="WRONGTYPE"):
        source()


def test_no_more_is_in_flight_than_asked(source, publish):
    one = source(max_in_flight=3)
    publish(10)
    held = read(one, 3)
    assert list(one.read(10, 0.05)) == []
    held[0].ack()
    assert len(one.read(10, 1.0)) == 1


def test_a_full_source_wakes_when_something_is_settled(source, publish):
    one = source(max_in_flight=1)
    publish(2)
    [held] = read(one, 1)
    timer = threading.Timer(0.1, held.ack)
    timer.start()
    began = time.monotonic()
    assert ids(one.read(1, 30.0)) == ["m-1"] or ids(one.read(1, 30.0)) == ["m-1"]
    assert time.monotonic() - began < 10
    timer.join()


# --- several streams, and replays -------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_several_streams_give_no_more_than_the_limit(limit, source, publish):
    for stream in "abc":
        publish(10, topic=stream)
    one = source(["a", "b", "c"])
    total = 0
    while batch := one.read(limit, 0.05):
        assert len(batch) <= limit
        total += len(batch)
    assert total == 30


def test_a_busy_stream_does_not_starve_the_others(source, publish):
    publish(500, topic="busy")
    publish(3, topic="calm")
    one = source(["busy", "calm"])
    first = [message.topic for message in one.read(10, 1.0)]
    assert first.count("calm") == 3
    few = source(["busy", "calm"], group="few")
    assert "calm" in {message.topic for _ in range(2) for message in few.read(1, 1.0)}


def test_what_one_stream_leaves_another_may_take(source, publish):
    publish(500, topic="busy")
    one = source(["busy", "a", "b", "c"])
    assert len(one.read(100, 1.0)) == 100


def test_partitions_of_a_topic_are_read_as_one(source, publish):
    publish(50, partitions=4, topic="sales", partitionkey="x")
    publish(50, first=50, partitions=4, topic="sales")
    one = source(Topic("sales", 4))
    got = read(one, 100)
    assert {message.topic for message in got} == {"sales"}
    assert ids([m for m in got if m.key]) == [f"m-{n}" for n in range(50)]


def test_one_partition_can_be_read_by_name(source, publish):
    publish(20, partitions=2, topic="sales")
    one = source("sales:{1}")
    got = one.read(100, 1.0)
    assert 0 < len(got) < 20
    assert {message.topic for message in got} == {"sales"}


def test_a_replay_merges_partitions_by_time(source, publish):
    publish(30, partitions=3, topic="sales")
    one = source(Topic("sales", 3))
    places = [message.locals["position"] for message in one.replay()]
    assert len(places) == 30
    assert places == sorted(places, key=lambda place: tuple(map(int, place.split("-"))))


def test_a_replay_leaves_out_what_is_no_cloudevent(source, publish, redis_client, caplog):
    publish(1)
    redis_client.xadd(STREAM, {"x": "y"})
    assert ids(source().replay()) == ["m-0"]
    assert "left out of a replay" in caplog.text


# --- a server that takes no writes now --------------------------------------------------------


@pytest.fixture
def full(redis_client):
    """The server is out of memory; call it to end that."""
    redis_client.config_set("maxmemory", 1)
    yield lambda: redis_client.config_set("maxmemory", 0)
    redis_client.config_set("maxmemory", 0)


@pytest.fixture
def unwilling(redis_client):
    """Make the server refuse every write, for want of replicas; and let it take them again."""

    def refuse(replicas):
        redis_client.config_set("min-replicas-to-write", replicas)

    yield refuse
    refuse(0)


def test_a_full_server_lets_a_source_be_made_and_read_later(source, publish, full):
    reader = source()
    with pytest.raises(StoreError, match="maxmemory"):
        reader.read(1, 0.01)
    full()
    publish(1)
    assert ids(read(reader, 1)) == ["m-0"]


def test_a_group_that_vanished_from_a_full_server_is_the_stores_fault(
    source, publish, redis_client
):
    publish(1)
    reader = source()
    redis_client.xgroup_destroy(STREAM, GROUP)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="maxmemory"):
            reader.read(1, 0.01)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert ids(read(reader, 1)) == ["m-0"]


def test_acks_that_the_server_takes_not_now_are_sent_later(source, publish, pending, unwilling):
    publish(3)
    reader = source()
    messages = read(reader, 3)
    unwilling(1)
    for message in messages:
        message.ack()
    assert len(pending()) == 3
    unwilling(0)
    eventually(lambda: list(reader.read(10, 0.01)) == [] and pending() == [])


def test_a_dead_letter_that_the_server_takes_not_now_is_written_later(
    source, publish, redis_client, pending, unwilling
):
    publish(1)
    reader = source(max_attempts=1)
    [message] = read(reader, 1)
    unwilling(1)
    message.nack(ValueError("no"))
    assert len(pending()) == 1
    unwilling(0)
    eventually(lambda: list(reader.read(10, 0.01)) == [] and pending() == [])
    assert redis_client.xlen(f"{STREAM}:dead") == 1


# --- a server that is away --------------------------------------------------------------------


def test_a_source_can_be_made_while_the_server_is_away(caplog):
    client = redis.Redis(port=1, retry=None)
    with client, caplog.at_level(logging.WARNING):
        source = StreamSource(client, STREAM, GROUP)
        with pytest.raises(StoreError):
            source.read(1, 0.1)
        source.close()


def test_publishing_wakes_a_blocked_reader_soon(source, redis_client):
    one = source(claim_interval=60.0)
    got = []
    reader = threading.Thread(target=lambda: got.append((one.read(1, 30.0), time.monotonic())))
    reader.start()
    eventually(lambda: redis_client.info("clients")["blocked_clients"])
    StreamSink(redis_client, STREAM).publish(numbered(1))
    sent = time.monotonic()
    reader.join()
    assert got[0][1] - sent < 2
    assert isinstance(got[0][0][0], Message)
