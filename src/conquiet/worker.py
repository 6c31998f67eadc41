"""Worker: pumps a source through a router, in batches, with threads, until told to stop.

    starting ──▶ running ──stop()──▶ stopping ──in-flight done──▶ stopped        (soft)
                                        └───────grace over──────▶ stopped        (hard)

Soft: no new reads; what is in flight finishes, commits and is acked. Hard: what is unfinished
is not acked, costs no attempt, and its source delivers it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from conquiet.backoff import Backoff
from conquiet.errors import Blameless, ConfigError, GivenBack, HandlerError
from conquiet.handler import Process
from conquiet.intake import AnyOrder, ByKey, InFlight, Intake, KeyOf, give_back
from conquiet.message import Message, describe
from conquiet.publish import Publish
from conquiet.router import Handled, Router
from conquiet.sink import Sink
from conquiet.source import EndOfSource, Leased, Source
from conquiet.stopping import STOPPING, Signals

logger = logging.getLogger("conquiet.worker")

_READ_SECONDS = 0.5
"""How long a read may block; a stop waits this long at most."""
_LOOK_SECONDS = 0.05
"""How often a waiting main thread looks for a signal."""

State = Literal["starting", "running", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker is doing. `ok` is what a liveness probe asks."""

    ok: bool
    state: State
    threads_alive: int
    in_flight: int
    oldest_seconds: float
    """How long the oldest message in flight has been worked on."""
    oldest: str
    handled: int
    failed: int
    """Of those handled, how many were nacked."""
    failures_in_a_row: int
    """Reads that failed since the last one that did not."""
    last_error: str


