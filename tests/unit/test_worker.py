"""The worker: batches, threads, order by key, stopping (A7), living on (A8), health."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.unit.chains import OrderPlaced, PlaceOrder
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.backoff import Backoff
from conquiet.errors import ConfigError, GivenBack, StoreError
from conquiet.intake import ByKey, InFlight
from conquiet.memory import Log
from conquiet.message import new_id
from conquiet.middleware import DeadLetter
from conquiet.source import EndOfSource
from conquiet.stopping import Signals


def order(number: int, **attributes: Any) -> Message[PlaceOrder]:
    values = {"id": new_id(), "type": "place.order", "source": "/test", **attributes}
    return Message(PlaceOrder(number), values)


def log_of(count: int, **attributes: Any) -> Log:
    log = Log()
    log.sink("commands").publish([order(number, **attributes) for number in range(count)])
    return log


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Workers that a test started; they are stopped after it, whatever happens."""
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.stop(grace=0)


def start(workers: list[Worker], *arguments: Any, **options: Any) -> Worker:
    worker = Worker(*arguments, **options)
    workers.append(worker)
    worker.start()
    return worker


def drained(log: Log, group: str = "g") -> bool:
    return not log.unsettled(group)


def recording(seen: list[int]) -> Router:
    router = Router()

    @router.event()
    def record(order: PlaceOrder) -> None:
        seen.append(order.id)

    return router


def test_messages_flow_from_the_source_through_the_router(workers):
    log, seen = log_of(250), []
    start(workers, log.source("g"), recording(seen), batch_size=100)
    eventually(lambda: drained(log))
    assert seen == list(range(250))


def test_outputs_go_to_the_sink_before_the_input_is_acked(workers):
    log, events = log_of(3), Log()
    router = Router()

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    sink = events.sink("orders")
    sink.fail_next(1)
    start(workers, log.source("g"), router, sink)
    eventually(lambda: drained(log))
    published = [message.data for message in events.replay()]
    assert published == [b'{"id":0}', b'{"id":1}', b'{"id":2}']


@pytest.mark.parametrize("ack", ["on_success", "forward"])
def test_an_output_that_fails_gives_back_only_its_own_input(workers, ack):
    log = log_of(3)
    answers: list[list[int]] = []

    class Picky:
        def publish(self, messages: Sequence[Message[Any]]) -> list[Exception | None]:
            answers.append([message.data.id for message in messages])
            first = len(answers) == 1
            return [
                ValueError("no") if first and message.data.id == 1 else None for message in messages
            ]

        def close(self) -> None: ...

    router = Router(ack=ack)

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    start(workers, log.source("g"), router, Picky())
    eventually(lambda: drained(log))
    assert answers == [[0, 1, 2], [1]]


def test_outputs_without_a_sink_are_an_error_that_names_the_fix(workers):
    log = log_of(1)
    router = Router()

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    worker = start(workers, log.source("g"), router)
    eventually(
        lambda: "give the worker a sink, or the router an outbox" in worker.health().last_error
    )
    assert not drained(log)


def test_what_cannot_be_published_goes_to_the_dead_letters(workers):
    log, letters = log_of(2), Log()

    class Refusing:
        def publish(self, messages: Sequence[Message[Any]]) -> list[Exception | None]:
            return [ValueError("too large") if m.data.id == 0 else None for m in messages]

        def close(self) -> None: ...

    router = Router()
    router.use(DeadLetter(letters.sink(), after=2))

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    start(workers, log.source("g"), router, Refusing())
    eventually(lambda: drained(log))
    [letter] = letters.replay()
    assert letter.data == b'{"id":0}'
    assert "too large" in letter.attributes["deadreason"]


def test_outputs_that_a_middleware_adds_outside_the_publishing_are_refused(workers):
    def add_late(next: Any) -> Any:
        return lambda batch: [[Message(b"", {"type": "late"})] for _ in next(batch)]

    log, letters = log_of(1), Log()
    router = recording([])
    router.use(add_late, DeadLetter(letters.sink(), after=100))
    worker = start(workers, log.source("g"), router, Log().sink("t"))
    eventually(lambda: "after DeadLetter and Retry" in worker.health().last_error)
    assert not drained(log)


