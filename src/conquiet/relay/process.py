"""Run a relay as a process: open source, sink and health server, publish until a signal.

    SIGTERM ──▶ no new batch ──▶ the current batch is published and marked ──▶ exit 0
                     └ it takes longer than the grace time, or a second signal ──▶ exit 1

However the process ends, its claimed rows are free as soon as its connection is closed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conquiet.acking import Error
from conquiet.backoff import Backoff
from conquiet.config import Url, has_events_layout, is_loopback, missing_extra, require
from conquiet.errors import Blameless, ConfigError, StoreError
from conquiet.health import Check, Health, HealthServer
from conquiet.message import Message
from conquiet.registry import SinkOptions, connect_sink, open_database, sink_scheme
from conquiet.relay.relay import Outcome, Relay, log_fields
from conquiet.relay.settings import Settings
from conquiet.shutdown import Signals
from conquiet.sink import Sink
from conquiet.source import EndOfSource, Source

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.relay.metrics import RelayMetrics

logger = logging.getLogger("conquiet.relay")

_LOOK_SECONDS = 0.1
_COUNT_MS = 30_000
_MAX_UNMARKED = 10_000
_IDLE_FACTOR = 4
OK, FAILED = 0, 1


class WatchedRelay(Relay):
    """Reports each event to metrics and logs.

    While there is nothing to publish, it polls less and less often, at least every 4 × `poll`.
    """

    def __init__(
        self,
        source: Source,
        sink: Sink,
        metrics: RelayMetrics,
        *,
        batch_size: int = 50,
        ordered: bool = False,
        poll: float = 0.5,
        longest_pause: float = 10.0,
        publish_seconds: float = 10.0,
    ) -> None:
        super().__init__(
            source,
            sink,
            batch_size=batch_size,
            ordered=ordered,
            longest_pause=longest_pause,
            publish_seconds=publish_seconds,
            observe=self._observe_batch,
        )
        self._metrics = metrics
        self._idle = Backoff(first=poll, cap=poll * _IDLE_FACTOR)
        self._confirmed: list[Message[Any]] = []
        self._unmarked: dict[str, None] = {}
        """Ids that were published and could not be marked: the next publication is a duplicate."""
        self._busy_since: float | None = None
        self.read_seconds = poll

    @property
    def metrics(self) -> RelayMetrics:
        return self._metrics

    @property
    def busy_seconds(self) -> float:
        """Return how long the current batch has taken; 0 between batches and while polling."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    def run_once(self, timeout: float = 0.0) -> Outcome:
        self._confirmed = []
        try:
            outcome = super().run_once(timeout)
        finally:
            self._busy_since = None
        if outcome.outage is not None:
            self._metrics.outages.inc()
            self._remember_unmarked(outcome.outage)
        if outcome == Outcome():
            self.read_seconds = self._idle.next()
        else:
            self._idle.reset()
        return outcome

    def _read(self, timeout: float) -> Sequence[Message[Any]]:
        self._busy_since = time.monotonic() + timeout  # until then it may be polling
        messages = super()._read(timeout)
        self._busy_since = time.monotonic()
        return messages

    def _observe_batch(
        self,
        messages: Sequence[Message[Any]],
        answers: Sequence[Error],
        outage: Exception | None,
        seconds: float,
    ) -> None:
        self._metrics.publish_seconds.observe(seconds)
        confirmed = [m for m, answer in zip(messages, answers, strict=True) if answer is None]
        self._confirmed += confirmed
        self._metrics.count_published([message.deliveries for message in confirmed])
        if self._unmarked or logger.isEnabledFor(logging.INFO):
            for message in confirmed:
                self._log_published(message)
        if outage is None and len(confirmed) < len(messages):
            for answer in answers:
                if answer is not None and not isinstance(answer, Blameless):
                    self._metrics.failed.labels(type(answer).__name__).inc()

    def _log_published(self, message: Message[Any]) -> None:
        if message.id in self._unmarked:
            del self._unmarked[message.id]
            self._metrics.duplicates.inc()
            logger.warning("published again", extra=log_fields(message, duplicate=True))
        elif logger.isEnabledFor(logging.INFO):
            logger.info("published", extra=log_fields(message, topic=message.topic))

    def _remember_unmarked(self, error: Exception) -> None:
        for message in self._confirmed:
            logger.warning(
                "published but not marked, it will be published again: %s",
                error,
                extra=log_fields(message),
            )
            self._unmarked[message.id] = None
        while len(self._unmarked) > _MAX_UNMARKED:
            del self._unmarked[next(iter(self._unmarked))]


