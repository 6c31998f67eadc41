"""Section 6 of the seed: QueueConsumer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests import zygote
from tests.waiting import eventually

from conquiet.queue import InvalidSettingError, QueueConsumer, QueueError, RedisStreamsQueue


@pytest.fixture
def consumer(queue):
    return QueueConsumer(queue)


@pytest.fixture
def in_thread():
    """Run a function in a thread; the result is a list that gets its outcome."""
    threads = []

    def run(function):
        outcome: list = []
        thread = threading.Thread(target=lambda: outcome.append(function()))
        thread.start()
        threads.append(thread)
        return outcome

    yield run
    for thread in threads:
        thread.join()


def test_4_2_max_read_count_must_be_1(make_queue):
    with pytest.raises(InvalidSettingError, match=r"max_read_count=2 .* must be 1"):
        QueueConsumer(make_queue(max_read_count=2))


def test_6_1_messages_are_delivered_to_the_user(queue, consumer):
    sent = [queue.enqueue({"n": n}) for n in range(3)]
    got = []
    for message in consumer.iter_messages():
        got.append(message.id)
        consumer.ack(message)
        if len(got) == 3:
            consumer.stop()
    assert got == sent


def test_6_2_nothing_is_acked_by_itself(queue, consumer, pending):
    entry_id = queue.enqueue({"n": 1})
    for _ in consumer.iter_messages():
        consumer.stop()
    assert pending() == {entry_id: "b-1"}


def test_6_2_an_exception_of_the_user_is_left_alone(queue, consumer, pending):
    entry_id = queue.enqueue({"n": 1})

    def fail_on_the_first():
        for message in consumer.iter_messages():
            raise LookupError(message.id)

    with pytest.raises(LookupError, match=entry_id):
        fail_on_the_first()
    assert pending() == {entry_id: "b-1"}


def test_6_2_no_more_than_one_message_is_taken_from_the_stream(queue, consumer, pending):
    sent = [queue.enqueue({"n": n}) for n in range(5)]
    messages = consumer.iter_messages()
    next(messages)
    assert list(pending()) == sent[:1]


def test_6_3_no_new_read_after_stop(queue, consumer, calls):
    queue.enqueue({"n": 1})
    consumer.stop()
    assert consumer.stopped
    assert consumer.next(1_000) is None
    assert list(consumer.iter_messages()) == []
    assert calls("xreadgroup") == 0


def test_6_3_stop_may_be_called_twice(consumer):
    consumer.stop()
    consumer.stop()
    assert consumer.stopped


def test_6_3_in_flight_messages_remain_pending_after_stop(queue, consumer, pending, calls):
    entry_id = queue.enqueue({"n": 1})
    consumer.next(1_000)
    consumer.stop()
    assert pending() == {entry_id: "b-1"}
    assert calls("xack") == calls("xclaim") == 0


def test_6_3_an_in_flight_message_can_be_acked_after_stop(queue, consumer, pending):
    queue.enqueue({"n": 1})
    message = consumer.next(1_000)
    consumer.stop()
    consumer.ack(message)
    assert pending() == {}


def test_6_3_stop_from_another_thread_ends_a_blocking_read_within_its_block_time(
    make_queue, in_thread, blocked_clients
):
    consumer = QueueConsumer(make_queue(block_ms=2_000))
    outcome = in_thread(lambda: list(consumer.iter_messages()))
    eventually(lambda: blocked_clients() == 1)
    stopped_at = time.monotonic()
    consumer.stop()
    eventually(lambda: outcome == [[]])
    assert time.monotonic() - stopped_at < 3.5  # a second read would have taken 4 s in all


def test_6_3_a_message_that_comes_together_with_stop_is_returned(
    make_queue, in_thread, blocked_clients
):
    queue = make_queue(block_ms=10_000)
    consumer = QueueConsumer(queue)
    outcome = in_thread(lambda: [message.id for message in consumer.iter_messages()])
    eventually(lambda: blocked_clients() == 1)
    consumer.stop()
    entry_id = queue.enqueue({"n": 1})
    eventually(lambda: outcome == [[entry_id]])


def test_6_3_stop_between_read_and_return_drops_nothing(queue, consumer, monkeypatch):
    entry_id = queue.enqueue({"n": 1})
    read = RedisStreamsQueue.read

    def read_then_stop(self, *args):
        messages = read(self, *args)
        consumer.stop()
        return messages

    monkeypatch.setattr(RedisStreamsQueue, "read", read_then_stop)
    assert [message.id for message in consumer.iter_messages()] == [entry_id]


PROGRAM = """
import sys, redis
from conquiet.queue import QueueConfig, QueueConsumer, RedisStreamsQueue

url, stream = sys.argv[1:]
queue = RedisStreamsQueue(redis.Redis.from_url(url), QueueConfig(stream, "group", "c", 300))
consumer = QueueConsumer(queue)
for message in consumer.iter_messages():
    print("in flight", flush=True)
    while not consumer.stopped:
        pass
