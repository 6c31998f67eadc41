"""Every command and option that is sent is known to Redis 6.0, or a probe allowed it."""

from __future__ import annotations

import re
import sys
import time

import pytest
from tests.integration.redis.conftest import GROUP, STREAM, numbered

from conquiet.errors import GivenBack
from conquiet.redis import (
    OutboxSource,
    Readers,
    StreamSink,
    StreamSource,
    Topic,
    remove_idle_consumers,
    trim_stream,
)
from conquiet.redis.wire import Server, server_of

ID = r"(\d+-\d+|0)"
KEY = r"\S+"
KNOWN_TO_6_0 = [
    rf"XGROUP CREATE {KEY} \S+ {ID} MKSTREAM",
    rf"XADD {KEY} \* .*",
    rf"XREADGROUP GROUP \S+ \S+ COUNT [1-9]\d*( BLOCK [1-9]\d*)? STREAMS( {KEY})+( >)+",
    rf"XREADGROUP GROUP \S+ \S+ COUNT [1-9]\d* STREAMS {KEY} {ID}",
    rf"XACK {KEY} \S+( {ID})+",
    rf"XDEL {KEY}( {ID})+",
    # neither IDLE nor a range that excludes its start
    rf"XPENDING {KEY} \S+( (-|{ID}) (\+|{ID}) \d+( \S+)?)?",
    rf"XCLAIM {KEY} \S+ \S+ \d+( {ID})+( IDLE \d+)?( RETRYCOUNT \d+)?( JUSTID)?",
    rf"XRANGE {KEY} (-|{ID}) (\+|{ID})( COUNT \d+)?",
    rf"XREVRANGE {KEY} \+ - COUNT 1",
    rf"XINFO (STREAM|GROUPS|CONSUMERS) {KEY}.*",
    r"(HSET|HGETALL|HDEL) conquiet:(leases|readers):\S+.*",
    r"EVAL .* 2 \S+ \S+ \S+( \S+ \S+)+",  # removes consumers
    rf"EVAL .* 1 {KEY} \S+ (new|known) {ID}",  # counts trimmed entries
    r"XGROUP DELCONSUMER \S+ \S+ \S+",  # in the script
    rf"EXISTS( {KEY})+",
    rf"EVAL .* 4( {KEY}){{4}} \d+",  # moves delayed events that are due, by these:
    r"ZRANGEBYSCORE conquiet:delayed:\S+ -inf \d+ LIMIT 0 \d+",
    r"ZRANGE conquiet:delayed:\S+ 0 0 WITHSCORES",
    r"DEL conquiet:delayed-entries:\S+",
    r"MULTI|EXEC|TIME|INFO server",
]
SENT_TO_REDIS_7 = rf"XGROUP SETID {KEY} \S+ {ID} ENTRIESREAD \d+"  # by that script
ALLOWED_BY_PROBE = rf"XTRIM {KEY} MINID [~=] {ID}"
# redis-py greets the server so, and takes no for an answer from an old one
HANDSHAKE = re.compile(r"(HELLO|CLIENT|AUTH|SELECT|PING|ECHO)\b")


def use_everything(client):
    """Every path of sources, sinks and maintenance that sends a command of its own."""
    sink = StreamSink(client, STREAM)
    sink.publish(numbered(12))
    StreamSink(client, "sales", partitions=2, mode="structured").publish(numbered(4))
    settings = {"lease": 0.05, "claim_interval": 0.01, "backoff": 0.0}
    one = StreamSource(client, STREAM, GROUP, "one", **settings)
    first, second, third, *held = one.read(10, 0.1)
    first.ack()
    second.nack(ValueError("failed"))
    third.nack(GivenBack("not now"))
    one.read(10, 0.02)
    time.sleep(0.02)
    one.renew(held)
    client.xdel(STREAM, held[0].acking.token.id)
    time.sleep(0.06)
    other = StreamSource(client, STREAM, GROUP, **settings)
    other.read(100, 0.05)  # claims
    again = StreamSource(client, STREAM, GROUP, "one", **settings)
    again.read(100, 0.01)  # its own from before
    client.xadd(STREAM, {"not": "a CloudEvent"})
    for _ in range(4):
        again.read(100, 0.01)
    list(again.replay())
    late = StreamSource(client, [STREAM, Topic("sales", 2)], "late", start="now", **settings)
    late.read(100, 0.02)
    late.read(1, 0.02)
    client.xgroup_destroy(STREAM, "late")
    late.read(100, 0.02)
    relay = OutboxSource(client, "sales:{0}")
    for message in relay.read(10, 0.01):
        message.ack()
    Readers(client, STREAM).register("spark")
    Readers(client, STREAM).advance("spark", "1-0")
    for item in (one, other, again, late, relay):
        item.close()
    trim_stream(client, STREAM, keep_seconds=1.0, exact=True)
    trim_stream(client, STREAM, dry_run=True)
    remove_idle_consumers(client, STREAM, GROUP, idle=0)


@pytest.fixture
def commands(recorded, redis_client, monkeypatch):
    monkeypatch.setattr("conquiet.redis.consumer.PAGE", 2)  # so that a scan goes on where it was
    seen = recorded(lambda: use_everything(redis_client))
    tests_own = re.compile(rf"XADD {STREAM} \* not|XGROUP DESTROY|XDEL {STREAM} \S+$")
    return [c for c in seen if not HANDSHAKE.match(c) and not tests_own.match(c)]


def unknown(commands, patterns):
    return [c for c in commands if not any(re.fullmatch(p, c, re.DOTALL) for p in patterns)]


def test_every_command_and_option_is_known_to_redis_6_0(commands):
    assert unknown(commands, [*KNOWN_TO_6_0, SENT_TO_REDIS_7, ALLOWED_BY_PROBE]) == []
    probes = [n for n, c in enumerate(commands) if c == "INFO server"]
    newer = [n for n, c in enumerate(commands) if re.match(ALLOWED_BY_PROBE, c)]
    assert newer
    assert all(any(probe < n for probe in probes) for n in newer)


def test_an_old_server_gets_old_commands_only(recorded, redis_client, monkeypatch):
    module = sys.modules["conquiet.redis.retention"]
    monkeypatch.setattr(module, "server_of", lambda *_: Server("redis", "6.0.16"))
    seen = recorded(lambda: use_everything(redis_client))
    assert not any("MINID" in command or "XAUTOCLAIM" in command for command in seen)


def test_the_recording_saw_every_kind_of_call(commands, redis_client):
    newer = [SENT_TO_REDIS_7] if server_of(redis_client).at_least("7.0") else []
    for pattern in [*KNOWN_TO_6_0, *newer, ALLOWED_BY_PROBE]:
        assert any(re.fullmatch(pattern, c, re.DOTALL) for c in commands), pattern


def test_no_read_blocks_for_ever(commands):
    assert not any(re.search(r" BLOCK 0\b", command) for command in commands)


def test_nothing_is_trimmed_by_length(commands):
    assert not any("MAXLEN" in command for command in commands)


def test_the_probe_reads_the_version_that_counts(redis_client):
    assert server_of(redis_client).version == redis_client.info("server")["redis_version"]
