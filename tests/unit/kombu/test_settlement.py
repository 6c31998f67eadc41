"""Acks are sent once, in order, by any thread, and again if that failed."""

from __future__ import annotations

import threading
from unittest.mock import Mock

from conquiet.kombu.layout import Keys
from conquiet.kombu.settlement import Settlement, encode_acks


def test_acks_are_taken_by_stream_and_only_once():
    settlement = Settlement(Keys(), "me", Mock())
    for stream, entry in [("a", "1"), ("b", "1"), ("a", "2")]:
        settlement.ack(stream, entry)
    assert settlement.take_acks() == {"a": ["1", "2"], "b": ["1"]}
    assert settlement.take_acks() == {}
    assert not settlement
    assert settlement.since is None


def test_acks_that_could_not_be_sent_are_taken_again_first():
    settlement = Settlement(Keys(), "me", Mock())
    settlement.ack("a", "1")
    settlement.ack("a", "2")
    acks = settlement.take_acks()
    settlement.ack("a", "3")
    settlement.put_back(acks)
    assert settlement.take_acks() == {"a": ["1", "2", "3"]}


def test_the_time_is_known_while_anything_waits():
    settlement = Settlement(Keys(), "me", Mock())
    for number in range(1500):
        settlement.ack("a", str(number))
    assert sum(map(len, settlement.take_acks().values())) == 1000
    assert settlement.since is not None
    assert sum(map(len, settlement.take_acks().values())) == 500
    assert settlement.since is None


def test_no_ack_is_lost_between_threads_and_none_waits_without_a_time():
    settlement = Settlement(Keys(), "me", Mock())
    done, taken = threading.Event(), []

    def take():
        while not done.is_set() or settlement:
            for entries in settlement.take_acks().values():
                taken.extend(entries)
            if settlement:
                assert settlement.since is not None or settlement.take_acks() is not None

    taker = threading.Thread(target=take)
    taker.start()

    def ack(first):
        for number in range(first, first + 5000):
            settlement.ack("a", str(number))

    threads = [threading.Thread(target=ack, args=(first,)) for first in (0, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    taker.join()
    assert sorted(map(int, taken)) == list(range(10_000))


def test_arguments_name_the_count_of_each_stream():
    assert encode_acks({"a": ["1", "2"], "b": ["3"]}, "group") == ["group", 2, "1", "2", 1, "3"]


def test_whatever_is_recorded_wakes_the_sender():
    hurry = Mock()
    settlement = Settlement(Keys(), "me", hurry)
    settlement.ack("a", "1")
    settlement.give_back("a", "2")
    settlement.bury("a", "3", "broken")
    assert hurry.call_count == 3
    assert settlement.places() == [("a", "1"), ("a", "2"), ("a", "3")]
