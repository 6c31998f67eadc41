"""Pump a source through a router, in batches, with threads, until stopped.

    starting ──▶ running ──stop()──▶ stopping ──in-flight done──▶ stopped        (soft)
                                        └───────grace over──────▶ stopped        (hard)

Soft: no new reads; messages in flight finish, commit and are acked. Hard: unfinished messages are
not acked, cost no attempt, and are delivered again by their source.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conquiet.acking import Error
from conquiet.backoff import Backoff
from conquiet.errors import Blameless, ConfigError, ConquietError, GivenBack, HandlerError
from conquiet.handler import NOTHING, Process, Result
from conquiet.intake import AnyOrder, ByKey, InFlight, Intake, KeyOf, give_back
from conquiet.message import Message, describe
from conquiet.router import Handled, Router
from conquiet.shutdown import STOPPING, Signals
from conquiet.sink import Sink, collect_answers
from conquiet.source import EndOfSource, Leased, Source
from conquiet.stage import Stage

logger = logging.getLogger("conquiet.worker")

_READ_SECONDS = 0.5
"""How long a read may block, and a stop waits for it."""
_LOOK_SECONDS = 0.05
"""How often a waiting main thread checks for a signal."""

State = Literal["starting", "running", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class Health:
    """Reports the state of a worker; `ok` is for a liveness probe."""

    ok: bool
    state: State
    threads_alive: int
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


class Worker:
    """Reads batches from a source, runs them through a router, settles them.

    Outputs of the router are published to `sink` before their input is acked. `ordered` keeps the
    order of messages with the same key (`Message.key`, or your own function) while several threads
    work. The worker closes its source and its sink when it stops.
    """

    def __init__(
        self,
        source: Source,
        router: Router,
        sink: Sink | None = None,
        *,
        batch_size: int = 100,
        batch_wait: float = 0.0,
        threads: int = 1,
        ordered: bool | KeyOf = False,
        grace: float = 30.0,
        stuck_after: float = 300.0,
        on_stuck: Callable[[Health], object] | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("threads", threads)):
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
        self.batch_size = batch_size
        self.batch_wait = batch_wait
        self.grace = grace
        self.stuck_after = stuck_after
        self.on_stuck = on_stuck
        self._in_flight = InFlight()
        self._intake = _intake(source, self._in_flight, threads, ordered)
        self._threads = [
            threading.Thread(
                target=self._serve, args=(number,), name=f"conquiet-worker-{number}", daemon=True
            )
            for number in range(threads)
        ]
        self._keeper = threading.Thread(target=self._keep, name="conquiet-keeper", daemon=True)
        self._chain: Process | None = None
        self._state: State = "starting"
        self._state_lock = threading.Lock()
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._abandoned = False
        self._ended_threads = 0
        self._handled = 0
        self._failed = 0
        self._given_back = 0
        self._failures_in_a_row = 0
        self._last_error = ""

    def run(self) -> bool:
        """Work until SIGTERM, SIGINT or `stop()`; return whether all in flight was finished.

        A second signal ends the grace time at once. Signals are handled only in the main thread;
        their former handlers are restored. Inside an event loop it is refused, since it would block
        the loop: use `start()` there, and `await asyncio.to_thread(worker.stop)` at the end.
        """
        _refuse_in_event_loop()
        with Signals() as signals:
            self.start()
            while not signals.count and not self._stopping.wait(_LOOK_SECONDS):
                pass
            return self.stop(hurry=lambda: signals.count > 1)

    def start(self) -> None:
        """Start the threads and return."""
        with self._state_lock:
            if self._state != "starting":
                raise ConfigError("a worker can be started once; create a new one")
            # A wrong chain is refused here, before any read.
            self._chain = self.router.start(Publish(self.sink, self.router))
            self.router.loop.enter(self)
            self._state = "running"
        for thread in (*self._threads, self._keeper):
            thread.start()

    def stop(
        self, grace: float | None = None, *, hurry: Callable[[], bool] = lambda: False
    ) -> bool:
        """Stop softly; after the grace time, hard. Return whether all in flight was finished.

        `hurry` is polled during the grace time and ends it by True. A handler, also an async one,
        may call `stop` to end `run()`; the call then returns at once.
        """
        grace = self.grace if grace is None else grace
        self._stopping.set()
        if STOPPING.get() is self._stopping:  # called by a handler, which cannot wait for itself
            return False
        with self._state_lock:
            former = self._state
            if former in ("starting", "running"):
                self._state = "stopping"
        if former in ("stopping", "stopped"):  # another thread is stopping it
            return self._finished.wait(grace) and not self._abandoned
        if former == "running":
            self._wait_for_threads(grace, hurry)
        self._intake.give_back()
        for item in (self.source, self.sink):
            try:
                if item is not None:
                    item.close()
            except Exception:
                logger.exception("could not close %r", item)
        self.router.loop.leave(self)  # other workers may use it
        self._state = "stopped"
        self._finished.set()
        return not self._abandoned

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
        self._abandoned = True
        unfinished = self._in_flight.messages()
        for message in unfinished:
            logger.warning(
                "not finished within the grace time, will be delivered again: %s",
                describe(message.attributes),
            )
        give_back(unfinished, GivenBack("the worker stopped before it was finished"))

    def health(self) -> Health:
        """Return a snapshot for probes and operators."""
        oldest = self._in_flight.oldest()
        seconds, name = (oldest[0], describe(oldest[1].attributes)) if oldest else (0.0, "")
        alive = sum(thread.is_alive() for thread in self._threads)
        state = self._state
        return Health(
            ok=state == "running" and alive == len(self._threads) and seconds < self.stuck_after,
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
            except Exception as error:  # a failed read is retried
                wait = reads.next()
                self._failures_in_a_row += 1
                self._last_error = repr(error)
                logger.warning(
                    "could not read, retry in %.1f s: %r",
                    wait,
                    error,
                    # Others than these are bugs of the source, which need their traceback.
                    exc_info=None if isinstance(error, (ConquietError, OSError)) else error,
                )
                self._stopping.wait(wait)
                continue
            reads.reset()
            self._failures_in_a_row = 0
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

    def _handle(self, batch: list[Message[Any]]) -> bool:
        """Run, publish, settle; return False if all messages failed again."""
        try:
            handled = _without_leftovers(self.router.run(batch, self._chain))
            if self._abandoned:
                return True
            self.router.settle(handled)
            failed = [
                message
                for message, result in zip(handled.messages, handled.results, strict=True)
                if isinstance(result, Exception)
            ]
            if failed:
                self._intake.note_failed(failed)
            self._count(handled, len(failed))
            return len(failed) < len(handled.messages) or _is_new_poison(handled)
        except BaseException as error:
            logger.exception("a batch broke the chain; its messages are given back")
            give_back(batch, HandlerError(f"the chain was left by {error!r}"))
            return False
        finally:
            self._in_flight.remove(batch)

    def _count(self, handled: Handled, failed: int) -> None:
        errors = [result for result in handled.results if isinstance(result, Exception)]
        with self._state_lock:
            self._handled += len(handled.messages)
            self._failed += failed
            self._given_back += sum(isinstance(error, Blameless) for error in errors)
        if errors:
            self._last_error = repr(errors[0])

    def _keep(self) -> None:
        """Renew the leases of messages in flight, and report stuck ones."""
        leased = self.source if isinstance(self.source, Leased) else None
        interval = min(leased.lease / 3 if leased else 1.0, 1.0)
        reported = False
        while not self._finished.wait(interval):
            if leased is not None:
                try:
                    leased.renew(self._in_flight.messages())
                except Exception as error:  # noqa: BLE001 - the next round may succeed
                    logger.warning("could not renew leases: %r", error)
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

    def _call_hook(self, health: Health) -> None:
        if self.on_stuck is None:
            return
        try:
            self.on_stuck(health)
        except Exception:  # the leases must still be renewed
            logger.exception("the hook `on_stuck` failed")


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


def _refuse_in_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "worker.run() would block the event loop that it is called in; use worker.start(), and at"
        " the end: await asyncio.to_thread(worker.stop)"
    )


def _intake(source: Source, in_flight: InFlight, threads: int, ordered: bool | KeyOf) -> Intake:
    if ordered is False:
        return AnyOrder(source, in_flight)
    if ordered is not True and not callable(ordered):
        raise ConfigError(
            f"ordered={ordered!r:.60}: True, False, or a function that gives a message's key"
        )
    key: KeyOf = (lambda message: message.key) if ordered is True else ordered
    return ByKey(source, in_flight, threads, key)
