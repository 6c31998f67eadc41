"""What is deleted from a stream, and what goes to its dead letters."""

from __future__ import annotations

import time

import pytest
from tests.integration.redis.conftest import GROUP, STREAM, ids
from tests.integration.redis.reading import SHORT, read
from tests.waiting import eventually

from conquiet.errors import NoHandler, StoreError, UnknownType
from conquiet.redis import OutboxSource, StreamSource
from conquiet.redis.wire import server_of

# --- what is acked ----------------------------------------------------------------------------


def test_an_acked_entry_of_a_log_stays(source, publish, redis_client):
    publish(1)
    read(source(), 1)[0].ack()
    assert redis_client.xlen(STREAM) == 1


def test_an_acked_entry_of_an_outbox_is_gone(publish, redis_client):
    publish(2)
    relay = OutboxSource(redis_client, STREAM, consumer="relay")
    first, second = relay.read(10, 1.0)
    first.ack()
    assert redis_client.xlen(STREAM) == 1
    second.nack(ValueError("the broker is away"))
    assert redis_client.xlen(STREAM) == 1
    assert redis_client.xpending(STREAM, "outbox-publisher")["pending"] == 1
    relay.close()


def test_the_entries_of_an_outbox_are_acked_and_deleted_in_one_multi(
    redis_client, publish, recorded
):
    publish(2)
    relay = OutboxSource(redis_client, STREAM)
    messages = read(relay, 2)
    sent = recorded(lambda: relay.settle([m.acking.token for m in messages], ()))
    relay.close()
    names = " ".join(command.split()[0] for command in sent)
    assert "MULTI XACK XDEL EXEC" in names


def test_an_outbox_that_cannot_be_acked_says_so(redis_client, publish):
    publish(1)
    relay = OutboxSource(redis_client, STREAM)
    [message] = read(relay, 1)
    redis_client.set(STREAM, "no stream any more")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        relay.settle([message.acking.token], ())
    redis_client.delete(STREAM)
    relay.close()


# --- what was deleted while pending -----------------------------------------------------------


