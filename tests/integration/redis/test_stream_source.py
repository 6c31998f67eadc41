"""The stream source, trap by trap (R3–R15); the contracts of all sources are in conformance."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import redis
from tests.integration.redis.conftest import GROUP, STREAM, ids, numbered
from tests.waiting import eventually

from conquiet.errors import ConfigError, GivenBack, StoreError
from conquiet.message import Message
from conquiet.redis import StreamSink, StreamSource, Topic, outbox_source

SHORT = 0.1


def read(source, count, limit=100):
    """Exactly `count` messages."""
    got = []
    eventually(
        lambda: got.extend(source.read(min(limit, count - len(got)), 0.05)) or got[count - 1 :]
    )
    return got


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


# --- R4, R5, R6: claims -----------------------------------------------------------------------


def test_r4_what_a_dead_consumer_held_is_claimed_and_delivered(source, publish, pending):
    dead, alive = source(consumer="dead", lease=SHORT), source(consumer="alive", lease=SHORT)
    publish(3)
    read(dead, 3)
    got = read(alive, 3)
    assert ids(got) == ["m-0", "m-1", "m-2"]
    assert [message.deliveries for message in got] == [2, 2, 2]
    assert alive.claimed == 3
    assert pending() == [("alive", 2)] * 3


def test_r3_a_long_pending_list_is_scanned_page_by_page(source, publish):
    dead = source(lease=SHORT)
    publish(1_203)
    read(dead, 1_203, limit=1_203)
    alive = source(lease=SHORT)
    time.sleep(SHORT)
    got = read(alive, 1_203)
    assert ids(got) == [f"m-{n}" for n in range(1_203)]


def test_r5_a_source_does_not_claim_what_itself_is_working_on(source, publish):
    one = source(lease=SHORT)
    publish(1)
    read(one, 1)
    time.sleep(2 * SHORT)
    assert list(one.read(10, 2 * SHORT)) == []


def test_r5_a_renewal_counts_no_delivery(source, publish, pending):
    one = source(consumer="one", lease=SHORT)
    publish(1)
    held = read(one, 1)
    time.sleep(SHORT / 2)
    one.renew(held)
    assert pending() == [("one", 1)]


def test_a_lease_is_that_of_the_holder_not_of_the_claimer(source, publish):
    patient, hasty = source(lease=60.0), source(lease=SHORT)
    publish(1)
    read(patient, 1)
    time.sleep(2 * SHORT)
    assert list(hasty.read(10, 2 * SHORT)) == []


def test_a_consumer_that_told_no_lease_is_judged_by_the_own(source, publish, redis_client):
    publish(1)
    one = source(lease=SHORT)
    redis_client.xreadgroup(GROUP, "by hand", {STREAM: ">"})
    assert ids(read(one, 1)) == ["m-0"]


def test_r6_own_pending_entries_come_first_after_a_restart(source, publish):
    source_settings = {"consumer": "pod-0", "lease": 60.0}
    publish(5)
    crashed = source(**source_settings)
    read(crashed, 3)[0].ack()
    again = source(**source_settings)
    got = read(again, 4)
    assert ids(got) == ["m-1", "m-2", "m-3", "m-4"]
    assert [message.deliveries for message in got] == [2, 2, 1, 1]


def test_r6_own_pending_entries_are_read_in_parts_and_once(source, publish):
    publish(25)
    read(source(consumer="pod-0"), 25)
    again = source(consumer="pod-0")
    got = read(again, 25, limit=10)
    assert ids(got) == [f"m-{n}" for n in range(25)]
    assert list(again.read(10, 0.05)) == []


def test_names_that_were_made_up_do_not_pile_up(source, publish, redis_client):
    publish(1)
    idle, busy = source(), source()
    read(busy, 1)
    idle.close()
    busy.close()
    [left] = redis_client.xinfo_consumers(STREAM, GROUP)
    assert left["name"].decode() == busy.consumer  # it holds something
    [field] = redis_client.hkeys(f"conquiet:leases:{{{STREAM}}}")
    assert field.decode().endswith(busy.consumer)


# --- nack -------------------------------------------------------------------------------------


def test_a_nacked_message_waits_and_the_others_flow_on(source, publish):
    one = source(backoff=0.2)
    publish(3)
    first, *_ = read(one, 3)
    first.nack(ValueError("failed"))
    publish(1, first=3)
    assert ids(one.read(10, 1.0)) == ["m-3"]
    assert ids(read(one, 1)) == ["m-0"]


def test_later_messages_of_its_key_wait_with_it(source, publish):
    one = source(backoff=0.2)
    publish(2, partitionkey="k")
    first, second = read(one, 2)
    first.nack(ValueError("failed"))
    second.nack(GivenBack("an earlier one failed"))
    publish(2, first=2, partitionkey="k")
    publish(1, first=9, partitionkey="other")
    assert ids(one.read(10, 1.0)) == ["m-9"]
    got = read(one, 4)
    assert ids(got) == ["m-0", "m-1", "m-2", "m-3"]
    assert [message.deliveries for message in got] == [2, 1, 1, 1]


def test_the_pause_doubles_up_to_its_limit(source, publish):
    one = source(backoff=0.05, max_backoff=0.1)
    publish(1)
    [message] = read(one, 1)
    for least in (0.05, 0.1, 0.1):
        message.nack(None)
        began = time.monotonic()
        [message] = read(one, 1)
        assert least <= time.monotonic() - began < 5


def test_a_counted_nack_is_counted_for_others_too(source, publish):
    one = source(lease=60.0)
    publish(1)
    for _ in range(2):
        read(one, 1)[0].nack(ValueError("failed"))
    one.close()
    assert read(source(), 1)[0].deliveries == 3


def test_a_blameless_nack_costs_nothing_also_if_the_process_dies(source, publish, pending):
    one = source(consumer="one")
    publish(1)
    read(one, 1)[0].nack(GivenBack("not now"))
    assert pending() == [("one", 0)]


def test_closing_makes_the_unsettled_claimable_at_once(source, publish):
    one = source(lease=60.0)
    publish(2)
    read(one, 2)
    one.close()
    got = read(source(lease=60.0), 2)
    assert [message.deliveries for message in got] == [1, 1]


def test_a_nack_after_close_takes_nothing_from_those_who_may_claim(source, publish, pending):
    publish(1)
    closed = source(consumer="pod-0", lease=60.0)
    [message] = read(closed, 1)
    closed.close()
    message.nack(GivenBack("the worker stops"))
    other = source(consumer="pod-1", lease=60.0)
    assert ids(other.read(1, 1.0)) == ["m-0"]
    assert pending() == [("pod-1", 1)]


def test_an_ack_after_close_still_counts(source, publish, pending):
    one = source()
    publish(1)
    [message] = read(one, 1)
    one.close()
    message.ack()
    assert pending() == []


# --- a server that takes no writes now ----------------------------------------------------------


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
    reader = source(max_deliveries=1)
    [message] = read(reader, 1)
    unwilling(1)
    message.nack(ValueError("no"))
    assert len(pending()) == 1
    unwilling(0)
    eventually(lambda: list(reader.read(10, 0.01)) == [] and pending() == [])
    assert redis_client.xlen(f"{STREAM}:dead") == 1


# --- R7, R12, R13: what is deleted ------------------------------------------------------------


def test_r7_an_acked_entry_of_a_log_stays(source, publish, redis_client):
    publish(1)
    read(source(), 1)[0].ack()
    assert redis_client.xlen(STREAM) == 1


def test_r7_an_acked_entry_of_an_outbox_is_gone(publish, redis_client):
    publish(2)
    relay = outbox_source(redis_client, STREAM, consumer="relay")
    first, second = relay.read(10, 1.0)
    first.ack()
    assert redis_client.xlen(STREAM) == 1
    second.nack(ValueError("the broker is away"))
    assert redis_client.xlen(STREAM) == 1
    assert redis_client.xpending(STREAM, "outbox-publisher")["pending"] == 1
    relay.close()


def test_r7_the_entries_of_an_outbox_are_acked_and_deleted_in_one_multi(
    redis_client, publish, recorded
):
    publish(2)
    relay = outbox_source(redis_client, STREAM)
    messages = read(relay, 2)
    sent = recorded(lambda: relay.settle([m.acking.token for m in messages], ()))
    relay.close()
    names = " ".join(command.split()[0] for command in sent)
    assert "MULTI XACK XDEL EXEC" in names


def test_an_outbox_that_cannot_be_acked_says_so(redis_client, publish):
    publish(1)
    relay = outbox_source(redis_client, STREAM)
    [message] = read(relay, 1)
    redis_client.set(STREAM, "no stream any more")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        relay.settle([message.acking.token], ())
    redis_client.delete(STREAM)
    relay.close()


def test_r12_an_entry_deleted_while_pending_is_acked_and_counted(
    source, publish, redis_client, pending, caplog
):
    dead = source(lease=SHORT)
    publish(3)
    read(dead, 3)
    redis_client.xdel(STREAM, redis_client.xrange(STREAM)[1][0])
    alive = source(lease=SHORT)
    assert ids(read(alive, 2)) == ["m-0", "m-2"]
    eventually(lambda: list(alive.read(1, 0.01)) == [] and len(pending()) == 2)
    assert alive.deleted == 1
    assert "deleted while they were pending" in caplog.text


def test_r12_a_deleted_entry_of_our_own_is_acked_too(source, publish, redis_client, pending):
    publish(2)
    read(source(consumer="pod-0"), 2)
    redis_client.xdel(STREAM, redis_client.xrange(STREAM)[0][0])
    again = source(consumer="pod-0")
    assert ids(read(again, 1)) == ["m-1"]
    assert len(pending()) == 1
    assert again.deleted == 1


def test_r13_undecodable_entries_go_to_the_dead_letters_and_the_rest_flow_on(
    source, publish, redis_client, pending
):
    publish(1)
    entry_id = redis_client.xadd(STREAM, {"what": "is this", "raw": b"\xff"}).decode()
    publish(1, first=1)
    one = source()
    for message in read(one, 2):
        message.ack()
    eventually(lambda: list(one.read(10, 0.01)) == [] and one.dead)
    assert pending() == []
    [letter] = StreamSource(redis_client, f"{STREAM}:dead", "g").replay()
    about = letter.attributes
    assert (about["deadstream"], about["deadentry"], about["deadattempts"]) == (
        STREAM,
        entry_id,
        "3",
    )
    assert "specversion" in about["deadreason"]
    assert "Traceback" in about["deadtraceback"]
    assert letter.data == b'[["what","is this"],["raw",{"base64":"/w=="}]]'


def test_r13_a_dead_letter_that_cannot_be_written_is_tried_again(source, redis_client):
    redis_client.set("graveyard", "not a stream")
    redis_client.xadd(STREAM, {"what": "is this"})
    one = source(dead_letters="graveyard", backoff=0.01)
    for _ in range(20):
        one.read(1, 0.02)
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 1
    redis_client.delete("graveyard")
    eventually(lambda: list(one.read(1, 0.02)) == [] and one.dead == 1)
    assert redis_client.xlen("graveyard") == 1
    assert redis_client.xpending(STREAM, GROUP)["pending"] == 0


def test_what_failed_too_often_goes_to_the_dead_letters_with_its_error(
    source, publish, redis_client, pending
):
    publish(2)
    one = source(max_deliveries=2)
    for _ in range(2):
        for message in read(one, 2):
            message.nack(ValueError("no stock"))
    assert list(one.read(10, 0.05)) == []
    assert pending() == []
    letters = list(StreamSource(redis_client, f"{STREAM}:dead", "g").replay())
    assert ids(letters) == ["m-0", "m-1"]
    assert letters[0].attributes["deadreason"] == "ValueError: no stock"
    assert letters[0].attributes["deadattempts"] == "2"
    assert letters[0].data == b"0"


def test_what_kills_its_consumers_goes_to_the_dead_letters(source, publish):
    publish(1)
    for _ in range(2):
        read(source(lease=SHORT, max_deliveries=2), 1)
        time.sleep(SHORT)
    last = source(lease=SHORT, max_deliveries=2)
    eventually(lambda: list(last.read(10, 0.02)) == [] and last.dead == 1)


# --- R15 and bounds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"block": 0},
        {"lease": 0},
        {"claim_interval": -1},
        {"max_in_flight": 0},
        {"max_deliveries": 0},
        {"start": "yesterday"},
        {"group": ""},
        {"consumer": ""},
        {"streams": []},
        {"streams": ["a", "a"]},
    ],
)
def test_r15_settings_that_cannot_work_are_refused(settings, source):
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
