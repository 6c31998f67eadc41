"""A worker on the caller's event loop: what runs where, how much at once, and how it stops."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest
import uvloop
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from tests.unit.chains import OrderPlaced, PlaceOrder
from tests.unit.middleware.routers import sum_of
from tests.unit.workers import drained, log_of, order

from conquiet import Message, Router, Worker, bridge
from conquiet.errors import ConfigError, ConquietError, DeadlineExceeded
from conquiet.memory import Inbox, Log, Outbox, Store, Transaction
from conquiet.middleware import Deadline, Metrics, Retry, Tracing
from conquiet.source import EndOfSource


def eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.SelectorEventLoop()  # whatever the policy: uvloop has no eager tasks
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    return loop


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
if sys.version_info >= (3, 12):
    LOOPS["eager"] = eager_loop


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def run(request):
    """Runs a coroutine function on each kind of loop."""

    def run(main):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(main())

    return run


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def router_of(handle: Any, *middlewares: Any, **options: Any) -> Router:
    router = Router(**options)
    router.use(*middlewares)
    router.event()(handle)
    return router


# --- what runs where --------------------------------------------------------------------------


def test_handlers_wait_together_on_the_callers_loop(run):
    log = log_of(100)
    loops = set()

    async def main():
        together = asyncio.Barrier(100)

        async def wait(order: PlaceOrder) -> None:
            loops.add(asyncio.get_running_loop())
            await together.wait()

        async with Worker(log.source("g"), router_of(wait), concurrency=100):
            await until(lambda: drained(log))
        assert loops == {asyncio.get_running_loop()}

    run(main)


def test_a_plain_handler_runs_in_a_thread_and_in_the_callers_context(run):
    log = log_of(20)
    name: ContextVar[str] = ContextVar("name")
    seen: list[tuple[str, bool]] = []

    async def main():
        loop_thread = threading.current_thread()
        name.set("outside")

        def note(order: PlaceOrder) -> None:
            seen.append((name.get(), threading.current_thread() is loop_thread))

        async with Worker(log.source("g"), router_of(note)):
            await until(lambda: drained(log))

    run(main)
    assert seen == [("outside", False)] * 20


def test_what_a_handler_sets_in_its_context_is_not_seen_by_the_next():
    log = log_of(5)
    mark: ContextVar[int | None] = ContextVar("mark", default=None)
    seen: list[int | None] = []

    async def note(order: PlaceOrder) -> None:
        seen.append(mark.get())
        mark.set(order.id)

    async def main():
        async with Worker(log.source("g"), router_of(note), concurrency=1):
            await until(lambda: drained(log))

    asyncio.run(main())
    assert seen == [None] * 5


@pytest.mark.parametrize("is_async", [True, False])
def test_a_store_that_blocks_is_used_in_threads(is_async):
    """A chain of blocking clients works too; its async handlers still run on the caller's loop."""
    log, store = log_of(30), Store()
    router = Router()
    router.use(Transaction(store), Inbox("shop"), Outbox("orders"))
    loops = set()

    async def place_async(order: PlaceOrder) -> OrderPlaced:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        store.add("orders")
        return OrderPlaced(order.id)

    def place(order: PlaceOrder) -> OrderPlaced:
        store.add("orders")
        return OrderPlaced(order.id)

    router.command(source="/shop")(place_async if is_async else place)

    async def main():
        async with Worker(log.source("g"), router, concurrency=10):
            await until(lambda: drained(log))
        assert loops == ({asyncio.get_running_loop()} if is_async else set())

    asyncio.run(main())
    assert store.get("orders") == len(store.outbox()) == 30


def test_outputs_are_published_in_a_thread():
    log, published = log_of(10), Log()
    threads = set()

    class Slow:
        def publish_each(self, messages):
            threads.add(threading.current_thread())
            return published.sink("orders").publish_each(messages)

        def close(self) -> None: ...

    router = Router()

    @router.command(source="/shop")
    async def place(order: PlaceOrder) -> OrderPlaced:
        return OrderPlaced(order.id)

    async def main():
        async with Worker(log.source("g"), router, Slow()):
            await until(lambda: drained(log))
        assert threading.current_thread() not in threads

    asyncio.run(main())
    assert len(published.unsettled("any")) == 10