print("ended", flush=True)
"""


def test_6_3_sigterm_ends_the_loop_of_a_program(queue, redis_client, redis_url):
    stream = queue.config.stream_key
    for n in range(2):
        queue.enqueue({"n": n})
    command = [sys.executable, "-c", PROGRAM, redis_url, stream]
    with zygote.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "in flight\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
        assert process.wait(20) == 0
    assert redis_client.xpending(stream, "group")["pending"] == 1


@pytest.fixture
def sigterms():
    """What a handler of SIGTERM that was there before has got."""
    seen = []
    restore = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, restore)


def test_6_3_sigterm_stops_and_goes_to_the_handler_before(
    make_queue, in_thread, blocked_clients, sigterms
):
    before = signal.getsignal(signal.SIGTERM)
    consumer = QueueConsumer(make_queue(block_ms=300))
    in_thread(
        lambda: (
            eventually(lambda: blocked_clients() == 1),
            os.kill(os.getpid(), signal.SIGTERM),
        )
    )
    assert list(consumer.iter_messages()) == []
    assert consumer.stopped
    assert sigterms == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_6_3_a_loop_over_next_stops_at_sigterm_on_request(queue, consumer, sigterms):
    with consumer.stop_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        assert consumer.next(1) is None
    assert consumer.stopped
    assert sigterms == [signal.SIGTERM]


def test_6_3_the_handler_of_sigterm_is_restored_when_the_loop_is_left(queue, sigterms):
    before = signal.getsignal(signal.SIGTERM)
    queue.enqueue({"n": 1})
    for _ in QueueConsumer(queue).iter_messages():
        assert signal.getsignal(signal.SIGTERM) is not before
        break
    assert signal.getsignal(signal.SIGTERM) is before


def test_6_3_loops_that_overlap_end_by_sigterm_and_leave_the_handler_before(make_queue, sigterms):
    before = signal.getsignal(signal.SIGTERM)
    loops = [QueueConsumer(make_queue(name)).iter_messages() for name in ("b-1", "b-2")]
    os.kill(os.getpid(), signal.SIGTERM)
    assert [list(loop) for loop in loops] == [[], []]
    assert sigterms == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_6_3_sigterm_can_be_left_alone(queue, in_thread):
    before = signal.getsignal(signal.SIGTERM)
    QueueConsumer(queue).next(1)
    messages = QueueConsumer(queue, handle_sigterm=False).iter_messages()
    elsewhere = in_thread(QueueConsumer(queue).iter_messages)
    eventually(lambda: elsewhere)
    assert signal.getsignal(signal.SIGTERM) is before
    del messages


def test_6_3_sigterm_that_is_ignored_stays_ignored(queue):
    restore = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        messages = QueueConsumer(queue).iter_messages()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        del messages
    finally:
        signal.signal(signal.SIGTERM, restore)


def test_6_3_sigterm_outside_the_main_thread_is_refused(consumer, in_thread):
    def ask():
        with pytest.raises(QueueError, match="main thread"):
            consumer.stop_on_sigterm()
        return "refused"

    outcome = in_thread(ask)
    eventually(lambda: outcome == ["refused"])


def test_6_4_next_returns_at_most_one_message(queue, consumer):
    sent = [queue.enqueue({"n": n}) for n in range(2)]
    assert [consumer.next(1_000).id, consumer.next(1_000).id] == sent


def test_6_4_next_returns_none_if_there_is_no_message(consumer):
    assert consumer.next(1) is None


def test_6_4_next_without_a_time_waits_for_that_of_the_settings(make_queue):
    consumer = QueueConsumer(make_queue(block_ms=200))
    started = time.monotonic()
    assert consumer.next(None) is None
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("block_ms", [0, -1, True, 0.5])
def test_6_4_next_never_waits_for_ever_nor_spins(consumer, block_ms):
    with pytest.raises(InvalidSettingError, match="block_ms"):
        consumer.next(block_ms)


def test_6_5_iteration_uses_block_ms(make_queue, recorded):
    consumer = QueueConsumer(make_queue(block_ms=77))

    def run():
        threading.Timer(0.01, consumer.stop).start()
        list(consumer.iter_messages())

    reads = [command for command in recorded(run) if command.startswith("XREADGROUP")]
    assert reads
    assert all("BLOCK 77 " in command for command in reads)


@pytest.mark.slow
def test_6_5_ten_idle_seconds_cost_no_cpu_and_no_more_commands_than_block_ms_implies(
    queue, in_thread, calls
):
    consumer = QueueConsumer(queue)

    def idle():
        cpu_started = time.thread_time()
        assert list(consumer.iter_messages()) == []
        return time.thread_time() - cpu_started

    stopping = threading.Timer(10.0, consumer.stop)
    stopping.start()
    started = time.monotonic()
    outcome = in_thread(idle)
    eventually(lambda: outcome, timeout=30)
    seconds = time.monotonic() - started
    assert seconds >= 10.0
    assert outcome[0] < 0.01 * seconds
    assert calls("xreadgroup") <= seconds / 5.0 + 1


def test_6_6_without_an_ack_the_message_is_claimed_when_stale(make_queue, queue, consumer):
    queue.enqueue({"n": 1})
    message = consumer.next(1_000)
    assert eventually(lambda: make_queue("b-2").claim_stale(20)) == [message]


def test_6_6_an_ack_has_no_deadline(queue, consumer, make_queue, pending):
    queue.enqueue({"n": 1})
    message = consumer.next(1_000)
    eventually(lambda: make_queue("b-2").claim_stale(20))
    consumer.ack(message)
    assert pending() == {}


def test_after_an_error_the_same_iterator_goes_on(queue, consumer, redis_client):
    messages = consumer.iter_messages()
    redis_client.xgroup_destroy("orders", "billing")
    with pytest.raises(QueueError):
        next(messages)
    redis_client.xgroup_create("orders", "billing", "0-0")
    sent = queue.enqueue({"n": 1})
    assert next(messages).id == sent
