"""The relay process: settings → source, sink, health → publish until a signal.

    SIGTERM ──▶ no new batch ──▶ the one under way is published and marked ──▶ exit 0
                     └ it takes longer than the grace time, or a second signal ──▶ exit 1

Whatever ends it, its rows are free as soon as its connection is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conquiet.config import DATABASE_VARIABLE, Url, missing_extra, require
from conquiet.errors import ConfigError
from conquiet.registry import SinkOptions, connect_sink, open_database, sink_scheme
from conquiet.relay.health import Check, Health, HealthServer
from conquiet.relay.relay import Outcome
from conquiet.relay.settings import Settings, has_events_layout
from conquiet.source import EndOfSource, Source
from conquiet.stopping import Signals

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger("conquiet.relay")

_LOOK_SECONDS = 0.1
_COUNT_MS = 30_000
OK, FAILED = 0, 1


class RelayProcess:
    """Everything that `conquiet relay run` runs; `run()` returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        try:
            from conquiet.relay.inspection import Inspection
            from conquiet.relay.metrics import RelayMetrics
            from conquiet.relay.watched import WatchedRelay
        except ModuleNotFoundError as error:
            raise missing_extra(error, "postgres,redis") from error
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
            # Counting takes long behind a long backlog, which is no reason to be unready.
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
                _open_source(settings, engine, cloudevents=opened.cloudevents),
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
            )
            self.server: HealthServer | None = None
            if settings.health is not None:
                self.server = HealthServer(self.health, *settings.health)
                self._open.callback(self.server.close)
            undo.pop_all()

    def run(self) -> int:
        """Publish until a signal comes; the batch under way is finished."""
        thread = threading.Thread(target=self._publish, name="conquiet-relay", daemon=True)
        self._crash: BaseException | None = None
        with Signals() as signals:
            if self.server is not None:  # told when signals are minded: who waits for it may stop
                logger.info("health is at http://%s:%d", self.server.host, self.server.port)
            thread.start()
            while thread.is_alive() and not signals.count:
                thread.join(_LOOK_SECONDS)
                self._end_if_stuck()
            finished = self._drain(thread, signals)
        if not finished:
            logger.error("the batch under way was abandoned; its rows will be published again")
            _end_now()
        self._open.close()
        if self._crash is not None:
            raise self._crash
        logger.info("stopped: published %d, failed %d", self.relay.published, self.relay.failed)
        return OK

    def run_until_empty(self) -> int:
        """Publish what waits now; 1 if something could not be published."""
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
            logger.error("an outage: %s", outcome.outage)
        return FAILED if self.relay.failed or outcome.outage is not None else OK

    def _publish(self) -> None:
        try:
            self.relay.run()
        except BaseException as error:  # noqa: BLE001 - raised again where the process ends
            self._crash = error

    def _drain(self, thread: threading.Thread, signals: Signals) -> bool:
        self.health.stopping = True
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
        return f"a batch has been under way for {busy:.0f} s"

    def _end_if_stuck(self) -> None:
        trouble = self._trouble()
        if trouble is not None:
            logger.critical("%s: ended, so that its rows are free again", trouble)
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


def sink_options(settings: Settings, closing: ExitStack) -> SinkOptions:
    return SinkOptions(
        topic_of(settings),
        settings.publish_timeout_seconds,
        settings.check_timeout_seconds,
        ordered=settings.ordered,
        broker=settings.broker,
        origin="CONQUIET_OUTBOX_SINK",
        closing=closing,
    )


def topic_of(settings: Settings) -> str:
    """The topic of events that name none: from the URL of the sink, else from the setting."""
    if sink_scheme(settings.sink) not in ("pubsub", "kafka"):
        return settings.topic
    named = Url(settings.sink).path
    if named and named != settings.topic and settings.origins["topic"] != "default":
        raise ConfigError(
            f"two topics: {named!r:.100} in CONQUIET_OUTBOX_SINK, {settings.topic!r:.100} by"
            f" {settings.origins['topic']}; leave one out"
        )
    return named or settings.topic


def _open_engine(settings: Settings, **options: Any) -> Engine:
    return open_database(
        settings.database, DATABASE_VARIABLE, application="conquiet-relay", **options
    )


def _open_source(settings: Settings, engine: Engine, *, cloudevents: bool) -> Source:
    options: dict[str, Any] = {
        "max_attempts": settings.max_attempts,
        "poll": settings.poll_ms / 1000,
        "wakeup": settings.wakeup,
        "ordered": settings.ordered,
    }
    if not has_events_layout(settings.table):
        from conquiet.sql import OutboxSource

        return OutboxSource(engine, settings.table, **options)
    events: Any = require("conquiet.events.source", "sql")
    return events.EventSource(  # type: ignore[no-any-return]
        engine, settings.table, topic=topic_of(settings), cloudevents=cloudevents, **options
    )


def _end_now() -> None:
    """Without waiting for threads that hang in a sink's library."""
    logging.shutdown()
    os._exit(FAILED)
