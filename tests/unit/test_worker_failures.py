"""Only a bug in its source ends a worker; what fails is asked for again, with pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.chains import PlaceOrder
from tests.unit.workers import drained, log_of, recording, refusing, start
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.app.app import Running
from conquiet.app.store import SqlStore
from conquiet.backoff import Backoff
from conquiet.errors import ConfigError, StoreError
from conquiet.memory import Log
from conquiet.message import new_id
from conquiet.middleware import DeadLetter


class Odd(BaseException):
    """What a library might raise past `except Exception`."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Odd])
@pytest.mark.parametrize("is_async", [False, True])
def test_a8_whatever_a_handler_raises_costs_its_neighbours_nothing(workers, error, is_async):
    log, dead, seen = log_of(3), Log(), []
    router = Router()
    router.use(DeadLetter(dead.sink(), max_attempts=2))

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


class Broken:
    """A source whose reads fail, after those of another source."""

    def __init__(self, error: Exception, *, source: Any = None) -> None:
        self.error = error
        self.source = source
        self.is_closed = False

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        found = self.source.read(limit, 0) if self.source is not None else ()
        if not found:
            raise self.error
        return found

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(ValueError("?"), True), (ConnectionError("away"), False), (StoreError("away"), False)],
)
def test_a_strange_error_of_a_source_is_logged_with_its_traceback(
    workers, caplog, error, has_traceback
):
    worker = start(workers, Broken(error), recording([]))
    eventually(lambda: worker.health().failures_in_a_row)
    eventually(lambda: "could not read" in caplog.text)
    assert ("in read\n" in caplog.text) is has_traceback
    assert worker.failure is None


BUGS = [TypeError("a bug"), AttributeError("a bug"), ConfigError("8 partitions, not 4")]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("error", BUGS, ids=repr)
def test_a_bug_in_a_source_ends_the_worker_which_raises_it(caplog, error, threads):
    log, seen = log_of(2), []
    source = Broken(error, source=log.source("g"))
    worker = Worker(source, recording(seen), threads=threads)
    with pytest.raises(type(error), match=str(error)):
        worker.run()
    assert (sorted(seen), drained(log), source.is_closed) == ([0, 1], True, True)
    assert worker.failure is error
    assert not worker.health().ok
    assert "the worker ends" in caplog.text


@pytest.mark.parametrize("error", BUGS, ids=repr)
def test_a_bug_in_a_source_ends_an_async_worker_which_raises_it(caplog, error):
    log, seen = log_of(2), []
    source = Broken(error, source=log.source("g"))
    worker = Worker(source, recording(seen))
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(worker.run_async())
    assert (sorted(seen), drained(log), source.is_closed) == ([0, 1], True, True)
    assert worker.failure is error
    assert "the worker ends" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_an_app_whose_source_has_a_bug_does_not_end_as_if_all_were_well(is_async, tmp_path):
    worker = Worker(Broken(TypeError("a bug")), recording([]))
    store = SqlStore(f"sqlite:///{tmp_path}/shop.db", "shop", None)
    assert not Running([worker], None, store).run(is_async=is_async)


def test_a_source_that_returns_nothing_at_all_ends_the_worker():
    class Forgetful:
        def read(self, limit: int, timeout: float) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(TypeError, match="NoneType"):
        Worker(Forgetful(), recording([])).run()


def test_new_poison_does_not_slow_down_what_comes_after_it(workers):
    class Poison:
        def read(self, limit: int, timeout: float) -> list[Message[Any]]:
            return [Message(b"poison", {"id": new_id(), "type": "place.order"})]

        def close(self) -> None: ...

    worker = start(workers, Poison(), recording([]))
    eventually(lambda: worker.health().failed >= 1_000)


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

    worker = start(workers, log_of(1).source("g"), router)
    eventually(lambda: len(waits) > 3)
    health = worker.health()
    assert (health.given_back > 0) is (error is StoreError)
    assert health.failed >= max(3, health.given_back)
