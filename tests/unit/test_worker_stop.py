"""How a worker stops: softly, by a signal, by its handler, at the end of its source."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
from tests import zygote
from tests.unit.chains import PlaceOrder
from tests.unit.workers import blocking_router, drained, log_of, order, recording, start
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.errors import ConfigError, GivenBack
from conquiet.memory import Log
from conquiet.shutdown import Signals
from conquiet.source import EndOfSource


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
    from conquiet.shutdown import pause

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


# --- event loops ------------------------------------------------------------------------------


def test_a_worker_that_stops_leaves_the_event_loop_to_others_of_its_router(workers):
    running, release, done = threading.Event(), threading.Event(), []
    router = Router()

    @router.event()
    async def wait(order: PlaceOrder, message: Message) -> None:
        running.set()
        while not release.is_set():
            await asyncio.sleep(0.001)
        done.append(message.deliveries)

    busy, idle = log_of(1), Log()
    start(workers, busy.source("g"), router)
    other = start(workers, idle.source("g"), router)
    assert running.wait(10)
    assert other.stop()
    release.set()
    eventually(lambda: drained(busy))
    assert done == [1]


def test_the_last_worker_of_a_router_ends_the_event_loop():
    seen: list[threading.Thread] = []
    router = Router()

    @router.event()
    async def note(order: PlaceOrder) -> None:
        seen.append(threading.current_thread())

    two = [Worker(log.source("g"), router) for log in (log_of(1), log_of(1))]
    for worker in two:
        worker.start()
    eventually(lambda: len(seen) == 2)
    assert seen[0] is seen[1]
    for worker in two:
        assert seen[0].is_alive()
        worker.stop()
    assert not seen[0].is_alive()


def test_a_worker_does_not_block_an_event_loop():
    worker = Worker(Log().source("g"), recording([]))

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"await worker\.run_async\(\)"):
            worker.run()
        worker.start()
        assert await asyncio.to_thread(worker.stop)

    asyncio.run(main())


# --- signals ----------------------------------------------------------------------------------


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
    process = zygote.Popen(command, stdout=subprocess.PIPE, text=True)
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
