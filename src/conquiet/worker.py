"""Pump a source through a router, in batches, with threads or on an event loop, until stopped.

    starting ──▶ running ──stop()──▶ stopping ──in-flight done──▶ stopped        (soft)
                                        └───────grace over──────▶ stopped        (hard)

Soft: no new reads; messages in flight finish, commit and are acked. Hard: unfinished messages are
not acked, cost no attempt, and are delivered again by their source.

Both shells run the same chain. Threads read a batch each and run it. On an event loop one task
reads, and each group of messages runs in a task of its own, in a greenlet (`conquiet.bridge`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from conquiet import bridge
from conquiet.acking import Error, defer_settlements
from conquiet.backoff import Backoff
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    GivenBack,
    HandlerError,
    TryLater,
)
from conquiet.handler import NOTHING, Process, Result
from conquiet.intake import AnyOrder, ByKey, InFlight, Intake, KeyOf, Taken, give_back
from conquiet.message import Message, describe
from conquiet.router import Handled, Router
from conquiet.shutdown import STOPPING, Signals, Stop
from conquiet.sink import Sink, collect_answers
from conquiet.source import Delaying, EndOfSource, Leased, Positioned, Source
from conquiet.stage import Stage

logger = logging.getLogger("conquiet.worker")

_BATCH_SIZE = 100
_CONCURRENCY = 100
_READ_SECONDS = 0.5
"""How long a read may block, and a stop waits for it."""
_LOOK_SECONDS = 0.05
"""How often a waiting main thread checks for a signal."""
_AHEAD_SECONDS = 0.05
"""On an event loop, what is expected to begin within this time is read ahead, in larger pages."""
_CANCEL_SECONDS = 5.0
"""How long cancelled groups may take to roll back."""

_BUGS = (
    ConfigError,
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    NotImplementedError,
)
"""Errors of `read` that no retry can change: the worker ends with them."""

State = Literal["starting", "running", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class Health:
    """Reports the state of a worker; `ok` is for a liveness probe."""

    ok: bool
    state: State
    threads_alive: int
    """How many threads work; of an async worker, 1 if its task reads."""
    in_flight: int
    oldest_seconds: float
    """How long the oldest message has been in flight."""
    oldest: str
    handled: int
    failed: int
    """How many of the handled messages were nacked."""
    given_back: int
    """How many of the failed ones were not to blame: the store failed, or an earlier one had."""
    failures_in_a_row: int
    """Failed reads since the last successful one."""
    last_error: str
    outages_in_a_row: int = 0
    """Batches that the store gave back whole, since one that it did not."""

    def find_trouble(self) -> str | None:
        """Return why the process should be replaced: a part has ended, or a message is stuck."""
        if self.ok or self.state in ("starting", "stopping"):
            return None
        return (
            f"worker {self.state}, {self.threads_alive} threads alive,"
            f" {self.oldest_seconds:.0f} s in flight: {self.oldest}"
        )

    def look(self) -> dict[str, int]:
        """Return counts, for `/readyz`; raise if the worker cannot read, or its store is away."""
        if self.state != "running":
            raise ConquietError(f"the worker is {self.state}")
        if self.failures_in_a_row or self.outages_in_a_row:
            raise ConquietError(self.last_error)
        return {"in_flight": self.in_flight, "handled": self.handled, "failed": self.failed}


def allow_delays(source: Source, router: Router, *, ordered: bool) -> None:
    """Prepare a source for a `Retry(delays=…)` of the router; refuse one that cannot keep messages.

    The attribute `delays` of a middleware has the seconds.
    """
    delays = max((getattr(item, "delays", ()) for item in router.middlewares), key=len, default=())
    if not delays:
        return
    if not isinstance(source, Delaying):
        raise ConfigError(
            f"Retry(delays=…): a {type(source).__name__} cannot keep a failed message for later and"
            " go on with others; read a Redis stream or the log of a database, to which a handler"
            " of this source can emit; or use Retry(max_attempts=…), which waits within a delivery"
        )
    source.allow_delays(len(delays) + 1, ordered=ordered)


class Worker:
    """Reads batches from a source, runs them through a router, settles them.

    Outputs of the router are published to `sink` before their input is acked. `ordered` keeps the
    order of messages with the same key (`Message.key`, or your own function) while several threads
    work. The worker closes its source and its sink when it stops.

    A read that fails is tried again, after a pause. A bug in `read`, such as a TypeError, or a
    wrong setting ends the worker: `run` and `run_async` raise it, and `failure` holds it.

    `run` works in `threads` threads. `run_async`, and `async with worker:`, work on the running
    event loop: up to `concurrency` groups (100) are in flight at once, each in a transaction of its
    own, but no more than the database has connections for.

    `batch_size` is how many messages share a transaction at most: 100, and on an event loop 1 if no
    handler takes a list, since the handlers of a batch run one after the other.

    A batch that is not full waits `batch_wait` seconds for more. After `stop`, what is in flight
    has `grace` seconds; then it is given back and costs no attempt. When a message has been in
    flight for `stuck_after` seconds, `health().ok` is False, and `on_stuck` is called with the
    health.
    """

    def __init__(
        self,
        source: Source,
        router: Router,
        sink: Sink | None = None,
        *,
        batch_size: int | None = None,
        batch_wait: float = 0.0,
        threads: int = 1,
        concurrency: int | None = None,
        ordered: bool | KeyOf = False,
        grace: float = 30.0,
        stuck_after: float = 300.0,
        on_stuck: Callable[[Health], object] | None = None,
    ) -> None:
        for name, value in (
            ("batch_size", _BATCH_SIZE if batch_size is None else batch_size),
            ("threads", threads),
            ("concurrency", _CONCURRENCY if concurrency is None else concurrency),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least 1")
        for name, seconds in (("batch_wait", batch_wait), ("grace", grace)):
            if not seconds >= 0:
                raise ConfigError(f"{name}={seconds!r}: must be 0 seconds or more")
        if not stuck_after > 0:
            raise ConfigError(f"stuck_after={stuck_after!r}: must be more than 0 seconds")
        self.source = source
        self.router = router
        self.sink = sink
        self.batch_size = batch_size or _BATCH_SIZE
        self._has_batch_size = batch_size is not None
        self.batch_wait = batch_wait
        self.concurrency = concurrency or _CONCURRENCY
        self._has_concurrency = concurrency is not None
        self.grace = grace
        self.stuck_after = stuck_after
        self.on_stuck = on_stuck
        self._ordered = ordered
        self._in_flight = InFlight()
        self._intake = _intake(source, self._in_flight, threads, ordered)
        self._lanes: Lanes | None = None
        self._threads = [
            threading.Thread(
                target=self._serve, args=(number,), name=f"conquiet-worker-{number}", daemon=True
            )
            for number in range(threads)
        ]
        self._keeper = threading.Thread(target=self._keep, name="conquiet-keeper", daemon=True)
        self._chain: Process | None = None
        self._blocks = True
        """Whether the chain blocks its thread while it waits."""
        self._state: State = "starting"
        self._state_lock = threading.Lock()
        self._stopping = Stop()
        self._deadlines: list[Callable[[], bool]] = []
        """Whether the grace time is over, by each `stop()` of an async worker."""
        self._finished = threading.Event()
        self._abandoned = False
        self._ended_threads = 0
        self._handled = 0
        self._failed = 0
        self._given_back = 0
        self._failures_in_a_row = 0
        self._outages_in_a_row = 0
        self._last_error = ""
        self.failure: Exception | None = None
        """The error in `read` of its source, or of its reader, that ended it."""

    def run(self) -> bool:
        """Work until SIGTERM, SIGINT or `stop()`; return whether all in flight was finished.

        A second signal ends the grace time at once. Signals are handled only in the main thread;
        their former handlers are restored. Inside an event loop it is refused, since it would block
        the loop: use `run_async()` there. A bug in `read` of the source is raised.
        """
        _refuse_in_event_loop()
        with Signals() as signals:
            self.start()
            while not signals.count and not self._stopping.wait(_LOOK_SECONDS):
                pass
            self._log_signal(signals)
            finished = self.stop(hurry=lambda: signals.count > 1)
            self._raise_failure()
            return finished

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _log_signal(self, signals: Signals) -> None:
        if signals.count:
            logger.info(
                "stopping by a signal; %d messages in flight have %.0f s to finish",
                len(self._in_flight),
                self.grace,
            )

    @property
    def is_async(self) -> bool:
        """Return whether `conquiet worker run` runs it on an event loop.

        It does if it has an async engine or client, or if `concurrency` was given.
        """
        return self._has_concurrency or self.router.is_async or self._has_async_end

    @property
    def _has_async_end(self) -> bool:
        return any(getattr(item, "is_async", False) for item in (self.source, self.sink))

    def start(self) -> None:
        """Start the threads and return."""
        if self._has_async_end or self.router.is_async:
            raise ConfigError(
                "a source, a sink or a middleware with an async engine or client needs an event"
                " loop: use await worker.run_async(), or async with worker; a worker of threads"
                " takes sync ones"
            )
        self._check_unstarted()
        self._chain = self.build_chain()
        self._become_running()
        self.router.loop.enter(self)
        for thread in (*self._threads, self._keeper):
            thread.start()

    def build_chain(self) -> Process:
        """Check and build the chain of the router, with what source and sink add to it.

        A wrong chain is refused here, before any read.
        """
        allow_delays(self.source, self.router, ordered=self._ordered is not False)
        inbox = self.source.inbox if isinstance(self.source, Positioned) else None
        return self.router.start(Publish(self.sink, self.router), inbox)

    def _check_unstarted(self) -> None:
        if self._state != "starting":
            raise ConfigError("a worker can be started once; create a new one")

    def _become_running(self) -> None:
        with self._state_lock:
            self._check_unstarted()
            self._state = "running"

    async def run_async(self) -> bool:
        """Work on the running event loop until SIGTERM, SIGINT, `stop()` or a cancellation.

        Return whether all in flight was finished. Async handlers run on this loop, so that its
        pools and clients can be used; others run in threads. A cancellation stops softly, within
        the grace time, and is then raised; a second one, or a second signal, ends the grace time.
        """
        with Signals() as signals:
            signals.warn_of_replaced()
            await self._start_async()
            cancellation: asyncio.CancelledError | None = None
            try:
                while not signals.count:
                    if await self._stopping.wait_async(_LOOK_SECONDS):
                        break
            except asyncio.CancelledError as error:
                cancellation = error
            self._log_signal(signals)
            finished = await self._stop_async(hurry=lambda: signals.count > 1)
            if cancellation is not None:
                raise cancellation
            self._raise_failure()
            return finished

    async def __aenter__(self) -> Worker:
        """Start on the running event loop, as in the lifespan of a web application."""
        await self._start_async()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop softly; after the grace time, hard."""
        await self._stop_async()

    async def _start_async(self) -> None:
        self._check_unstarted()
        bridge.check_installed()
        self._blocks = self.router.blocks
        start = bridge.run_in_thread if self._blocks else bridge.run
        self._chain = await start(self.build_chain)
        self._become_running()
        if not self._has_batch_size and not any(item.is_batch for item in self.router.handlers):
            self.batch_size = 1  # the handlers of a group run one after the other
        capacity = self.router.capacity
        count = self.concurrency
        if capacity is not None and capacity < count:
            logger.info(
                "concurrency=%d: at most %d groups are in flight, since the database has no more"
                " connections for them",
                count,
                capacity,
            )
            count = capacity
        self._intake = _intake(self.source, self._in_flight, count, self._ordered)
        self._lanes = Lanes(self, self._intake, count, _slots(self.router))
        self._lanes.start()
        self._keeper.start()

    async def _stop_async(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        self._stopping.set()
        with self._state_lock:
            former, self._state = self._state, "stopping"
        lanes = self._lanes
        assert lanes is not None, "it has started"
        if former != "running":
            return not self._abandoned
        cancellation: asyncio.CancelledError | None = None
        own = _deadline(self.grace, hurry)

        def is_over() -> bool:
            return hurry() or any(is_past() for is_past in self._deadlines or (own,))

        try:
            if not await lanes.finish(is_over):
                self._warn_of_unfinished()
        except asyncio.CancelledError as error:
            cancellation = error
            self._warn_of_unfinished()
        await asyncio.shield(self._close_async(lanes))
        if cancellation is not None:
            raise cancellation
        return not self._abandoned

    async def _close_async(self, lanes: Lanes) -> None:
        if self._abandoned:
            await lanes.cancel()
            await bridge.run(
                give_back,
                self._in_flight.messages(),
                GivenBack("the worker stopped before it was finished"),
            )
        await bridge.run(self._close)

    def stop(
        self, grace: float | None = None, *, hurry: Callable[[], bool] = lambda: False
    ) -> bool:
        """Stop softly; after the grace time, hard. Return whether all in flight was finished.

        `hurry` is polled during the grace time and ends it by True. A handler, also an async one,
        may call `stop` to end `run()` or `run_async()`; the call then returns at once, as it does
        on an event loop.
        """
        grace = self.grace if grace is None else grace
        is_own_handler = STOPPING.get() is self._stopping  # it cannot wait for itself
        if self._lanes is not None and not is_own_handler:
            self._deadlines.append(_deadline(grace, hurry))
        self._stopping.set()
        if is_own_handler:
            return False
        if self._lanes is not None:  # its own task stops it
            return not _is_in_event_loop() and self._finished.wait(grace) and not self._abandoned
        with self._state_lock:
            former = self._state
            if former in ("starting", "running"):
                self._state = "stopping"
        if former in ("stopping", "stopped"):  # another thread is stopping it
            return self._finished.wait(grace) and not self._abandoned
        if former == "running":
            self._wait_for_threads(grace, hurry)
        self._close()
        return not self._abandoned

    def _close(self) -> None:
        """Give back what was not begun, and close source and sink."""
        self._intake.give_back()
        for item in (self.source, self.sink):
            try:
                if item is not None:
                    bridge.call(item.close)
            except Exception:
                logger.exception("could not close %r", item)
        self.router.loop.leave(self)  # other workers may use it
        self._state = "stopped"
        self._finished.set()

    def _wait_for_threads(self, grace: float, hurry: Callable[[], bool]) -> None:
        end = time.monotonic() + grace
        while any(thread.is_alive() for thread in self._threads):
            left = end - time.monotonic()
            if left <= 0 or hurry():
                self._abandon()
                return
            for thread in self._threads:
                thread.join(min(left, _LOOK_SECONDS))

    def _abandon(self) -> None:
        """Give back unfinished messages; later results of their handlers are ignored."""
        self._warn_of_unfinished()
        give_back(
            self._in_flight.messages(), GivenBack("the worker stopped before it was finished")
        )

    def _warn_of_unfinished(self) -> None:
        self._abandoned = True
        for message in self._in_flight.messages():
            logger.warning(
                "not finished within the grace time, will be delivered again: %s",
                describe(message.attributes),
            )

    def health(self) -> Health:
        """Return a snapshot for probes and operators."""
        oldest = self._in_flight.oldest()
        seconds, name = (oldest[0], describe(oldest[1].attributes)) if oldest else (0.0, "")
        if self._lanes is None:
            alive, expected = sum(map(threading.Thread.is_alive, self._threads)), len(self._threads)
        else:
            alive, expected = int(self._lanes.is_alive), 1
        state = self._state
        return Health(
            ok=state == "running" and alive == expected and seconds < self.stuck_after,
            state=state,
            threads_alive=alive,
            in_flight=len(self._in_flight),
            oldest_seconds=seconds,
            oldest=name,
            handled=self._handled,
            failed=self._failed,
            given_back=self._given_back,
            failures_in_a_row=self._failures_in_a_row,
            last_error=self._last_error,
            outages_in_a_row=self._outages_in_a_row,
        )

    def _serve(self, number: int) -> None:
        STOPPING.set(self._stopping)
        reads = Backoff(first=0.1, cap=10.0)
        outages = Backoff(first=0.02, cap=10.0)
        while not self._stopping.is_set():
            try:
                batch = self._intake.read(number, self.batch_size, _READ_SECONDS, self.batch_wait)
            except EndOfSource:
                break
            except Exception as error:  # noqa: BLE001 - a failed read is retried
                self._stopping.wait(self._note_failed_read(error, reads))
                continue
            self._note_read(reads)
            if batch and self._handle(batch):
                outages.reset()
            elif batch:
                # The store is unavailable, or all messages are poison and come back at once:
                # reading them again without a pause would not help.
                self._stopping.wait(outages.next())
        with self._state_lock:
            self._ended_threads += 1
            if self._ended_threads == len(self._threads):
                self._stopping.set()

    def _note_failed_read(self, error: Exception, reads: Backoff) -> float:
        """Log a failed read; return the seconds until the next, or stop after a bug."""
        self._failures_in_a_row += 1
        self._last_error = repr(error)
        if isinstance(error, _BUGS):
            logger.error(
                "%r: read() failed by a bug or a wrong setting, not by an outage; the worker ends:"
                " %r",
                self.source,
                error,
                exc_info=None if isinstance(error, ConquietError) else error,
            )
            self.failure = error
            self._stopping.set()
            return 0.0
        wait = reads.next()
        logger.warning(
            "could not read, retry in %.1f s: %r",
            wait,
            error,
            # Others than these may be bugs of the source, which need their traceback.
            exc_info=None if isinstance(error, (ConquietError, OSError)) else error,
        )
        return wait

    def _note_failed_reader(self, error: BaseException) -> None:
        """Note that nothing more is read, as if a client raised `CancelledError` in `read`."""
        if not self._abandoned:
            self.failure = ConquietError(f"the worker ended, since its reader failed: {error!r}")
            self.failure.__cause__ = error

    def _note_read(self, reads: Backoff) -> None:
        reads.reset()
        self._failures_in_a_row = 0

    def _run(self, batch: list[Message[Any]]) -> Handled:
        if self._lanes is None:
            return self.router.run(batch, self._chain)
        ackings = [message.acking for message in batch if message.acking is not None]
        with defer_settlements(ackings):  # an async handler that acks could not wait for its source
            if self._blocks:
                return bridge.call(self.router.run, batch, self._chain)
            return self.router.run(batch, self._chain)

    def _handle(self, batch: list[Message[Any]]) -> bool:
        """Run, publish, settle; return False if all messages failed again."""
        done: Sequence[Message[Any]] = batch
        try:
            handled = _without_leftovers(self._run(batch))
            if self._lanes is not None:
                done = ()  # not before it is settled
            elif self._abandoned:
                return True
            else:
                self.router.settle(handled)
            failed = self._count(handled)
            if self._lanes is not None:
                self._lanes.settle(handled, batch)
            if failed < len(handled.messages) or _is_new_poison(handled):
                return True
            # What is tried later does not come back at once.
            return any(isinstance(result, TryLater) for result in handled.results)
        except BaseException as error:
            if self._abandoned and bridge.is_cancelled():
                done = ()  # all that is unfinished is given back at once
                raise
            logger.exception("a batch broke the chain; its messages are given back")
            with bridge.shield():
                give_back(batch, HandlerError(f"the chain was left by {error!r}"))
            return False
        finally:
            self._in_flight.remove(done)

    def _count(self, handled: Handled) -> int:
        """Count handled messages and failed ones; return the number of the latter."""
        errors = [result for result in handled.results if isinstance(result, Exception)]
        if errors:
            pairs = zip(handled.messages, handled.results, strict=True)
            self._intake.note_failed(
                [one for one, result in pairs if isinstance(result, Exception)]
            )
        with self._state_lock:
            self._handled += len(handled.messages)
            if errors:
                self._failed += len(errors)
                given_back = sum(isinstance(error, Blameless) for error in errors)
                self._given_back += given_back
                self._last_error = repr(errors[0])
                is_outage = given_back == len(handled.messages)
                self._outages_in_a_row = self._outages_in_a_row + 1 if is_outage else 0
            else:
                self._outages_in_a_row = 0
        return len(errors)

    def _keep(self) -> None:
        """Renew the leases of messages in flight, and report stuck ones."""
        leased = self.source if isinstance(self.source, Leased) else None
        interval = min(leased.lease / 3 if leased else 1.0, 1.0)
        reported = is_failing = False
        while not self._finished.wait(interval):
            if leased is not None:
                try:
                    self._renew(leased)
                except Exception as error:  # noqa: BLE001 - the next round may succeed
                    if not is_failing:
                        logger.warning("could not renew leases, trying on: %r", error)
                    is_failing = True
                else:
                    is_failing = False
            health = self.health()
            stuck = health.oldest_seconds >= self.stuck_after
            if stuck and not reported:
                logger.error(
                    "stuck for %.0f s on %s: the handler does not return; give it a Deadline"
                    " or timeouts of its own",
                    health.oldest_seconds,
                    health.oldest,
                )
                self._call_hook(health)
            reported = stuck

    def _renew(self, leased: Leased) -> None:
        messages = self._in_flight.messages()
        if self._lanes is not None and getattr(leased, "is_async", False):
            self._lanes.call_soon(leased.renew, messages)
        else:
            leased.renew(messages)

    def _call_hook(self, health: Health) -> None:
        if self.on_stuck is None:
            return
        try:
            self.on_stuck(health)
        except Exception:  # the leases must still be renewed
            logger.exception("the hook `on_stuck` failed")


class Lanes:
    """Runs groups of messages on an event loop, up to `count` at once.

    One task reads pages for the lanes that are free; each group is a task of its own. What is
    expected to begin within `_AHEAD_SECONDS` is read ahead, so that fast handlers need not wait for
    a read each; behind slow ones nothing is.
    """

    def __init__(
        self, worker: Worker, intake: Intake, count: int, slots: AbstractAsyncContextManager[object]
    ) -> None:
        self._worker = worker
        self._intake = intake
        self._count = count
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._free = set(range(count))
        self._groups: dict[asyncio.Task[None], Taken] = {}
        self._outages = [Backoff(first=0.02, cap=10.0) for _ in range(count)]
        self._seconds = float("inf")
        """How long a group takes, as an average of the last ones."""
        self._reader: asyncio.Task[None] | None = None
        self._is_reading = False
        self._changed = asyncio.Event()
        self._unsettled: list[tuple[Handled, Sequence[Message[Any]]]] = []
        self._settler: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def start(self) -> None:
        self._reader = asyncio.create_task(self._read(), name="conquiet-reader")
        self._reader.add_done_callback(_log_failure)

    async def _read(self) -> None:
        try:
            await self._read_until_stopped()
        except BaseException as error:
            self._worker._note_failed_reader(error)
            raise
        finally:
            self._worker._stopping.set()

    async def _read_until_stopped(self) -> None:
        worker, stopping = self._worker, self._worker._stopping
        reads = Backoff(first=0.1, cap=10.0)
        while not stopping.is_set():
            limit = self._limit()
            if limit <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                await self._fill(limit)
            except EndOfSource:
                break
            except Exception as error:  # noqa: BLE001 - a failed read is retried
                await stopping.wait_async(worker._note_failed_read(error, reads))
                continue
            worker._note_read(reads)
            self._begin(tuple(self._free))
        while self._groups:
            await asyncio.wait(tuple(self._groups))

    def _limit(self) -> int:
        size = self._worker.batch_size
        ahead = min(self._count, int(self._count * _AHEAD_SECONDS / self._seconds))
        return self._intake.room(len(self._free), ahead, size)

    async def _fill(self, limit: int) -> None:
        worker = self._worker
        is_async = getattr(worker.source, "is_async", False)
        self._is_reading = True
        try:
            await (bridge.run if is_async else bridge.run_in_thread)(
                self._intake.fill, limit, _READ_SECONDS, worker.batch_wait
            )
        finally:
            self._is_reading = False

    def _begin(self, lanes: Iterable[int]) -> None:
        """Begin a group in each of these free lanes for which messages wait."""
        if self._worker._stopping.is_set():
            return
        for lane in lanes:
            taken = self._intake.take(lane, len(self._free), self._worker.batch_size)
            if not taken:
                continue
            self._free.discard(lane)
            group = self._loop.create_task(self._run(lane, taken), context=self._context.copy())
            self._groups[group] = taken
            group.add_done_callback(partial(self._end, lane))

    async def _run(self, lane: int, taken: Taken) -> None:
        STOPPING.set(self._worker._stopping)
        began = self._loop.time()
        outages = self._outages[lane]
        async with self._slots:
            is_fine = await bridge.run(self._handle, taken)
        if is_fine:
            outages.reset()
        else:
            await self._worker._stopping.wait_async(outages.next())
        seconds = max(self._loop.time() - began, 1e-6)
        is_first = self._seconds == float("inf")
        self._seconds = seconds if is_first else 0.9 * self._seconds + 0.1 * seconds

    def _handle(self, taken: Taken) -> bool:
        self._intake.give_back_overtaking(taken)
        return not taken.messages or self._worker._handle(taken.messages)

    def _end(self, lane: int, group: asyncio.Task[None]) -> None:
        del self._groups[group]
        self._free.add(lane)
        _log_failure(group)
        self._begin((lane,))
        if not self._changed.is_set() and self._limit() > 0:
            self._changed.set()

    def settle(self, handled: Handled, batch: Sequence[Message[Any]]) -> None:
        """Settle what a group has handled, in one call with groups that end meanwhile.

        The group does not wait for it, unless the source is slower than the handlers.
        """
        self._unsettled.append((handled, batch))
        if self._settler is None or self._settler.done():
            self._settler = self._loop.create_task(self._settle_all(), context=self._context.copy())
        if len(self._unsettled) >= self._count:
            with bridge.shield():
                bridge.wait_for(asyncio.wait((self._settler,)))

    async def _settle_all(self) -> None:
        while self._unsettled:
            pairs, self._unsettled = self._unsettled, []
            handled = pairs[0][0]
            if len(pairs) > 1:
                handled = Handled(
                    [message for one, _ in pairs for message in one.messages],
                    [result for one, _ in pairs for result in one.results],
                )
            try:
                await bridge.run(self._worker.router.settle, handled)
            finally:
                for _, batch in pairs:
                    self._worker._in_flight.remove(batch)

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of an async client from another thread, and wait for it."""
        call = asyncio.run_coroutine_threadsafe(bridge.run(function, *arguments), self._loop)
        try:
            call.result(_CANCEL_SECONDS)
        except TimeoutError:
            call.cancel()
            raise

    async def finish(self, is_over: Callable[[], bool]) -> bool:
        """Wait until all groups have ended; return False after the grace time."""
        self._changed.set()
        while tasks := self._unfinished():
            if is_over():
                return False
            await asyncio.wait(tasks, timeout=_LOOK_SECONDS)
        return True

    async def cancel(self) -> None:
        """Cancel all groups and wait until they have rolled back."""
        for task in self._unfinished():
            if task is not self._settler:
                task.cancel()
        end = self._loop.time() + _CANCEL_SECONDS
        if await self.finish(lambda: self._loop.time() >= end):
            return
        for taken in self._groups.values():
            logger.error(
                "cancelled, and still not finished after %.0f s: %s; its handler catches"
                " CancelledError, or its store does not answer. asyncio.run() waits for its end",
                _CANCEL_SECONDS,
                ", ".join(describe(message.attributes) for message in taken.messages[:3]),
            )

    def _unfinished(self) -> list[asyncio.Task[None]]:
        tasks = (*self._groups, self._reader, self._settler)
        return [task for task in tasks if task is not None and not task.done()]


_slots_of_loops: WeakKeyDictionary[
    asyncio.AbstractEventLoop, WeakKeyDictionary[object, dict[int, asyncio.Semaphore]]
] = WeakKeyDictionary()


def _slots(router: Router) -> AbstractAsyncContextManager[object]:
    """Return what a group holds while it runs: as many can as the pool has connections for.

    The workers of a loop whose transactions use one pool share them.
    """
    pool, capacity = router.pool, router.capacity
    if pool is None or capacity is None:
        return nullcontext()
    pools = _slots_of_loops.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    return pools.setdefault(pool, {}).setdefault(capacity, asyncio.Semaphore(capacity))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the worker failed: %r", error, exc_info=error)


class Publish:
    """Middleware: publishes outputs; an input fails if its outputs were not confirmed.

    A worker adds it to its router's chain: inside retry and dead letter, which handle its errors,
    and outside the transaction, which has committed before. Without a sink it refuses outputs that
    no outbox has stored: at start where handlers declare them, else inside the transaction, so that
    the handler's effects are rolled back.
    """

    def __init__(self, sink: Sink | None, router: Router) -> None:
        self.sink = sink
        self.stage = Stage.PUBLISH
        if sink is None:
            _refuse_outputs(router)
            if Stage.TRANSACTION in router.stages:
                self.stage = Stage.INBOX

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            results = next(batch)
            if results.count(NOTHING) == len(results):
                return results
            outputs = [
                output
                for result in results
                if not isinstance(result, Exception)
                for output in result
            ]
            if not outputs:
                return results
            answers = iter(self._answers(outputs))
            return [
                result if isinstance(result, Exception) or not result else _outcome(result, answers)
                for result in results
            ]

        return process

    def _answers(self, outputs: Sequence[Message[Any]]) -> Sequence[Error]:
        if self.sink is not None:
            return collect_answers(self.sink, outputs)
        error = HandlerError(
            f"{describe(outputs[0].attributes)} was returned by a handler and has no destination:"
            " give the worker a sink, or the router an outbox"
        )
        return [error] * len(outputs)


def _refuse_outputs(router: Router) -> None:
    """Raise if a handler declares outputs that would have no destination."""
    if router.stages & {Stage.OUTBOX, Stage.PUBLISH}:
        return
    for handler in router.handlers:
        if handler.declares_outputs:
            raise ConfigError(
                f"handler {handler.name} returns events, and they have no destination: give the"
                " worker a sink, or the router an outbox. A middleware of your own that publishes"
                " them declares stage = Stage.PUBLISH"
            )


def _outcome(outputs: Sequence[Message[Any]], answers: Any) -> Result:
    """Return no outputs if all were published, else the first error."""
    errors = [error for error in (next(answers) for _ in outputs) if error is not None]
    return errors[0] if errors else NOTHING


def _without_leftovers(handled: Handled) -> Handled:
    """Refuse outputs that a middleware added outside `Publish`: they would be lost."""
    if not handled.outputs:
        return handled
    error = HandlerError(
        f"{describe(handled.outputs[0].attributes)} was added after outputs were published:"
        " register the middleware that adds it after DeadLetter and Retry"
    )
    results = [
        error if not isinstance(result, Exception) and result else result
        for result in handled.results
    ]
    return Handled(handled.messages, results)


def _is_new_poison(handled: Handled) -> bool:
    """Return whether all messages failed by their own fault and for the first time."""
    return all(message.deliveries == 1 for message in handled.messages) and not any(
        isinstance(result, Blameless) for result in handled.results
    )


def _deadline(grace: float, hurry: Callable[[], bool]) -> Callable[[], bool]:
    end = time.monotonic() + grace
    return lambda: time.monotonic() >= end or hurry()


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _refuse_in_event_loop() -> None:
    if _is_in_event_loop():
        raise ConfigError(
            "worker.run() would block the event loop that it is called in; use"
            " await worker.run_async(), or async with worker"
        )


def _intake(source: Source, in_flight: InFlight, lanes: int, ordered: bool | KeyOf) -> Intake:
    if ordered is False:
        return AnyOrder(source, in_flight)
    if ordered is not True and not callable(ordered):
        raise ConfigError(
            f"ordered={ordered!r:.60}: True, False, or a function that gives a message's key"
        )
    key: KeyOf = (lambda message: message.key) if ordered is True else ordered
    return ByKey(source, in_flight, lanes, key)