def test_batches_are_no_larger_than_asked_and_wait_for_more_if_asked(workers):
    sizes: list[int] = []
    router = Router()

    @router.event()
    def record(orders: list[PlaceOrder]) -> None:
        sizes.append(len(orders))

    log = log_of(25)
    start(workers, log.source("g"), router, batch_size=10, batch_wait=30.0)
    eventually(lambda: sizes == [10, 10])
    log.sink("commands").publish([order(number) for number in range(5)])
    eventually(lambda: sizes == [10, 10, 10])


def test_threads_work_at_the_same_time(workers):
    together = threading.Barrier(3)
    router = Router()

    @router.event()
    def meet(order: PlaceOrder) -> None:
        together.wait(20)

    log = log_of(3)
    start(workers, log.source("g"), router, threads=3, batch_size=1)
    eventually(lambda: drained(log))
    assert not together.broken


def test_nothing_is_read_ahead_of_the_handlers(workers):
    release = threading.Event()
    router = Router()

    @router.event()
    def wait(order: PlaceOrder) -> None:
        release.wait(20)

    log = log_of(100)
    worker = start(workers, log.source("g"), router, threads=2, batch_size=5)
    eventually(lambda: worker.health().in_flight == 10)
    assert worker.health().in_flight == 10
    release.set()
    eventually(lambda: drained(log))


# --- order by key ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_order_by_key_holds_while_messages_fail(workers, threads):
    log = Log()
    log.sink("commands").publish([order(n, partitionkey=f"k{n % 7}") for n in range(350)])
    done: dict[str, list[int]] = defaultdict(list)
    failed: set[int] = set()
    router = Router()

    @router.event()
    def record(order: PlaceOrder, message: Message) -> None:
        if order.id % 5 == 0 and order.id not in failed:
            failed.add(order.id)
            raise ValueError("once")
        done[message.key].append(order.id)

    source = log.source("g", ordered=False)
    start(workers, source, router, threads=threads, ordered=True, batch_size=20)
    eventually(lambda: drained(log), timeout=60)
    assert {key: sorted(ids) for key, ids in done.items()} == done
    assert sum(map(len, done.values())) == 350


def test_a_stuck_key_holds_up_only_its_lane(workers):
    release = threading.Event()
    done: list[str] = []
    router = Router()

    @router.event()
    def work(order: PlaceOrder, message: Message) -> None:
        if message.key == "stuck":
            release.wait(20)
        done.append(message.key)

    log = Log()
    log.sink("c").publish([order(0, partitionkey="stuck")])
    log.sink("c").publish([order(n, partitionkey=f"k{n}") for n in range(40)])
    start(workers, log.source("g"), router, threads=4, ordered=True, batch_size=5)
    eventually(lambda: len(done) >= 20)
    assert "stuck" not in done
    release.set()
    eventually(lambda: drained(log))


def test_a_function_may_name_the_key(workers):
    seen: list[int] = []
    log = log_of(10)
    start(
        workers, log.source("g"), recording(seen), threads=3, ordered=lambda message: message.type
    )
    eventually(lambda: drained(log))
    assert seen == list(range(10))


def test_a_key_of_the_wrong_kind_is_refused_by_the_router_and_loses_nothing(workers):
    seen: list[int] = []
    log = Log()
    log.sink("c").publish([order(0, subject=7), order(1)])
    worker = start(workers, log.source("g"), recording(seen), ordered=True)
    eventually(lambda: seen == [1])
    eventually(lambda: "'subject' must be a string" in worker.health().last_error)
    assert len(log.unsettled("g")) == 1
    assert worker.health().ok


def test_a_key_may_be_a_number(workers):
    seen: list[int] = []
    log = log_of(10, customer=7)
    start(
        workers,
        log.source("g"),
        recording(seen),
        threads=3,
        ordered=lambda message: message.attributes["customer"],
    )
    eventually(lambda: drained(log))
    assert seen == list(range(10))


def test_a_key_function_that_fails_is_logged_and_loses_nothing(workers, caplog):
    log, seen = log_of(1), []
    start(
        workers, log.source("g"), recording(seen), ordered=lambda message: message.attributes["no"]
    )
    eventually(lambda: drained(log))
    assert seen == [0]
    assert "the order of this one is not kept: place.order" in caplog.text


def test_a_source_that_does_not_hear_of_what_comes_back_loses_nothing_that_may_run():
    log = Log()
    log.append([order(0, id="early", subject="a"), order(1, subject="a"), order(2, subject="b")])
    source = log.source("g")
    in_flight = InFlight()
    intake = ByKey(source, in_flight, 1, lambda message: message.key)
    [early] = intake.read(0, 1, 0, 0)
    intake.failed([early])
    source.settle = refusing
    taken = intake.read(0, 10, 0, 0)
    assert [message.key for message in taken] == ["b"]
    assert set(map(id, in_flight.messages())) == {id(early), id(taken[0])}


