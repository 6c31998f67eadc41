"""Who gets what was delivered before, and when: claims, restarts, nacks, closing."""

from __future__ import annotations

import time

from tests.integration.redis.conftest import GROUP, STREAM, ids
from tests.integration.redis.reading import SHORT, read

from conquiet.errors import GivenBack

# --- claims -----------------------------------------------------------------------


def test_what_a_dead_consumer_held_is_claimed_and_delivered(source, publish, pending):
    dead, alive = source(consumer="dead", lease=SHORT), source(consumer="alive", lease=SHORT)
    publish(3)
    read(dead, 3)
    got = read(alive, 3)
    assert ids(got) == ["m-0", "m-1", "m-2"]
    assert [message.deliveries for message in got] == [2, 2, 2]
    assert alive.claimed == 3
    assert pending() == [("alive", 2)] * 3


def test_a_long_pending_list_is_scanned_page_by_page(source, publish):
    dead = source(lease=SHORT)
    publish(1_203)
    read(dead, 1_203, limit=1_203)
    alive = source(lease=SHORT)
    time.sleep(SHORT)
    got = read(alive, 1_203)
    assert ids(got) == [f"m-{n}" for n in range(1_203)]


def test_a_source_does_not_claim_what_itself_is_working_on(source, publish):
    one = source(lease=SHORT)
    publish(1)
    read(one, 1)
    time.sleep(2 * SHORT)
    assert list(one.read(10, 2 * SHORT)) == []


def test_a_renewal_counts_no_delivery(source, publish, pending):
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


def test_a_takeover_is_one_line_of_the_log(source, publish, redis_client, caplog):
    caplog.set_level("INFO", "conquiet.redis")
    publish(60)
    read(source(consumer="dead-1", lease=SHORT), 30)
    read(source(consumer="dead-2", lease=SHORT), 30)
    redis_client.xdel(STREAM, *[entry_id for entry_id, _ in redis_client.xrange(STREAM)[::10]])
    time.sleep(SHORT)
    alive = source()
    assert len(read(alive, 54, limit=5)) == 54
    alive.close()
    claims = [line for line in caplog.messages if "claimed" in line]
    assert claims == [
        "claimed 54 stale entries of stream 'orders' from 2 consumers: dead-1, dead-2"
    ]
    assert sum("deleted while they were pending" in line for line in caplog.messages) == 1


def test_own_pending_entries_come_first_after_a_restart(source, publish):
    source_settings = {"consumer": "pod-0", "lease": 60.0}
    publish(5)
    crashed = source(**source_settings)
    read(crashed, 3)[0].ack()
    again = source(**source_settings)
    got = read(again, 4)
    assert ids(got) == ["m-1", "m-2", "m-3", "m-4"]
    assert [message.deliveries for message in got] == [2, 2, 1, 1]


def test_own_pending_entries_are_read_in_parts_and_once(source, publish):
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