class RelayProcess:
    """Runs what `conquiet relay run` needs; `run()` returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        try:
            from conquiet.relay.inspection import Inspection
        except ModuleNotFoundError as error:
            raise missing_extra(error, "sql") from error
        from conquiet.relay.metrics import RelayMetrics

        self.settings = settings
        self._open = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._open.close)
            engine = _open_engine(settings)
            self._open.callback(engine.dispose)
            probing = _open_engine(settings, pool_size=2, max_overflow=1)
            self._open.callback(probing.dispose)
            opened = connect_sink(settings.sink, sink_options(settings, self._open))
            inspection = Inspection(probing, settings.table, max_attempts=settings.max_attempts)
            seconds = settings.check_timeout_seconds
            # Counting a long backlog takes long; that must not make the relay unready.
            self._counts = Check(
                lambda: asdict(inspection.figures(_COUNT_MS)), timeout=seconds / 2, fresh=5.0
            )

            def look_at_database() -> Mapping[str, Any]:
                inspection.reach(round(seconds * 1000))
                counts = self._counts.answer()
                return counts.detail if counts.ok else {"counts": counts.detail["error"]}

            self._database = Check(look_at_database, timeout=seconds)
            self._sink = Check(self._look_at_sink(opened.check), timeout=seconds)
            self.metrics = RelayMetrics(self._figures)
            self.relay = WatchedRelay(
                ChosenSource(settings, engine, cloudevents=opened.cloudevents),
                opened.sink,
                self.metrics,
                batch_size=settings.batch_size,
                ordered=settings.ordered,
                poll=settings.poll_ms / 1000,
                longest_pause=settings.longest_pause_seconds,
                publish_seconds=settings.publish_timeout_seconds,
            )
            self.health = Health(
                {"database": self._database, "sink": self._sink},
                alive=self._trouble,
                metrics=self.metrics.exposition,
                details=_may_name_details(settings),
            )
            self.server: HealthServer | None = None
            if settings.health is not None:
                self.server = HealthServer(self.health, *settings.health, settings.origin("health"))
                self._open.callback(self.server.close)
            undo.pop_all()

    def run(self) -> int:
        """Publish until a signal, then finish the current batch."""
        thread = threading.Thread(target=self._publish, name="conquiet-relay", daemon=True)
        self._crash: BaseException | None = None
        with Signals() as signals:
            if self.server is not None:
                # After the signal handlers: readers of this line may send a signal.
                logger.info("health is at http://%s:%d", self.server.host, self.server.port)
            thread.start()
            while thread.is_alive() and not signals.count:
                thread.join(_LOOK_SECONDS)
                self._end_if_stuck()
            finished = self._drain(thread, signals)
        if not finished:
            logger.error("the current batch was abandoned; its rows will be published again")
            _end_now()
        self._open.close()
        if self._crash is not None:
            raise self._crash
        logger.info("stopped: published %d, failed %d", self.relay.published, self.relay.failed)
        return OK

    def run_until_empty(self) -> int:
        """Publish the backlog once; return 1 if a message could not be published."""
        outcome = Outcome()
        try:
            outcome = self.relay.run_once()
            while outcome != Outcome() and outcome.outage is None:
                outcome = self.relay.run_once()
        except EndOfSource:
            pass
        finally:
            self.relay.source.close()
            self.relay.sink.close()
            self._open.close()
        logger.info("done: published %d, failed %d", self.relay.published, self.relay.failed)
        if outcome.outage is not None:
            logger.error("stopped by an outage: %s", outcome.outage)
        return FAILED if self.relay.failed or outcome.outage is not None else OK

    def _publish(self) -> None:
        try:
            self.relay.run()
        except BaseException as error:  # noqa: BLE001 - raised by run() when the process ends
            self._crash = error

    def _drain(self, thread: threading.Thread, signals: Signals) -> bool:
        self.health.begin_stop()
        self.relay.stop()
        waited = 0.0
        while thread.is_alive() and waited < self.settings.grace_seconds and signals.count < 2:
            thread.join(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
        return not thread.is_alive()

    def _trouble(self) -> str | None:
        busy = self.relay.busy_seconds
        if busy < self.settings.stuck_after_seconds:
            return None
        return f"a batch has been in progress for {busy:.0f} s"

    def _end_if_stuck(self) -> None:
        trouble = self._trouble()
        if trouble is not None:
            logger.critical("%s: exiting, so that its rows are released", trouble)
            faulthandler.dump_traceback(sys.stderr)
            _end_now()

    def _figures(self) -> Any:
        from conquiet.relay.inspection import Figures

        answer = self._counts.answer()
        return Figures(**answer.detail) if answer.ok else None

    def _look_at_sink(
        self, check: Callable[[], object] | None
    ) -> Callable[[], Mapping[str, Any] | None]:
        def look() -> Mapping[str, Any]:
            if check is not None:
                check()
                return {}
            from conquiet.errors import SinkUnavailable

            error = self.relay.last_error
            if isinstance(error, SinkUnavailable) and self.relay.in_outage:
                raise error
            return {"checked": "by publishing"}

        return look


def _may_name_details(settings: Settings) -> bool:
    """Return whether `/readyz` may say more than whether each dependency is ready."""
    return settings.health_details or settings.health is None or is_loopback(settings.health[0])


def sink_options(settings: Settings, closing: ExitStack) -> SinkOptions:
    return SinkOptions(
        default_topic(settings),
        settings.publish_timeout_seconds,
        settings.check_timeout_seconds,
        ordered=settings.ordered,
        broker=settings.broker,
        broker_origin=settings.origin("broker"),
        origin=settings.origin("sink"),
        closing=closing,
    )


def default_topic(settings: Settings) -> str:
    """Return the default topic: of the sink's URL, else of the setting."""
    if sink_scheme(settings.sink) not in ("pubsub", "kafka"):
        return settings.topic
    named = Url(settings.sink).path
    if named and named != settings.topic and settings.origins["topic"] != "default":
        raise ConfigError(
            f"two topics: {named!r:.100} in {settings.origin('sink')}, {settings.topic!r:.100} by"
            f" {settings.origin('topic')}; leave one out"
        )
    return named or settings.topic