def test_a_handler_may_ack_by_itself():
    log = log_of(3)
    router = Router(ack="manual")

    @router.raw()
    async def ack(message: Message[bytes]) -> None:
        assert message.ack()
        assert not message.ack()

    async def main():
        async with Worker(log.source("g"), router):
            await until(lambda: drained(log))

    asyncio.run(main())


def test_a_pause_of_a_retry_leaves_the_loop_to_others():
    log = log_of(1)
    tries: list[float] = []
    beats = 0

    async def fail_once(order: PlaceOrder) -> None:
        tries.append(beats)
        if len(tries) == 1:
            raise ValueError("first")

    async def main():
        nonlocal beats
        retry = Retry(max_attempts=2, first=0.2, jitter=False)
        async with Worker(log.source("g"), router_of(fail_once, retry)):
            while not drained(log):
                beats += 1
                await asyncio.sleep(0.005)

    asyncio.run(main())
    assert len(tries) == 2
    assert tries[1] - tries[0] > 5


@pytest.mark.parametrize("is_async", [True, False])
def test_a_deadline_ends_a_handler_and_not_the_loop(is_async, untraced):
    log = log_of(1)
    errors: list[BaseException] = []

    async def sleep(order: PlaceOrder) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError as error:
            errors.append(error)
            raise

    def spin(order: PlaceOrder) -> None:
        try:
            while True:
                time.sleep(0.001)
        except BaseException as error:
            errors.append(error)
            raise

    async def main():
        router = router_of(sleep if is_async else spin, Deadline(0.05))
        async with Worker(log.source("g"), router) as worker:
            await until(lambda: worker.health().failed)
        assert DeadlineExceeded.__name__ in worker.health().last_error

    asyncio.run(main())
    assert errors


@pytest.mark.parametrize("is_async", [True, False])
def test_spans_and_metrics_of_messages_in_flight_stay_apart(run, is_async):
    log = Log()
    traces = [f"{number + 1:032x}" for number in range(8)]
    for number, trace_id in enumerate(traces):
        parent = f"00-{trace_id}-{'1' * 16}-01"
        log.sink("commands").publish([order(number, traceparent=parent)])
    registry, provider = CollectorRegistry(), TracerProvider()
    seen: dict[int, set[str]] = {}
    in_flight: list[float] = []
    threads = threading.Barrier(8)

    def note(order: PlaceOrder) -> None:
        context = trace.get_current_span().get_span_context()
        seen.setdefault(order.id, set()).add(f"{context.trace_id:032x}")
        in_flight.append(sum_of(registry, "conquiet_messages_in_flight"))

    def block(order: PlaceOrder) -> None:
        note(order)
        threads.wait(10)
        note(order)

    async def main():
        tasks = asyncio.Barrier(8)

        async def wait(order: PlaceOrder) -> None:
            note(order)
            await tasks.wait()
            note(order)

        router = router_of(wait if is_async else block, Metrics(registry), Tracing(provider))
        async with Worker(log.source("g"), router):
            await until(lambda: drained(log))

    run(main)
    assert seen == {number: {trace_id} for number, trace_id in enumerate(traces)}
    assert max(in_flight) == 8
    assert sum_of(registry, "conquiet_messages_in_flight") == 0
    name = "wait" if is_async else "block"
    assert sum_of(registry, "conquiet_handler_seconds_count", handler=name) == 8
    assert sum_of(registry, "conquiet_messages_total", handler=name, outcome="ok") == 8


# --- how much at once -------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "most"), [(None, 5), (3, 15)])
def test_no_more_is_read_than_can_be_in_flight(batch_size, most):
    log = log_of(200)

    async def main():
        release = asyncio.Event()
        running: list[int] = []

        async def block(order: PlaceOrder) -> None:
            running.append(order.id)
            await release.wait()

        worker = Worker(log.source("g"), router_of(block), batch_size=batch_size, concurrency=5)
        async with worker:
            await until(lambda: len(running) == 5)
            await asyncio.sleep(0.05)
            assert worker.health().in_flight == most
            assert len(running) == 5
            release.set()
            await until(lambda: drained(log))

    asyncio.run(main())


