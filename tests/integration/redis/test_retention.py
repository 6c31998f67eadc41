"""Retention: entries go only when all groups and readers are done; consumers only when empty."""

from __future__ import annotations

import time

import pytest
from tests.integration.redis.conftest import GROUP, STREAM

from conquiet.errors import ConfigError
from conquiet.redis import Readers, remove_idle_consumers, trim_stream
from conquiet.redis.group import GroupStream
from conquiet.redis.wire import Server, Wire, server_of


@pytest.fixture(params=["MINID", "XDEL"])
def old_and_new(request, monkeypatch):
    """With XTRIM MINID of Redis 6.2, and as on 6.0."""
    if request.param == "XDEL":
        import sys

        module = sys.modules["conquiet.redis.retention"]
        monkeypatch.setattr(module, "server_of", lambda *_: Server("redis", "6.0.16"))


@pytest.fixture
def entries(publish, redis_client):
    publish(10)
    return [entry_id.decode() for entry_id, _ in redis_client.xrange(STREAM)]


def left(client):
    return [int(fields[b"data"]) for _, fields in client.xrange(STREAM)]


def trim(client, **settings):
    return trim_stream(client, STREAM, exact=True, **settings)


@pytest.mark.usefixtures("old_and_new")
class TestTrim:
    def test_what_is_pending_stays_and_all_above_it(self, source, entries, redis_client):
        messages = source().read(6, 1.0)
        for message in [*messages[:2], *messages[3:]]:
            message.ack()
        done = trim(redis_client)
        assert left(redis_client) == list(range(2, 10))
        assert (done.removed, done.below, done.kept_by) == (2, entries[2], f"group {GROUP}")

    def test_what_was_acked_may_go(self, source, entries, redis_client):
        for message in source().read(6, 1.0):
            message.ack()
        assert trim(redis_client).removed == 6
        assert left(redis_client) == [6, 7, 8, 9]
        assert trim(redis_client).removed == 0

    def test_the_slowest_group_counts(self, source, entries, redis_client):
        for group, count in (("fast", 9), ("slow", 2)):
            for message in source(group=group).read(count, 1.0):
                message.ack()
        assert trim(redis_client).kept_by == "group slow"
        assert left(redis_client) == list(range(2, 10))

    def test_a_group_that_never_read_needs_everything(self, source, entries, redis_client):
        source(group="new")
        assert trim(redis_client).removed == 0

    def test_a_registered_reader_counts_without_any_group(self, entries, redis_client):
        Readers(redis_client, STREAM).register("spark")
        assert trim(redis_client).removed == 0
        assert Readers(redis_client, STREAM).advance("spark", entries[3])
        done = trim(redis_client)
        assert (done.removed, done.kept_by) == (4, "reader spark")

    def test_the_retention_keeps_what_all_have_done_with(self, source, entries, redis_client):
        for message in source().read(10, 1.0):
            message.ack()
        done = trim(redis_client, keep_seconds=3600)
        assert (done.removed, done.kept_by) == (0, "the retention")
        assert trim(redis_client, keep_seconds=0).removed >= 9

    def test_a_stream_that_nobody_reads_is_left_alone(self, entries, redis_client):
        done = trim(redis_client)
        assert (done.removed, done.kept_by) == (0, "no group or reader has read it yet")

    def test_a_stream_that_does_not_exist_is_no_error(self, redis_client):
        assert trim_stream(redis_client, "nothing").removed == 0

    def test_a_dry_run_counts_and_deletes_nothing(self, source, entries, redis_client):
        for message in source().read(6, 1.0):
            message.ack()
        assert trim(redis_client, dry_run=True).removed == 6
        assert len(left(redis_client)) == 10


def test_by_default_whole_blocks_go(publish, source, redis_client):
    publish(500)
    for message in source().read(450, 1.0):
        message.ack()
    removed = trim_stream(redis_client, STREAM).removed
    assert 300 <= removed <= 450


def test_readers_move_forward_only(redis_client):
    assert not Readers(redis_client, STREAM).advance("spark", "5-0")  # unknown
    Readers(redis_client, STREAM).register("spark", "5-0")
    assert not Readers(redis_client, STREAM).advance("spark", "4-9")
    assert Readers(redis_client, STREAM).advance("spark", "10-0")
    assert Readers(redis_client, STREAM).positions() == {"spark": "10-0"}
    assert Readers(redis_client, STREAM).remove("spark")
    assert not Readers(redis_client, STREAM).remove("spark")


@pytest.mark.parametrize("position", ["", "soon", "1-", "$", "-1"])
def test_a_position_is_an_entry_id(position, redis_client):
    with pytest.raises(ConfigError):
        Readers(redis_client, STREAM).register("spark", position)


def test_no_consumer_is_removed_while_it_holds_something(source, publish, redis_client):
    publish(1)
    one = source(consumer="one")
    [message] = one.read(1, 1.0)
    name = GroupStream(Wire(redis_client), STREAM, STREAM, GROUP, "one")
    assert name.remove_consumers([b"one"]) == []
    message.ack()
    assert name.remove_consumers([b"one"]) == [b"one"]
    assert redis_client.xinfo_consumers(STREAM, GROUP) == []


def test_idle_consumers_are_removed(source, publish, redis_client):
    publish(1)
    source(consumer="busy").read(1, 1.0)
    source(consumer="idle").read(1, 0.01)
    assert remove_idle_consumers(redis_client, STREAM, GROUP, idle=3600) == []
    assert remove_idle_consumers(redis_client, STREAM, GROUP, idle=0) == ["idle"]


def test_a_worker_removes_the_names_of_crashed_consumers_by_itself(
    source, publish, redis_client, monkeypatch
):
    monkeypatch.setattr("conquiet.redis.consumer.IDLE_SECONDS", 0.05)
    publish(1)
    source(consumer="holds").read(1, 1.0)
    for n in range(250):
        redis_client.xgroup_createconsumer(STREAM, GROUP, f"crashed-{n}")
    redis_client.hset(f"conquiet:leases:{{{STREAM}}}", f"7:{GROUP}:crashed-0", 60_000)
    time.sleep(0.1)
    alive = source(consumer="alive")
    alive.read(1, 0.05)
    names = {row["name"] for row in redis_client.xinfo_consumers(STREAM, GROUP)}
    assert names == {b"holds", b"alive"}
    leases = redis_client.hkeys(f"conquiet:leases:{{{STREAM}}}")
    assert sorted(leases) == [b"7:billing:alive", b"7:billing:holds"]


def test_a_living_consumer_whose_name_was_removed_stores_its_lease_again(source, redis_client):
    alive = source(consumer="alive", lease=7.0)
    alive.read(1, 0.05)
    assert remove_idle_consumers(redis_client, STREAM, GROUP, idle=0) == ["alive"]
    assert redis_client.hgetall(f"conquiet:leases:{{{STREAM}}}") == {}
    alive.read(1, 0.05)
    assert redis_client.hgetall(f"conquiet:leases:{{{STREAM}}}") == {b"7:billing:alive": b"7000"}
    [row] = redis_client.xinfo_consumers(STREAM, GROUP)
    assert row["name"] == b"alive"


def test_the_server_tells_its_version(redis_client):
    server = server_of(redis_client)
    assert server.at_least("6.0")
    assert not server.at_least("99")