def _open_engine(settings: Settings, **options: Any) -> Engine:
    return open_database(
        settings.database, settings.origin("database"), application="conquiet-relay", **options
    )


class ChosenSource:
    """Claims rows or follows the write-ahead log, as the settings and the database say.

    Chosen when the database answers: one that is away at the start is an outage.
    """

    def __init__(self, settings: Settings, engine: Engine, *, cloudevents: bool) -> None:
        self._settings = settings
        self.engine = engine
        self._cloudevents = cloudevents
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._source: Any = None
        with suppress(StoreError):
            self._choose()

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        source = self._source or self._choose()
        return source.read(limit, timeout) if source is not None else ()

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._source is not None:
                self._source.stop()

    def close(self) -> None:
        self.stop()
        if self._source is not None:
            self._source.close()

    def _choose(self) -> Any:
        kind, why = choose_kind(self._settings, self.engine)
        if kind == "claim" and not has_events_layout(self._settings.table):
            self._leave_log()
        with self._lock:
            if not self._stopping.is_set():
                self._source = self._open(kind)
                how = "from the write-ahead log" if kind == "wal" else "by claims"
                logger.info("publishing %s %s: %s", self._settings.table, how, why)
            return self._source

    def _leave_log(self) -> None:
        """Change back to claims, if the outbox was published from the log."""
        from conquiet.sql import dialect
        from conquiet.sql.wal import WalOutbox

        if dialect.uses_psycopg(self.engine.dialect):
            outbox = WalOutbox(self.engine, self._settings.table)
            if outbox.is_entered():
                outbox.leave(lambda seconds: not self._stopping.wait(seconds))

    def _open(self, kind: str) -> Any:
        settings = self._settings
        options: dict[str, Any] = {
            "max_attempts": settings.max_attempts,
            "ordered": settings.ordered,
        }
        if kind == "wal":
            from conquiet.sql import WalSource

            return WalSource(self.engine, settings.table, **options, poll=settings.poll_ms / 1000)
        # The relay lets a read take as long as it pauses; within it, there is no need to poll.
        options |= {"poll": _IDLE_FACTOR * settings.poll_ms / 1000, "wakeup": settings.wakeup}
        if not has_events_layout(settings.table):
            from conquiet.sql import OutboxSource

            return OutboxSource(self.engine, settings.table, **options)
        events: Any = require("conquiet.events.source", "sql")
        return events.EventSource(
            self.engine,
            settings.table,
            topic=default_topic(settings),
            cloudevents=self._cloudevents,
            **options,
        )


def choose_kind(settings: Settings, engine: Engine) -> tuple[str, str]:
    """Return `claim` or `wal`, and why."""
    from conquiet.sql import dialect
    from conquiet.sql.wal import WalOutbox
    from conquiet.sql.wal_source import connect_for_replication

    wanted, origin = settings.read_from, settings.origin("from")
    if has_events_layout(settings.table):
        if wanted == "wal":
            raise ConfigError(
                f"{origin}: {settings.table} has no column for the transaction of a row, which the"
                " write-ahead log needs; choose claim"
            )
        return "claim", "the only way for this table"
    if wanted == "claim":
        return "claim", f"{origin} says so"
    if wanted == "auto" and not dialect.uses_psycopg(engine.dialect):
        return "claim", f"the database is {engine.dialect.name}"
    outbox = WalOutbox(engine, settings.table)
    if wanted == "wal":
        outbox.check()
        return "wal", f"{origin} says so"
    if outbox.is_entered():
        return "wal", "its publication exists"
    if reason := outbox.reason_against():
        return "claim", reason
    try:
        connect_for_replication(engine).close()
    except ConfigError as error:
        return "claim", str(error)
    return "wal", "wal_level is logical, and max_slot_wal_keep_size is set"


def _end_now() -> None:
    """Exit without waiting for threads that hang in a sink's library."""
    logging.shutdown()
    os._exit(FAILED)