def test_a_list_of_messages_is_handled_in_one_call():
    log = log_of(100)
    calls: list[int] = []

    async def note(orders: list[PlaceOrder]) -> None:
        calls.append(len(orders))

    async def main():
        async with Worker(log.source("g"), router_of(note), concurrency=2):
            await until(lambda: drained(log))

    asyncio.run(main())
    assert sum(calls) == 100
    assert max(calls) >= 50


def test_messages_of_a_key_are_handled_in_order_also_after_a_failure():
    log = Log()
    for number in range(60):
        log.sink("commands").publish([order(number, partitionkey=f"k{number % 3}")])
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    failed: set[int] = set()

    async def note(order: PlaceOrder) -> None:
        await asyncio.sleep(0)
        if order.id % 7 == 0 and order.id not in failed:
            failed.add(order.id)
            raise ValueError("first")
        seen[order.id % 3].append(order.id)

    async def main():
        worker = Worker(log.source("g"), router_of(note), batch_size=4, concurrency=4, ordered=True)
        async with worker:
            await until(lambda: drained(log), 30)

    asyncio.run(main())
    for key, ids in seen.items():
        assert ids == list(range(key, 60, 3))


# --- how it stops -----------------------------------------------------------------------------


class Blocked:
    """A worker whose only message waits until it is released."""

    def __init__(self, **options: Any) -> None:
        self.log = log_of(1)
        self.running, self.release = asyncio.Event(), asyncio.Event()
        self.ended: list[str] = []
        self.worker = Worker(self.log.source("g"), router_of(self.block), **options)

    async def block(self, order: PlaceOrder) -> None:
        self.running.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("finished")


def test_a_cancellation_stops_softly_and_is_raised(run):
    async def main():
        blocked = Blocked()
        task = asyncio.create_task(blocked.worker.run_async())
        await blocked.running.wait()
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        blocked.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blocked.ended == ["finished"]
        assert drained(blocked.log)
        assert blocked.worker.health().state == "stopped"

    run(main)


def test_a_second_cancellation_gives_back_what_is_unfinished(run):
    async def main():
        blocked = Blocked()
        task = asyncio.create_task(blocked.worker.run_async())
        await blocked.running.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blocked.ended == ["cancelled"]
        [message] = blocked.log.source("g").read(1, 0)
        assert message.deliveries == 1, "it cost no attempt"

    run(main)


def test_after_the_grace_time_handlers_are_cancelled(run):
    async def main():
        blocked = Blocked(grace=0.05)
        async with blocked.worker:
            await blocked.running.wait()
        assert blocked.ended == ["cancelled"]
        [message] = blocked.log.source("g").read(1, 0)
        assert message.deliveries == 1, "it cost no attempt"

    run(main)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it(run, number):
    async def main():
        blocked = Blocked()
        task = asyncio.create_task(blocked.worker.run_async())
        await blocked.running.wait()
        signal.raise_signal(number)
        await asyncio.sleep(0.1)
        assert not task.done()
        blocked.release.set()
        assert await task

    former = signal.getsignal(number)
    run(main)
    assert signal.getsignal(number) is former


def test_a_signal_stops_all_workers_of_a_loop():
    async def main():
        workers = [Worker(log_of(1).source("g"), router_of(ignore)) for _ in range(2)]
        tasks = [asyncio.create_task(worker.run_async()) for worker in workers]
        await until(lambda: all(worker.health().handled for worker in workers))
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await asyncio.gather(*tasks) == [True, True]

    async def ignore(order: PlaceOrder) -> None: ...

    former = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_handler_may_stop_it():
    log = log_of(3)

    async def main():
        async def stop(order: PlaceOrder) -> None:
            worker.stop()

        worker = Worker(log.source("g"), router_of(stop), concurrency=1)
        assert await worker.run_async()

    asyncio.run(main())
    assert len(log.unsettled("g")) == 2


def test_it_can_be_stopped_from_a_thread():
    async def main():
        blocked = Blocked()
        async with blocked.worker:
            await blocked.running.wait()
            waiting = asyncio.create_task(asyncio.to_thread(blocked.worker.stop, 5))
            await asyncio.sleep(0)
            blocked.release.set()
        assert await waiting

    asyncio.run(main())


