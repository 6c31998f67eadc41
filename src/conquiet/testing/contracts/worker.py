"""The contract of a source under a worker: the two together lose nothing and repeat nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from conquiet.acking import Error
from conquiet.errors import SinkUnavailable
from conquiet.memory import Log, Store, Transaction
from conquiet.message import Message
from conquiet.router import Router
from conquiet.sink import Sink
from conquiet.source import Leased
from conquiet.testing import eventually
from conquiet.testing.contracts.samples import ids, make_messages
from conquiet.testing.contracts.source import LONG, ConsumerContract
from conquiet.worker import Worker

Run = Callable[[Message[Any]], Any]


class WorkerBinding(ConsumerContract):
    """Starts workers over a source; the base of the contracts of worker and delays.

    As needed, beside those of `ConsumerContract`: `on_loop`.
    """

    bindings = ConsumerContract.bindings | {"on_loop", "loop"}

    on_loop: bool = False
    """True to run workers by `run_async()`, with async handlers, on an event loop."""

    loop: asyncio.AbstractEventLoop | None = None
    """A loop for them that runs in another thread than the test; else each test has one."""

    @pytest.fixture(autouse=True)
    def _stop_workers(self) -> Iterator[None]:
        self._workers: list[Worker] = []
        self._go = threading.Event()  # lets handlers go that wait for it
        self._calls: list[tuple[str, int]] = []
        with _running_loop() if self.on_loop else nullcontext() as self._own_loop:
            yield
            self._go.set()
            for worker in self._workers:
                worker.stop(grace=5)

    def work(self, run: Run, sink: Sink | None = None, lease: float = LONG, **options: Any) -> Any:
        """Start a worker whose handler notes each call, and then does `run`."""
        router: Router = options.pop("router", None) or Router()

        def handle(message: Message[Any]) -> Any:
            self._calls.append((message.id, message.deliveries))
            return run(message)

        async def handle_async(message: Message[Any]) -> Any:
            return await asyncio.to_thread(handle, message)  # it may block

        loop = self.loop or self._own_loop
        register = router.raw(name="handler", source="/contract")
        if loop is None:
            register(handle)
        else:
            register(handle_async)
            options["concurrency"] = options.pop("threads", 1)
        worker = Worker(self.consumer(lease), router, sink, **options)
        self._workers.append(worker)
        if loop is None:
            worker.start()
        else:
            working = asyncio.run_coroutine_threadsafe(worker.run_async(), loop)
            eventually(lambda: working.done() or worker.health().state == "running", timeout=30)
        return worker

    def list_calls(self) -> list[str]:
        return [name for name, _ in self._calls]

    def stop(self, *workers: Worker) -> None:
        for worker in workers:
            assert worker.stop(grace=20)

    def until_handled(self, worker: Worker, count: int) -> None:
        """Wait until so many messages were acked."""

        def are_handled() -> bool:
            health = worker.health()
            return health.handled - health.failed >= count

        eventually(are_handled, timeout=30, message=f"{count} messages handled")


class WorkerContract(WorkerBinding):
    """A worker reads a source through a router. Binding: see `ConsumerContract`."""

    # --- the plain path ---------------------------------------------------------------------

    @pytest.mark.parametrize("threads", [1, 3])
    def test_every_message_is_handled_once_and_acked(self, threads: int) -> None:
        sent = self.send(50)
        worker = self.work(_nothing, threads=threads, batch_size=7)
        self.until_handled(worker, 50)
        self.stop(worker)
        assert sorted(self.list_calls()) == sorted(sent)
        self.expect_rest([])

    def test_two_workers_split_the_messages_and_miss_none(self) -> None:
        sent = self.send(60)
        workers = [self.work(_nothing, batch_size=5), self.work(_nothing, batch_size=5)]
        eventually(lambda: len(self._calls) >= 60, timeout=30)
        self.stop(*workers)
        assert sorted(self.list_calls()) == sorted(sent)
        self.expect_rest([])

    # --- failures ---------------------------------------------------------------------------

    def test_an_exception_in_a_handler_never_ends_the_worker(self) -> None:
        sent = self.send(6)

        def fail_twice(message: Message[Any]) -> None:
            if message.id == "m-2" and message.deliveries < 3:
                raise ValueError("not yet")

        worker = self.work(fail_twice, lease=self.returning)
        self.until_handled(worker, 6)
        assert worker.health().ok
        self.stop(worker)
        calls = Counter(self.list_calls())
        assert [calls.pop("m-2")] == [3]
        assert calls == Counter(name for name in sent if name != "m-2")
        assert [count for name, count in self._calls if name == "m-2"] == [1, 2, 3]
        self.expect_rest([])

    def test_a_store_that_fails_gives_back_the_batch_and_costs_no_attempt(self) -> None:
        sent = self.send(5)
        store, router = Store(), Router()
        router.use(Transaction(store))
        store.fail_next("commit", 2 * Transaction.max_store_attempts)
        worker = self.work(
            lambda message: store.add(message.id), router=router, lease=self.returning
        )
        self.until_handled(worker, 5)
        self.stop(worker)
        assert [store.get(name) for name in sent] == [1] * 5
        assert {deliveries for _, deliveries in self._calls} == {1}
        self.expect_rest([])

    def test_one_failing_message_of_a_batch_leaves_the_effects_of_others_once(self) -> None:
        sent = self.send(6)
        store, router = Store(), Router()
        router.use(Transaction(store))

        def effect(message: Message[Any]) -> None:
            store.add(message.id)
            if message.id == "m-3" and message.deliveries == 1:
                raise ValueError("the first time")

        worker = self.work(effect, router=router, lease=self.returning)
        self.until_handled(worker, 6)
        self.stop(worker)
        assert [store.get(name) for name in sent] == [1] * 6
        self.expect_rest([])

    # --- leases -----------------------------------------------------------------------------

    def test_a_handler_longer_than_its_lease_is_not_run_twice(self) -> None:
        if self.lease is None or not isinstance(self.consumer(), Leased):
            pytest.skip("this source knows no leases")
        length = 3 * self.lease
        self.send(1)
        workers = [self.work(lambda message: time.sleep(length), lease=self.lease) for _ in "ab"]
        eventually(lambda: sum(worker.health().handled for worker in workers), timeout=30)
        self.stop(*workers)
        assert self._calls == [("m-0", 1)]
        self.expect_rest([])

    # --- stopping ---------------------------------------------------------------------------

    def test_a_soft_stop_finishes_what_is_in_flight_and_reads_no_more(self) -> None:
        sent = self.send(6)
        worker = self.work(self._wait, lease=self.returning, batch_size=2)
        eventually(self.list_calls)
        finished: list[bool] = []
        stopper = threading.Thread(target=lambda: finished.append(worker.stop(grace=30)))
        stopper.start()
        eventually(lambda: worker.health().state == "stopping")
        self._go.set()
        stopper.join(30)
        assert finished == [True]
        assert sorted(self.list_calls()) == sorted(sent[:2])
        self.expect_rest(sent[2:])

    def test_a_hard_stop_acks_nothing_unfinished_and_costs_no_attempt(self) -> None:
        sent = self.send(3)
        worker = self.work(self._wait, lease=self.returning, batch_size=2)
        eventually(self.list_calls)
        assert worker.stop(grace=0.05) is False
        source = self.consumer()
        again = self.take(source, 3)
        assert sorted(ids(again)) == sorted(sent)
        if self.keeps_count:
            assert {message.deliveries for message in again} == {1}
        self._go.set()
        eventually(lambda: worker.health().threads_alive == 0)
        for message in again:
            message.nack(ValueError("the late ack of the old worker must not count"))
        source.close()
        self.expect_rest(sent)

    # --- order ------------------------------------------------------------------------------

    @pytest.mark.parametrize("threads", [1, 3])
    def test_the_order_of_a_key_holds_while_messages_fail_and_return(self, threads: int) -> None:
        if not self.keeps_place:
            pytest.skip("this source does not keep the place of a message")
        keys, length = "abcd", 15
        batch = [
            message
            for number in range(length)
            for key in keys
            for message in make_messages(1, id=f"{key}-{number}", partitionkey=key)
        ]
        self.publish(batch)
        done: list[str] = []

        def fail_sometimes(message: Message[Any]) -> None:
            if int(message.id[2:]) % 4 == 1 and message.deliveries < 3:
                raise ValueError("not yet")
            done.append(message.id)

        worker = self.work(
            fail_sometimes, lease=self.returning, threads=threads, ordered=True, batch_size=3
        )
        self.until_handled(worker, len(batch))
        self.stop(worker)
        for key in keys:
            expected = [f"{key}-{number}" for number in range(length)]
            assert [name for name in done if name.startswith(key)] == expected
        self.expect_rest([])

    # --- outputs ----------------------------------------------------------------------------

    def test_outputs_are_published_before_their_input_is_acked(self) -> None:
        self.send(1)
        inputs: list[Message[Any]] = []
        sink = _Sink(lambda output: _assert_unsettled(inputs))

        def forward(message: Message[Any]) -> list[Message[Any]]:
            inputs.append(message)
            return [_output(message)]

        worker = self.work(forward, sink)
        self.until_handled(worker, 1)
        self.stop(worker)
        assert sink.published == ["m-0/out"]

    def test_a_sink_out_of_reach_costs_no_attempt(self) -> None:
        sent = self.send(4)
        log = Log()
        sink = log.sink("outputs")
        sink.fail_next(3)
        worker = self.work(lambda message: [_output(message)], sink, lease=self.returning)
        self.until_handled(worker, 4)
        self.stop(worker)
        assert sorted(ids(list(log.replay()))) == sorted(f"{name}/out" for name in sent)
        assert {deliveries for _, deliveries in self._calls} == {1}
        self.expect_rest([])

    def test_an_output_that_is_refused_fails_its_own_input_alone(self) -> None:
        self.send(4)
        refusals = [ValueError("refused")]

        def refuse_once(output: Message[Any]) -> Error:
            return refusals.pop() if output.id == "m-1/out" and refusals else None

        sink = _Sink(refuse_once)
        worker = self.work(lambda message: [_output(message)], sink, lease=self.returning)
        self.until_handled(worker, 4)
        self.stop(worker)
        assert sorted(sink.published) == ["m-0/out", "m-1/out", "m-2/out", "m-3/out"]
        assert Counter(self.list_calls()) == {"m-0": 1, "m-1": 2, "m-2": 1, "m-3": 1}
        self.expect_rest([])

    def _wait(self, message: Message[Any]) -> None:
        assert self._go.wait(60)


@contextmanager
def _running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name="contract-loop", daemon=True)
        thread.start()
        yield loop
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class _Sink(Sink):
    """Asks a function for each answer and keeps the ids of what it confirmed."""

    def __init__(self, answer: Callable[[Message[Any]], Error]) -> None:
        self._answer = answer
        self.published: list[str] = []

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        answers = [self._answer(message) for message in messages]
        confirmed = zip(messages, answers, strict=True)
        self.published += [message.id for message, answer in confirmed if answer is None]
        return answers

    def close(self) -> None:
        pass


def _nothing(message: Message[Any]) -> None:
    pass


def _output(message: Message[Any]) -> Message[Any]:
    return Message(b"", {"type": "output", "id": f"{message.id}/out"})


def _assert_unsettled(inputs: Sequence[Message[Any]]) -> Error:
    settled = any(item.acking is not None and item.acking.settled for item in inputs)
    return (
        SinkUnavailable("an input was acked before its output was published") if settled else None
    )