def test_an_entry_deleted_while_pending_is_acked_and_counted(
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


def test_a_deleted_entry_of_our_own_is_acked_too(source, publish, redis_client, pending):
    publish(2)
    read(source(consumer="pod-0"), 2)
    redis_client.xdel(STREAM, redis_client.xrange(STREAM)[0][0])
    again = source(consumer="pod-0")
    assert ids(read(again, 1)) == ["m-1"]
    assert len(pending()) == 1
    assert again.deleted == 1


@pytest.mark.parametrize("step", ["close", "renew", "redeliver"])
def test_an_entry_deleted_in_the_hands_of_its_consumer_is_counted(
    source, publish, redis_client, pending, caplog, step
):
    publish(3)
    one = source(consumer="pod-0", lease=60.0 if step == "close" else 0.4)
    messages = read(one, 3)
    redis_client.xdel(STREAM, redis_client.xrange(STREAM)[1][0])
    if step == "renew":
        time.sleep(0.15)  # a lease that was renewed a moment ago is not renewed again
        one.renew(messages)
    elif step == "redeliver":
        for message in messages:
            message.nack(ValueError("no stock"))
        again = ids(one.read(10, 1.0))
        if server_of(redis_client).at_least("7.0"):
            assert again == ["m-0", "m-2"]
    one.close()
    if server_of(redis_client).at_least("7.0"):
        assert one.deleted == 1
        assert caplog.text.count("deleted while they were pending") == 1
        assert len(pending()) == 2


# --- what was trimmed before it was read ------------------------------------------------------


@pytest.fixture
def needs_counters(redis_client):
    if not server_of(redis_client).at_least("7.0"):
        pytest.skip("Redis 7 counts what was added")


@pytest.mark.usefixtures("needs_counters")
def test_entries_trimmed_before_they_were_read_are_counted_once_in_the_group(
    source, publish, redis_client, caplog
):
    one, other = source(), source()
    publish(5)
    for message in read(one, 5):
        message.ack()
    assert one.deleted == 0
    publish(100, first=5)
    redis_client.xtrim(STREAM, maxlen=10, approximate=False)
    again = source()
    assert ids(read(again, 10)) == [f"m-{n}" for n in range(95, 105)]
    assert list(other.read(10, 0.01)) == []
    assert again.deleted + other.deleted == 90
    assert next(line for line in caplog.messages if "trimmed" in line).startswith("90 entries")
    assert redis_client.xinfo_groups(STREAM)[0]["lag"] == 0


@pytest.mark.usefixtures("needs_counters")
def test_a_stream_that_was_emptied_before_its_first_read_is_noticed(source, publish, redis_client):
    one = source()
    assert list(one.read(10, 0.01)) == []
    publish(7)
    redis_client.xtrim(STREAM, maxlen=0, approximate=False)
    for _ in range(2):
        assert list(one.read(10, 0.01)) == []
    publish(1, first=7)
    assert ids(read(one, 1)) == ["m-7"]
    assert one.deleted == 7


@pytest.mark.usefixtures("needs_counters")
def test_trimmed_entries_are_counted_while_there_is_much_to_read(source, publish, redis_client):
    publish(30)
    one = source()
    for left in (20, 10):
        assert len(one.read(5, 1.0)) == 5
        redis_client.xtrim(STREAM, maxlen=left, approximate=False)
    assert ids(one.read(5, 1.0)) == [f"m-{n}" for n in range(20, 25)]
    assert one.deleted == 10


@pytest.mark.usefixtures("needs_counters")
@pytest.mark.parametrize("start", ["beginning", "now"])
def test_what_was_trimmed_before_the_group_was_created_is_no_loss_to_it(
    source, publish, redis_client, start
):
    publish(9)
    redis_client.xtrim(STREAM, maxlen=3, approximate=False)
    one = source(start=start)
    publish(4, first=9)
    count = 7 if start == "beginning" else 4
    assert len(read(one, count)) == count
    publish(4, first=13)
    redis_client.xtrim(STREAM, maxlen=1, approximate=False)
    other = source(start=start)
    assert ids(read(other, 1)) == ["m-16"]
    assert (one.deleted, other.deleted) == (0, 3)


@pytest.mark.usefixtures("needs_counters")
def test_entries_that_were_read_may_be_trimmed_and_deleted(source, publish, redis_client):
    one = source(group="first")
    publish(20)
    read(one, 10)
    redis_client.xdel(STREAM, *[entry_id for entry_id, _ in redis_client.xrange(STREAM)[3:6]])
    redis_client.xtrim(STREAM, maxlen=10, approximate=False)
    assert source(group="first").read(3, 0.01)
    assert one.deleted == 0


# --- dead letters -----------------------------------------------------------------------------


def test_undecodable_entries_go_to_the_dead_letters_and_the_rest_flow_on(
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


def test_a_dead_letter_that_cannot_be_written_is_tried_again(source, redis_client):
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
    one = source(max_attempts=2)
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


def test_a_message_that_fails_for_ever_goes_to_the_dead_letters_by_default(
    source, publish, pending
):
    publish(2)
    one = source(backoff=0.001, max_backoff=0.001)
    tries = 0
    while not one.dead:
        for message in one.read(10, 0.1):
            if message.id == "m-1":
                message.ack()
                continue
            tries = message.deliveries
            message.nack(NoHandler("no handler for this type"))
    assert tries == 25
    assert pending() == []


def test_without_a_limit_it_is_delivered_again_and_again(source, publish):
    publish(1)
    one = source(backoff=0.001, max_backoff=0.001, max_attempts=None)
    for deliveries in range(1, 31):
        [message] = read(one, 1)
        assert message.deliveries == deliveries
        message.nack(ValueError("no stock"))
    assert not one.dead


def test_a_permanent_error_is_a_dead_letter_at_once(source, publish, redis_client, pending):
    publish(1)
    one = source()
    [message] = read(one, 1)
    message.nack(UnknownType("no handler for this type"))
    assert one.dead == 1
    assert pending() == []
    [letter] = StreamSource(redis_client, f"{STREAM}:dead", "g").replay()
    assert letter.attributes["deadattempts"] == "1"


def test_what_kills_its_consumers_goes_to_the_dead_letters(source, publish):
    publish(1)
    for _ in range(2):
        read(source(lease=SHORT, max_attempts=2), 1)
        time.sleep(SHORT)
    last = source(lease=SHORT, max_attempts=2)
    eventually(lambda: list(last.read(10, 0.02)) == [] and last.dead == 1)