def refusing(acked: Any, nacked: Any) -> None:
    raise ConnectionError("away")


# --- A8: nothing ends the worker ---------------------------------------------------------------


class Odd(BaseException):
    """What a library might raise past `except Exception`."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Odd])
@pytest.mark.parametrize("is_async", [False, True])
def test_a8_whatever_a_handler_raises_costs_its_neighbours_nothing(workers, error, is_async):
    log, dead, seen = log_of(3), Log(), []
    router = Router()
    router.use(DeadLetter(dead.sink(), after=2))

    def plain(order: PlaceOrder) -> None:
        if order.id == 1:
            raise error
        seen.append(order.id)

    async def on_the_loop(order: PlaceOrder) -> None:
        plain(order)

    router.event()(on_the_loop if is_async else plain)
    worker = start(workers, log.source("g"), router)
    eventually(lambda: drained(log))
    assert sorted(seen) == [0, 2]
    [letter] = dead.replay()
    assert "tried to end the process" in letter.attributes["deadreason"]
    assert worker.health().ok


def test_a8_a_broken_chain_and_a_source_that_is_away_do_not_end_the_worker(workers):
    log, seen, left = log_of(1), [], []
    source = log.source("g", lease=0.2)
    settle, router = source.settle, recording(seen)
    source.settle = refusing

    def leave_once(next: Any) -> Any:
        def process(batch: Any) -> Any:
            if not left:
                left.extend(batch)
                raise SystemExit
            return next(batch)

        return process

    router.use(leave_once)
    worker = start(workers, source, router)
    eventually(lambda: left and worker.health().in_flight == 0)
    source.settle = settle
    eventually(lambda: drained(log))
    assert seen == [0]
    assert worker.health().ok


def test_a8_an_exception_in_a_handler_never_ends_the_worker(workers):
    log, seen = log_of(3), []
    router = Router()

    @router.event()
    def flaky(order: PlaceOrder, message: Message) -> None:
        if message.deliveries < 3:
            raise SystemExit if message.deliveries == 1 else RecursionError
        seen.append(order.id)

    worker = start(workers, log.source("g"), router)
    eventually(lambda: drained(log))
    assert sorted(seen) == [0, 1, 2]
    assert worker.health().ok


def test_a8_a_middleware_that_leaves_by_systemexit_never_ends_the_worker(workers):
    log, seen = log_of(1), []
    leaving = [True]
    router = recording(seen)

    def leave_once(next: Any) -> Any:
        def process(batch: Any) -> Any:
            if leaving:
                leaving.pop()
                raise SystemExit
            return next(batch)

        return process

    router.use(leave_once)
    worker = start(workers, log.source("g"), router)
    eventually(lambda: drained(log))
    assert seen == [0]
    assert worker.health().ok


def test_a_source_that_fails_is_asked_again(workers):
    log, seen = log_of(2), []
    source = log.source("g")
    read, failures = source.read, [ConnectionError("a"), ConnectionError("b")]

    def flaky(limit: int, timeout: float) -> Sequence[Message[Any]]:
        if failures:
            raise failures.pop()
        return read(limit, timeout)

    source.read = flaky
    worker = start(workers, source, recording(seen))
    eventually(lambda: drained(log))
    assert seen == [0, 1]
    assert worker.health().failures_in_a_row == 0


def test_the_end_of_a_source_is_the_end_of_the_worker():
    class Three:
        left = 3

        def read(self, limit: int, timeout: float) -> list[Message[Any]]:
            if not self.left:
                raise EndOfSource
            self.left -= 1
            return [order(self.left)]

        def close(self) -> None: ...

    seen: list[int] = []
    assert Worker(Three(), recording(seen), threads=2).run()
    assert sorted(seen) == [0, 1, 2]


# --- A7: stopping ------------------------------------------------------------------------------


def blocking_router(running: threading.Event, release: threading.Event) -> Router:
    router = Router()

    @router.event()
    def block(order: PlaceOrder) -> None:
        running.set()
        release.wait(30)

    return router


def test_a7_a_soft_stop_finishes_what_is_in_flight_and_reads_no_more(workers):
    log, running, release = log_of(3), threading.Event(), threading.Event()
    router = blocking_router(running, release)
    worker = start(workers, log.source("g"), router, batch_size=1)
    assert running.wait(10)
    stopped: list[bool] = []
    stopper = threading.Thread(target=lambda: stopped.append(worker.stop(grace=30)))
    stopper.start()
    eventually(lambda: worker.health().state == "stopping")
    release.set()
    stopper.join(20)
    assert stopped == [True]
    assert len(log.unsettled("g")) == 2
    assert worker.health().state == "stopped"


def test_a7_after_the_grace_time_unfinished_work_is_not_acked_and_costs_no_attempt(workers):
    log, running, release = log_of(1), threading.Event(), threading.Event()
    worker = start(workers, log.source("g"), blocking_router(running, release))
    assert running.wait(10)
    assert worker.stop(grace=0) is False
    [again] = log.source("g").read(1, 10)
    assert again.deliveries == 1
    release.set()
    eventually(lambda: worker.health().threads_alive == 0)
    assert again.ack()
    assert drained(log)


def test_messages_that_wait_in_a_lane_are_given_back_at_a_stop(workers):
    log = Log()
    log.sink("c").publish([order(n, partitionkey="k") for n in range(10)])
    running, release = threading.Event(), threading.Event()
    router = blocking_router(running, release)
    worker = start(workers, log.source("g"), router, threads=2, ordered=True, batch_size=2)
    assert running.wait(10)
    worker.stop(grace=0)
    release.set()
    again = log.source("g").read(100, 10)
    assert len(again) == 10
    assert {message.deliveries for message in again} == {1}


def test_a_stop_ends_a_retrying_wait_at_once(workers):
    from conquiet.stopping import pause

    log, waiting = log_of(1), threading.Event()
    outcome: list[bool] = []
    router = Router()

    @router.event()
    def wait(order: PlaceOrder) -> None:
        waiting.set()
        outcome.append(pause(600))
        raise GivenBack("stopping")

    worker = start(workers, log.source("g"), router)
    assert waiting.wait(10)
    assert worker.stop(grace=20)
    assert outcome == [False]


def test_a_handler_may_ask_the_worker_to_stop():
    log = log_of(5)
    router = Router()

    @router.event()
    def last(order: PlaceOrder) -> None:
        assert worker.stop() is False

    worker = Worker(log.source("g"), router, batch_size=1)
    assert worker.run()
    assert len(log.unsettled("g")) == 4


def test_an_async_handler_may_ask_it_too():
    log = log_of(5)
    router = Router()

    @router.event()
    async def last(order: PlaceOrder) -> None:
        assert worker.stop() is False

    worker = Worker(log.source("g"), router, batch_size=1, grace=60)
    assert worker.run()
    assert len(log.unsettled("g")) == 4


def test_a_worker_is_started_once(workers):
    worker = start(workers, Log().source("g"), recording([]))
    with pytest.raises(ConfigError, match="started once"):
        worker.start()


def test_stopping_twice_or_before_the_start_does_no_harm():
    worker = Worker(Log().source("g"), recording([]))
    assert worker.stop()
    assert worker.stop()
    assert worker.health().state == "stopped"


def test_two_may_ask_for_a_stop_at_the_same_time(workers):
    log, running, release = log_of(1), threading.Event(), threading.Event()
    worker = start(workers, log.source("g"), blocking_router(running, release))
    assert running.wait(10)
    stopped: list[bool] = []
    askers = [
        threading.Thread(target=lambda: stopped.append(worker.stop(grace=30))) for _ in range(2)
    ]
    for asker in askers:
        asker.start()
    assert worker.stop(grace=0.01) is False  # it waited no longer, and nothing was given up
    release.set()
    for asker in askers:
        asker.join(20)
    assert stopped == [True, True]
    assert drained(log)


def test_new_poison_does_not_slow_down_what_comes_after_it(workers):
    class Poison:
        def read(self, limit: int, timeout: float) -> list[Message[Any]]:
            return [Message(b"poison", {"id": new_id(), "type": "place.order"})]

        def close(self) -> None: ...

    worker = start(workers, Poison(), recording([]))
    eventually(lambda: worker.health().failed >= 1_000)


SCRIPT = """
    import sys, threading, time
    from conquiet import Message, Router, Worker
    from conquiet.memory import Log

    log = Log()
    for number in "01":
        log.sink("c").publish([Message(b"{}", {"id": number, "type": "t", "source": "/s"})])
    router = Router()

    @router.event(type="t")
    def slow(data: dict) -> None:
        print("running", flush=True)
        time.sleep(float(sys.argv[1]))

    worker = Worker(log.source("g"), router, batch_size=1, grace=60)
    print("clean" if worker.run() else "unclean", len(log.unsettled("g")), flush=True)