def test_the_grace_time_of_a_stop_from_a_thread_counts():
    async def main():
        blocked = Blocked(grace=60)
        running = asyncio.create_task(blocked.worker.run_async())
        await blocked.running.wait()
        patient = asyncio.create_task(asyncio.to_thread(blocked.worker.stop))
        while not blocked.worker._stopping.is_set():
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert not await asyncio.to_thread(blocked.worker.stop, 0)
            assert not await running
            assert not await patient
        assert blocked.ended == ["cancelled"]

    asyncio.run(main())


def test_the_end_of_a_source_ends_it():
    log = log_of(5)
    inner = log.source("g")

    class Ending:
        def read(self, limit, timeout):
            found = inner.read(limit, 0)
            if not found:
                raise EndOfSource
            return found

        def close(self):
            inner.close()

    async def main():
        async def slow(order: PlaceOrder) -> None:
            await asyncio.sleep(0.01)

        assert await Worker(Ending(), router_of(slow), concurrency=2).run_async()

    asyncio.run(main())
    assert drained(log)


@pytest.mark.parametrize("how", ["raises", "cancels its task", "awaits a cancelled one"])
def test_a_handler_that_is_cancelled_fails_alone(how):
    log = log_of(4)
    done: list[int] = []

    async def cancel(order: PlaceOrder) -> None:
        if order.id == 1 and 1 not in done:
            done.append(1)
            if how == "raises":
                raise asyncio.CancelledError
            if how == "cancels its task":
                asyncio.current_task().cancel()
            else:
                other = asyncio.ensure_future(asyncio.sleep(10))
                other.cancel()
                await other
            await asyncio.sleep(0)

    async def main():
        async with Worker(log.source("g"), router_of(cancel)) as worker:
            await until(lambda: drained(log))
        assert worker.health().failed == (how != "cancels its task")  # which breaks the chain
        assert worker.health().given_back == 0

    asyncio.run(main())


def test_a_failed_read_is_retried():
    log = log_of(1)
    inner = log.source("g")
    failures = [ConnectionError("away")]

    class Flaky:
        def read(self, limit, timeout):
            if failures:
                raise failures.pop()
            return inner.read(limit, timeout)

        def close(self):
            inner.close()

    async def nothing(order: PlaceOrder) -> None: ...

    async def main():
        async with Worker(Flaky(), router_of(nothing)):
            await until(lambda: drained(log))

    asyncio.run(main())


def test_it_starts_once():
    async def nothing(order: PlaceOrder) -> None: ...

    async def main():
        worker = Worker(Log().source("g"), router_of(nothing))
        async with worker:
            with pytest.raises(ConfigError, match="once"):
                await worker.run_async()

    asyncio.run(main())


def test_a_source_with_an_async_client_needs_a_loop():
    class OnLoop:
        is_async = True

    async def nothing(order: PlaceOrder) -> None: ...

    with pytest.raises(ConfigError, match="run_async"):
        Worker(OnLoop(), router_of(nothing)).start()


def test_a_source_may_run_on_the_loop():
    log = log_of(10)
    inner = log.source("g")
    loop_thread = threading.current_thread()

    class OnLoop:
        is_async = True
        lease = 0.03
        renewed = 0

        def read(self, limit, timeout):
            assert threading.current_thread() is loop_thread
            bridge.wait_for(asyncio.sleep(0.001))
            return inner.read(limit, 0)

        def renew(self, messages):
            assert threading.current_thread() is loop_thread
            self.renewed += 1

        def close(self):
            bridge.wait_for(asyncio.sleep(0))
            inner.close()

    source = OnLoop()

    async def main():
        async def slow(order: PlaceOrder) -> None:
            await until(lambda: source.renewed > 1)

        async with Worker(source, router_of(slow)):
            await until(lambda: drained(log))

    asyncio.run(main())


def test_greenlet_missing_is_named(monkeypatch):
    async def nothing(order: PlaceOrder) -> None: ...

    monkeypatch.setattr(bridge, "_kind", None)
    monkeypatch.setitem(sys.modules, "greenlet", None)

    async def main():
        with pytest.raises(ConfigError, match=r"conquiet\[async\]"):
            await Worker(Log().source("g"), router_of(nothing)).run_async()

    asyncio.run(main())


# --- what it must not do in silence -----------------------------------------------------------


