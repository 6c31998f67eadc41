"""Running: the stages of the demo, in the order in which the data flows.

    generate ──▶ send ──▶ handle (a worker is killed) ──▶ publish ──▶ Spark ──▶ verdict, report

Java starts at the very beginning, beside the servers; the audit of the databases runs beside Spark.
"""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from marketplace.demo import folder as results
from marketplace.demo.audit import read_books, read_log
from marketplace.demo.business import business_by_spark, business_by_sql
from marketplace.demo.interruption import interruptible
from marketplace.demo.lake import Lake
from marketplace.demo.process import Child
from marketplace.demo.report import report
from marketplace.demo.sending import Sender
from marketplace.demo.servers import Servers, servers
from marketplace.demo.settings import RELAYS, WORKERS, Settings
from marketplace.demo.story import Story, Teller
from marketplace.demo.timeline import timeline
from marketplace.demo.verdict import judge_services, judge_tables
from marketplace.demo.watching import Watch
from marketplace.demo.world import World, make_world
from marketplace.oracle import TABLES

_HERE = "marketplace.demo"
_WAIT_SECONDS = 0.2
_TABLES = len(TABLES)
"""`events` and `events_quarantine` are one of those on disk, and `raw_events` is there besides."""

Hook = Callable[[Servers], object]


def run_demo(
    settings: Settings,
    teller: Teller,
    *,
    before_audit: Hook = lambda servers: None,
    when_done: Callable[[Story, Servers], object] = lambda story, servers: None,
) -> Story:
    """All of it; leaves nothing but the folder. `before_audit` is for those who doubt the verdict.

    `when_done` is told the verdict while the servers still run; with `keep` they, the workers and
    the relays go on until a signal comes.
    """
    folder = results.claim(settings.folder)
    with interruptible(), ExitStack() as stack:
        run = _Run(settings, teller, folder, stack)
        run.start()
        run.handle_and_publish(before_audit)
        run.make_tables_and_judge()
        run.write()
        when_done(run.story, run.servers)
        if settings.keep:
            with suppress(KeyboardInterrupt):  # as it was asked for
                signal.pause()
        return run.story


class _Run:
    def __init__(self, settings: Settings, teller: Teller, folder: Path, stack: ExitStack) -> None:
        self.story = Story(settings)
        self._settings = settings
        self._teller = teller
        self._folder = folder
        self._stack = stack
        self._spark: Child | None = None
        self.world: World
        self.servers: Servers

    def start(self) -> None:
        """Servers, Java and the generator, side by side."""
        self._teller.begin("servers start, the generator makes orders", "starting")
        orders, seed = self._settings.orders, self._settings.seed
        if self._settings.spark:
            scratch = self._stack.enter_context(_scratch())
            self._spark = self._child("tabling", {"scratch": scratch}, {"TMPDIR": scratch})
            self._stack.callback(self._spark.kill)
        with self.story.stage("servers and generator"):
            world = _beside(lambda: make_world(orders, seed))
            self.servers = self._stack.enter_context(servers(self._settings))
            self.world = self.story.world = world.result()
        self._teller.end(
            f"{orders:,} orders generated: {len(self.world.commands):,} commands,"
            f" {len(self.world.telemetry):,} views and clicks of ads,"
            f" {len(self.world.bad):,} bad events"
        )

    def handle_and_publish(self, before_audit: Hook) -> None:
        """Two workers, of which one is killed, and two relays; until nothing waits any more."""
        self._teller.begin(
            f"{WORKERS} workers handle commands, {RELAYS} relays publish events", "working"
        )
        addresses = {"database": self.servers.database, "broker": self.servers.broker}
        relays = [
            self._child("publishing", {**addresses, "seed": self._settings.seed + number})
            for number in range(1, RELAYS + 1)
        ]
        workers = self._child("supervising", addresses)
        for child in (*relays, workers):
            self._stack.callback(child.end)
        sender = Sender(self.servers, self.world, self._settings.seed)
        self._stack.callback(sender.close)
        with self.story.stage("handle and publish"):
            watch = Watch(self.servers, self.world, [workers, *relays], self._teller)
            watch.run(sender)
        story = self.story
        story.kill, story.commands_repeated = watch.kill, sender.repeated
        story.line = timeline(watch.began, watch.ended, watch.kill)
        events, seconds = self.world.events.total(), watch.ended - watch.began
        self._teller.end(
            f"{len(self.world.commands):,} commands have taken effect, {events:,} events are"
            f" published, in {seconds:.1f} s"
        )
        if not self._settings.keep:
            for child in (*relays, workers):
                child.end()
        before_audit(self.servers)

    def make_tables_and_judge(self) -> None:
        story, servers = self.story, self.servers
        if self._spark is not None:
            self._teller.begin("Spark makes bronze, silver, gold and marts of the log", "Spark")
            lake = {"lake": str(self._folder / results.LAKE)}
            addresses = {"database": servers.database, "broker": servers.broker}
            self._spark.send(json.dumps({**addresses, **lake}))
        with story.stage("audit of databases and log"):
            story.books, story.log = read_books(servers), read_log(servers)
            judge_services(
                story.verdict, self.world, story.books, story.log, story.commands_repeated
            )
        if self._spark is None:
            story.business = business_by_sql(servers)
            return
        self._follow_spark(self._spark)
        with story.stage("verdict"):
            story.lake = Lake(self._folder / results.LAKE)
            story.silver = judge_tables(
                story.verdict, self.world, story.books, story.log, story.lake
            )
            story.business = business_by_spark(story.lake)

    def _follow_spark(self, spark: Child) -> None:
        with self.story.stage("Spark: bronze, silver"):
            self._wait(spark, "taken")
        with self.story.stage("Spark: gold, marts"):
            self._wait(spark, "finished")
        self._teller.end("bronze, silver, gold and marts are made")
        spark.kill()  # all is on disk

    def _wait(self, child: Child, word: str) -> None:
        lake = self._folder / results.LAKE
        while word not in (child.hear(_WAIT_SECONDS) or {}):
            made = sum(1 for _ in lake.glob("*/_conquiet/state.json"))
            self._teller.progress(min(made, _TABLES), _TABLES)

    def write(self) -> None:
        """The report and the verdict."""
        with self.story.stage("report"):
            page = report(self.story)
        (self._folder / results.REPORT).write_text(page)
        text = json.dumps(self.story.as_json(), indent=2) + "\n"
        (self._folder / results.VERDICT).write_text(text)

    def _child(
        self, name: str, settings: dict[str, Any], env: dict[str, str] | None = None
    ) -> Child:
        log = self._folder / results.LOGS / f"{name}.log"
        return Child(f"{_HERE}.{name}", settings, log, env or {})


@contextmanager
def _scratch() -> Iterator[str]:
    """A folder for what Java writes on the way."""
    with tempfile.TemporaryDirectory(
        prefix="conquiet-demo-", ignore_cleanup_errors=True
    ) as scratch:
        yield scratch


def _beside(make: Callable[[], World]) -> Future[World]:
    """Start to make it in a thread, which does not keep the process from ending."""
    future: Future[World] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="demo-generator", daemon=True).start()
    return future