"""


def run_script(seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a7_a_signal_stops_softly(number):
    with run_script(1.0) as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "clean 1"
    assert process.returncode == 0


def test_a7_a_second_signal_does_not_wait_for_the_handler():
    with run_script(600) as process:
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)  # two signals at once would be one
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "unclean 2"


def test_signal_handlers_are_restored():
    former = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: signals.count == 1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == former


def test_source_and_sink_are_closed_at_a_stop_even_if_one_of_them_fails():
    closed: list[str] = []
    source, sink = Log().source("g"), Log().sink()

    def fail() -> None:
        closed.append("source")
        raise ConnectionError("away")

    source.close = fail
    sink.close = lambda: closed.append("sink")
    worker = Worker(source, recording([]), sink)
    worker.start()
    assert worker.stop()
    assert closed == ["source", "sink"]


def test_a_sink_that_does_not_answer_for_every_message_has_confirmed_none(workers):
    log, answers = log_of(1), [[], [None]]
    router, sink = Router(), Log().sink()

    @router.command(source="/orders")
    def place(order: PlaceOrder, message: Message) -> OrderPlaced:
        assert message.deliveries == 1  # it was not its fault
        return OrderPlaced(order.id)

    sink.publish = lambda messages: answers.pop(0)
    worker = start(workers, log.source("g"), router, sink)
    eventually(lambda: drained(log))
    assert answers == []
    assert "0 answers to 1 messages" in worker.health().last_error


@pytest.mark.parametrize("error", [ValueError, StoreError])
def test_a_batch_that_fails_again_and_again_is_not_asked_for_as_fast_as_possible(
    workers, error, monkeypatch
):
    waits: list[Backoff] = []
    monkeypatch.setattr(Backoff, "next", lambda backoff: waits.append(backoff) or 0.0)
    router = Router()

    @router.event()
    def fail(order: PlaceOrder) -> None:
        raise error

    start(workers, log_of(1).source("g"), router)
    eventually(lambda: len(waits) > 3)


# --- leases, health, settings ------------------------------------------------------------------


def test_a_handler_longer_than_its_lease_keeps_it(workers):
    log, ran, release = log_of(1), [], threading.Event()
    router = Router()

    @router.event()
    def long(order: PlaceOrder) -> None:
        ran.append(order.id)
        release.wait(20)

    start(workers, log.source("g", lease=0.3), router)
    eventually(lambda: ran == [0])
    rival = log.source("g", lease=0.3)
    assert list(rival.read(1, 1.5)) == []  # five leases long
    release.set()
    eventually(lambda: drained(log))
    assert ran == [0]


def test_leases_are_kept_even_if_the_hook_for_stuck_handlers_fails(workers, caplog):
    log, running, release = log_of(1), threading.Event(), threading.Event()
    router = blocking_router(running, release)

    def broken(health: Any) -> None:
        raise RuntimeError("the pager is down")

    start(workers, log.source("g", lease=0.3), router, stuck_after=0.1, on_stuck=broken)
    eventually(lambda: "the hook `on_stuck` failed" in caplog.text)
    assert list(log.source("g", lease=0.3).read(1, 1.0)) == []
    release.set()
    eventually(lambda: drained(log))


def test_health_tells_what_is_going_on_and_what_is_stuck(workers):
    log, running, release = log_of(1), threading.Event(), threading.Event()
    router = blocking_router(running, release)
    told: list[Any] = []
    worker = start(workers, log.source("g"), router, stuck_after=0.2, on_stuck=told.append)
    assert running.wait(10)
    eventually(lambda: told)
    health = worker.health()
    assert not health.ok
    assert health.in_flight == 1
    assert "place.order" in health.oldest
    release.set()
    eventually(lambda: worker.health().ok)
    assert worker.health().handled == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": 1.5},
        {"threads": 0},
        {"batch_wait": -1},
        {"grace": float("nan")},
        {"stuck_after": 0},
        {"ordered": "subject"},
    ],
)
def test_a_wrong_setting_is_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Worker(Log().source("g"), recording([]), **setting)
