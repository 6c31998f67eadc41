"""The contract of a source that keeps failed messages for later, under `Retry(delays=…)`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from conquiet import attempts
from conquiet.attempts import FailedAttempt
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.middleware import DeadLetter, Retry
from conquiet.middleware.dead_letter import replay
from conquiet.router import Router
from conquiet.testing import eventually
from conquiet.testing.contracts.samples import ids
from conquiet.testing.contracts.worker import WorkerBinding
from conquiet.worker import Worker

_SOON = 0.3
_LONG = 3_600.0


class DelayContract(WorkerBinding):
    """Binding: see `ConsumerContract`."""

    def try_later(
        self, run: Callable[[Message[Any]], Any], delays: list[float], **options: Any
    ) -> Worker:
        router = Router()
        self._letters = Log()
        router.use(DeadLetter(self._letters.sink(), max_attempts=1_000), Retry(delays=delays))
        worker: Worker = self.work(run, router=router, **options)
        return worker

    def dead(self) -> list[Message[Any]]:
        return list(self._letters.replay())

    def test_a_message_that_waits_holds_nothing_up_and_comes_back(self) -> None:
        sent = self.send(20)

        def fail_until_the_others_are_done(message: Message[Any]) -> None:
            if message.id == "m-3" and len(set(self.list_calls())) < 20:
                raise ValueError("not yet")

        worker = self.try_later(fail_until_the_others_are_done, [_SOON] * 200, batch_size=4)
        self.until_handled(worker, 20)
        self.stop(worker)
        calls = self.list_calls()
        assert sorted(name for name in calls if name != "m-3") == sorted({*sent} - {"m-3"})
        counts = [count for name, count in self._calls if name == "m-3"]
        assert counts == list(range(1, len(counts) + 1))
        assert len(counts) > 1
        assert self.dead() == []
        self.expect_rest([])

    def test_after_the_last_delay_it_is_a_dead_letter(self) -> None:
        self.send(3)

        def fail(message: Message[Any]) -> None:
            if message.id == "m-1":
                raise ValueError("never")

        worker = self.try_later(fail, [_SOON, _SOON])
        eventually(lambda: len(self.dead()) == 1, timeout=60)
        self.until_handled(worker, 3)
        self.stop(worker)
        [letter] = self.dead()
        assert (letter.id, letter.attributes["deadattempts"]) == ("m-1", "3")
        assert "failed 3 times, at last with ValueError: never" in letter.attributes["deadreason"]
        found = attempts.read(letter.attributes["deaderrors"])
        assert [(one.attempt, one.error) for one in found] == [
            (number, "ValueError: never") for number in (1, 2, 3)
        ]
        assert "deaderrors" not in replay(letter).attributes
        assert self.list_calls().count("m-1") == 3
        self.expect_rest([])

    def test_a_message_that_comes_back_has_the_errors_of_its_attempts(self) -> None:
        self.send(2)
        seen: list[tuple[FailedAttempt, ...]] = []
        begun = datetime.now(UTC)

        def fail_thrice(message: Message[Any]) -> None:
            if message.id == "m-1":
                seen.append(message.errors)
                if message.deliveries <= 3:
                    raise ValueError(f"no stock {message.deliveries}")

        worker = self.try_later(fail_thrice, [_SOON, _SOON, _SOON])
        self.until_handled(worker, 2)
        self.stop(worker)
        assert [[(one.attempt, one.error) for one in errors] for errors in seen] == [
            [(number, f"ValueError: no stock {number}") for number in range(1, count)]
            for count in range(1, 5)
        ]
        moments = [datetime.fromisoformat(one.time) for one in seen[-1]]
        second = timedelta(seconds=1)
        assert begun - second < moments[0] < moments[1] < moments[2] < datetime.now(UTC) + second
        self.expect_rest([])

    def test_a_message_that_waits_is_not_in_flight_and_outlives_its_worker(self) -> None:
        self.send(4)

        def fail_at_first(message: Message[Any]) -> None:
            if message.deliveries == 1:
                raise ValueError("not yet")

        first = self.try_later(fail_at_first, [2.0])
        eventually(lambda: len(self._calls) == 4, timeout=60)
        eventually(lambda: first.health().in_flight == 0, timeout=60)
        self.stop(first)
        second = self.try_later(fail_at_first, [2.0])
        eventually(lambda: len(self._calls) == 8, timeout=60)
        self.until_handled(second, 4)
        self.stop(second)
        assert sorted(count for _, count in self._calls) == [1] * 4 + [2] * 4
        self.expect_rest([])

    def test_a_killed_consumer_neither_loses_nor_doubles_what_waits(self) -> None:
        if self.lease is None:
            pytest.skip("the source has no leases")
        self.send(6)
        doomed = self.consumer(self.short)
        router = Router()
        router.use(Retry(delays=[_SOON]))

        @router.raw(name="handler", source="/contract")
        def fail(message: Message[Any]) -> None:
            raise ValueError("not yet")

        worker = Worker(doomed, router)
        chain = worker.build_chain()
        messages = self.take(doomed, 6)
        handled = router.run(messages[:3], chain)
        router.settle(handled)  # three wait in the store; the others are in flight
        self.crash(doomed)
        done = self.try_later(lambda message: None, [_SOON], lease=self.short)
        self.until_handled(done, 6)
        time.sleep(self.quiet)
        self.stop(done)
        assert sorted(self.list_calls()) == sorted(ids(messages))
        assert {name: count for name, count in self._calls if name in ids(messages[:3])} == (
            dict.fromkeys(ids(messages[:3]), 2)
        )
        self.expect_rest([])

    def test_in_an_ordered_worker_its_key_waits_and_the_others_flow(self) -> None:
        def fail_at_first(message: Message[Any]) -> None:
            if message.id == "a-0" and message.deliveries == 1:
                raise ValueError("not yet")

        for number in range(5):
            self.publish([_keyed(f"a-{number}", "a"), _keyed(f"b-{number}", "b")])
        worker = self.try_later(fail_at_first, [1.0], ordered=True, batch_size=3)
        self.until_handled(worker, 10)
        self.stop(worker)
        calls = self.list_calls()
        assert [name for name in calls if name[0] == "b"] == [f"b-{n}" for n in range(5)]
        assert [name for name in calls if name[0] == "a"] == [
            "a-0",
            *(f"a-{n}" for n in range(5)),
        ]
        self.expect_rest([])

    def test_in_an_ordered_worker_what_is_read_meanwhile_waits_behind_it_in_order(self) -> None:
        def fail_thrice(message: Message[Any]) -> None:
            if message.id == "a-0" and message.deliveries <= 3:
                raise ValueError("not yet")

        self.publish([_keyed("a-0", "a")])
        worker = self.try_later(fail_thrice, [0.5] * 3, ordered=True, batch_size=3)
        eventually(lambda: self.list_calls() == ["a-0"], timeout=60)
        for number in range(1, 8):
            self.publish([_keyed(f"a-{number}", "a"), _keyed(f"b-{number}", "b")])
        others = [f"b-{number}" for number in range(1, 8)]
        eventually(lambda: [id for id in self.list_calls() if id[0] == "b"] == others, timeout=60)
        eventually(lambda: worker.health().in_flight == 0, timeout=60)
        self.until_handled(worker, 15)
        self.publish([_keyed("a-8", "a")])
        self.until_handled(worker, 16)
        self.stop(worker)
        ours = [(name, count) for name, count in self._calls if name[0] == "a"]
        assert ours == [
            *(("a-0", count) for count in (1, 2, 3, 4)),
            *((f"a-{number}", 1) for number in range(1, 9)),
        ]
        self.expect_rest([])

    def test_in_an_ordered_worker_the_death_of_a_message_frees_its_key(self) -> None:
        def fail(message: Message[Any]) -> None:
            if message.id == "a-0":
                raise ValueError("never")

        self.publish([_keyed(f"a-{number}", "a") for number in range(4)])
        worker = self.try_later(fail, [_SOON], ordered=True)
        eventually(lambda: len(self.dead()) == 1, timeout=60)
        eventually(lambda: len(self.list_calls()) == 5, timeout=60)
        self.until_handled(worker, 4)
        self.stop(worker)
        assert self.list_calls() == ["a-0", "a-0", "a-1", "a-2", "a-3"]
        self.expect_rest([])

    def test_the_order_of_a_key_that_waits_outlives_its_worker(self) -> None:
        def fail_at_first(message: Message[Any]) -> None:
            if message.id == "a-0" and message.deliveries == 1:
                raise ValueError("not yet")

        self.publish([_keyed(f"a-{number}", "a") for number in range(4)])
        first = self.try_later(fail_at_first, [2.0], ordered=True)
        eventually(lambda: self.list_calls() == ["a-0"], timeout=60)
        eventually(lambda: first.health().in_flight == 0, timeout=60)
        self.stop(first)
        self.publish([_keyed("a-4", "a")])
        second = self.try_later(fail_at_first, [2.0], ordered=True)
        self.until_handled(second, 5)
        self.stop(second)
        assert self.list_calls() == ["a-0", *(f"a-{number}" for number in range(5))]
        self.expect_rest([])

    def test_without_order_its_key_does_not_wait(self) -> None:
        def fail(message: Message[Any]) -> None:
            if message.id == "a-0":
                raise ValueError("not for an hour")

        self.publish([_keyed(f"a-{number}", "a") for number in range(4)])
        worker = self.try_later(fail, [_LONG])
        self.until_handled(worker, 3)
        self.publish([_keyed("a-4", "a")])
        self.until_handled(worker, 4)
        self.stop(worker)
        assert self.list_calls() == [f"a-{n}" for n in range(5)]


def _keyed(name: str, key: str) -> Message[bytes]:
    attributes = {
        "specversion": "1.0",
        "id": name,
        "type": "order.placed",
        "source": "/contract",
        "subject": key,
    }
    return Message(b"{}", attributes)