class Worker:
    """Reads batches from a source, runs them through a router, settles them.

    Outputs that the router lets through go to `sink`, before their input is acked. `ordered`
    keeps the order of messages with the same key (`Message.key`, or a function of one's own)
    while several threads work. The worker closes its source and its sink when it stops.
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
        self._failures_in_a_row = 0
        self._last_error = ""

    # --- life -------------------------------------------------------------------------------

    def run(self) -> bool:
        """Work until SIGTERM, SIGINT or `stop()`; True if everything in flight was finished.

        A second signal ends the grace time at once. Signals are handled only when this runs
        in the main thread, and their former handlers are restored.
        """
        with Signals() as signals:
            self.start()
            while not signals.count and not self._stopping.wait(_LOOK_SECONDS):
                pass
            return self.stop(hurry=lambda: signals.count > 1)

    def start(self) -> None:
        """Start the threads and return."""
        with self._state_lock:
            if self._state != "starting":
                raise ConfigError("a worker is started once; make a new one")
            # A chain that cannot work is refused here, before any read.
            self._chain = self.router.start(Publish(self.sink))
            self._state = "running"
        for thread in (*self._threads, self._keeper):
            thread.start()

    def stop(
        self, grace: float | None = None, *, hurry: Callable[[], bool] = lambda: False
    ) -> bool:
        """Stop softly; after the grace time, hard. True if everything in flight was finished.

        `hurry` is asked while it waits, and ends the grace time by True. A handler, async ones
        too, may call `stop` to ask for the end of `run()`; it then returns at once.
        """
        grace = self.grace if grace is None else grace
        self._stopping.set()
        if STOPPING.get() is self._stopping:  # the work itself asks: it cannot wait for its end
            return False
        with self._state_lock:
            former = self._state
            if former in ("starting", "running"):
                self._state = "stopping"
        if former in ("stopping", "stopped"):  # somebody else is at it
            return self._finished.wait(grace) and not self._abandoned
        if former == "running":
            self._wait_for_threads(grace, hurry)
        self._intake.give_back()
        for item in (self.source, self.sink, self.router):
            try:
                if item is not None:
                    item.close()
            except Exception:
                logger.exception("closing %r failed", item)
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
        """Give back what is unfinished; whatever its handler still says comes too late."""
        self._abandoned = True
        unfinished = self._in_flight.messages()
        for message in unfinished:
            logger.warning(
                "not finished within the grace time, will be delivered again: %s",
                describe(message.attributes),
            )
        give_back(unfinished, GivenBack("the worker stopped before it was finished"))

    def health(self) -> Health:
        """A snapshot for probes and operators."""
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
            failures_in_a_row=self._failures_in_a_row,
            last_error=self._last_error,
        )

    # --- work -------------------------------------------------------------------------------

    def _serve(self, number: int) -> None:
        STOPPING.set(self._stopping)
        reads = Backoff(first=0.1, cap=10.0)
        outages = Backoff(first=0.02, cap=10.0)
        while not self._stopping.is_set():
            try:
                batch = self._intake.read(number, self.batch_size, _READ_SECONDS, self.batch_wait)
            except EndOfSource:
                break
            except Exception as error:  # noqa: BLE001 - a source that fails is asked again
                wait = reads.next()
                self._failures_in_a_row += 1
                self._last_error = repr(error)
                logger.warning("reading failed, next try in %.1f s: %r", wait, error)
                self._stopping.wait(wait)
                continue
            reads.reset()
            self._failures_in_a_row = 0
            if batch and self._handle(batch):
                outages.reset()
            elif batch:
                # The store is away, or it is all poison that comes back at once: asking for
                # it again as fast as we can helps nobody.
                self._stopping.wait(outages.next())
        with self._state_lock:
            self._ended_threads += 1
            if self._ended_threads == len(self._threads):
                self._stopping.set()

    def _handle(self, batch: list[Message[Any]]) -> bool:
        """Run, publish, settle; False if all of it failed, and not for the first time."""
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
                self._intake.failed(failed)
            self._count(handled, len(failed))
            return len(failed) < len(handled.messages) or _is_new_poison(handled)
        except BaseException as error:
            logger.exception("a batch broke the chain; its messages are given back")
            give_back(batch, HandlerError(f"the chain was left by {error!r}"))
            return False
        finally:
            self._in_flight.remove(batch)

    def _count(self, handled: Handled, failed: int) -> None:
        with self._state_lock:
            self._handled += len(handled.messages)
            self._failed += failed
        if failed:
            errors = (result for result in handled.results if isinstance(result, Exception))
            self._last_error = repr(next(errors))

    def _keep(self) -> None:
        """Renew the leases of what is in flight, and notice what is stuck."""
        leased = self.source if isinstance(self.source, Leased) else None
        interval = min(leased.lease / 3 if leased else 1.0, 1.0)
        reported = False
        while not self._finished.wait(interval):
            if leased is not None:
                try:
                    leased.renew(self._in_flight.messages())
                except Exception as error:  # noqa: BLE001 - the next round may succeed
                    logger.warning("leases could not be renewed: %r", error)
            health = self.health()
            stuck = health.oldest_seconds >= self.stuck_after
            if stuck and not reported:
                logger.error(
                    "stuck for %.0f s on %s: the handler does not return; give it a Deadline"
                    " or timeouts of its own",
                    health.oldest_seconds,
                    health.oldest,
                )
                self._tell(health)
            reported = stuck

    def _tell(self, health: Health) -> None:
        if self.on_stuck is None:
            return
        try:
            self.on_stuck(health)
        except Exception:  # the leases must still be renewed
            logger.exception("the hook `on_stuck` failed")


def _without_leftovers(handled: Handled) -> Handled:
    """Outputs that a middleware added outside the publishing would be lost: refuse them."""
    if not handled.outputs:
        return handled
    error = HandlerError(
        f"{describe(handled.outputs[0].attributes)} was added outside the place where outputs are"
        " published: register the middleware that adds it after DeadLetter and Retry"
    )
    results = [
        error if not isinstance(result, Exception) and result else result
        for result in handled.results
    ]
    return Handled(handled.messages, results)


def _is_new_poison(handled: Handled) -> bool:
    """Whether all of it fails by its own fault and for the first time: the next may be better."""
    return all(message.deliveries == 1 for message in handled.messages) and not any(
        isinstance(result, Blameless) for result in handled.results
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