def test_a_handler_that_ignores_its_cancellation_is_named_and_does_not_keep_the_worker(
    monkeypatch, caplog
):
    monkeypatch.setattr("conquiet.worker._CANCEL_SECONDS", 0.05)
    log = log_of(1)

    async def main():
        begun, release = asyncio.Event(), asyncio.Event()

        async def ignore(order: PlaceOrder) -> None:
            begun.set()
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    pass

        worker = Worker(log.source("g"), router_of(ignore), grace=0.01)
        running = asyncio.create_task(worker.run_async())
        await begun.wait()
        worker.stop()
        async with asyncio.timeout(5):
            assert not await running
        assert len(log.unsettled("g")) == 1
        release.set()

    asyncio.run(main())
    [line] = [one for one in caplog.messages if "still not finished" in one]
    assert "place.order id=" in line
    assert "CancelledError" in line


def test_a_reader_that_fails_ends_the_worker_with_an_error():
    class Broken:
        is_async = True

        def read(self, limit, timeout):
            raise asyncio.CancelledError  # as of a client whose own task was cancelled

        def close(self) -> None: ...

    async def nothing(order: PlaceOrder) -> None: ...

    async def main():
        async with asyncio.timeout(5):
            with pytest.raises(ConquietError, match="its reader failed: CancelledError"):
                await Worker(Broken(), router_of(nothing)).run_async()

    asyncio.run(main())


def test_a_signal_is_logged(caplog):
    async def main():
        blocked = Blocked(grace=7)
        task = asyncio.create_task(blocked.worker.run_async())
        await blocked.running.wait()
        signal.raise_signal(signal.SIGTERM)
        blocked.release.set()
        await task

    with caplog.at_level("INFO", logger="conquiet.worker"):
        asyncio.run(main())
    assert "stopping by a signal" in caplog.text


def test_a_cancellation_that_comes_as_a_shielded_wait_ends_waits_for_the_end_of_the_shield():
    """A COMMIT that has succeeded must not look as if it had not."""

    async def main():
        committed = asyncio.get_running_loop().create_future()
        seen = []

        def chain():
            with bridge.shield():
                seen.append(bridge.wait_for(committed))
            seen.append("shield ended")
            bridge.sleep(0)
            seen.append("not reached")

        task = asyncio.create_task(bridge.run(chain))
        await asyncio.sleep(0)
        committed.set_result("committed")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["committed", "shield ended"]

    asyncio.run(main())


@pytest.mark.parametrize("has_server", [True, False])
def test_a_signal_handler_that_it_replaces_is_named(caplog, has_server):
    class Server:
        def handle_exit(self, number, frame) -> None: ...

    async def nothing(order: PlaceOrder) -> None: ...

    async def main():
        worker = Worker(log_of(1).source("g"), router_of(nothing))
        running = asyncio.create_task(worker.run_async())
        await until(lambda: worker.health().handled)
        worker.stop()
        await running

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # others in this process have theirs
    signal.signal(signal.SIGTERM, Server().handle_exit if has_server else signal.SIG_DFL)
    try:
        asyncio.run(main())
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert ("Server.handle_exit" in caplog.text) == has_server
    assert ("async with worker" in caplog.text) == has_server


class Steps:
    """Waits for a future, for the next turn of the loop, and for another future."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first, self.second = loop.create_future(), loop.create_future()
        self.seen: list[object] = []

    async def run(self) -> str:
        self.seen.append(await self.first)
        await asyncio.sleep(0)
        try:
            await self.second
        except LookupError as error:
            self.seen.append(str(error))
        return "done"


@pytest.mark.parametrize("at", range(4))
def test_a_cancellation_waits_for_what_is_unbroken(run, at):
    async def main() -> None:
        steps = Steps()
        after: list[object] = []

        def chain() -> None:
            whole = bridge.Unbroken(steps.run(), bridge.current())
            after.append(bridge.wait_for(whole))
            bridge.wait_for(asyncio.sleep(0))
            after.append("not cancelled")

        task = asyncio.ensure_future(bridge.run(chain))
        for number, go_on in enumerate(
            (
                lambda: None,
                lambda: steps.first.set_result(1),
                lambda: None,
                lambda: steps.second.set_exception(LookupError("lost")),
            )
        ):
            await asyncio.sleep(0)
            go_on()
            if number == at:
                task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps.seen == [1, "lost"]
        assert after == ["done"]

    run(main)
