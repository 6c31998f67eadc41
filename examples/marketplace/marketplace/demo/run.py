"""The run: the stages of the demo, in the order in which the data flows.

    generate ──▶ send ──▶ handle (a worker is killed) ──▶ publish ──▶ Spark ──▶ verdict, report

Spark starts at the very beginning, beside the servers. While it makes the tables, the workers and
relays end, the databases are audited, and the rows are derived that the tables must have.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import redis

from conquiet import ConquietError
from marketplace.demo.process import Child
from marketplace.demo.report import business_by_spark, business_by_sql, render
from marketplace.demo.sender import Sender
from marketplace.demo.servers import STREAMS, Servers, servers
from marketplace.demo.settings import (
    GROUP,
    LAKE,
    LOGS,
    PROCESSES,
    RELAYS,
    REPORT,
    VERDICT,
    WORKERS,
    Settings,
    claim_folder,
)
from marketplace.demo.story import Kill, Story
from marketplace.demo.verdict import (
    Lake,
    judge_services,
    judge_tables,
    prepare_tables,
    read_books,
    read_log,
)
from marketplace.demo.world import World, make_world
from marketplace.generator import DOMAIN_TOPIC
from marketplace.oracle import TABLES

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.2
_STALL_SECONDS = 120.0
_KILL_AT = 0.4
"""The share of commands that are handled when a worker is killed; half of them are sent by then."""
_VICTIM = 0

Hook = Callable[[Servers], object]


class Progress(Protocol):
    """Shows how far the demo has come."""

    def begin(self, text: str, label: str) -> None:
        """Begin a stage; the label is shown beside its progress."""

    def advance(self, done: int, total: int) -> None:
        """Show how much of the stage is done."""

    def note(self, text: str) -> None:
        """Show a line about what has happened."""


def run_demo(
    settings: Settings,
    progress: Progress,
    *,
    before_audit: Hook = lambda servers: None,
    when_done: Callable[[Story, Servers], object] = lambda story, servers: None,
) -> Story:
    """Run all stages; nothing but the folder of results is left. Tests use `before_audit`.

    `when_done` is called with the verdict while the servers still run. With `keep`, the servers,
    the workers and the relays go on until a signal arrives.
    """
    folder = claim_folder(settings.folder)
    with interruptible(), ExitStack() as stack:
        run = _Run(settings, progress, folder, stack)
        run.start()
        run.handle_and_publish(before_audit)
        run.make_tables_and_judge()
        run.write()
        when_done(run.story, run.servers)
        if settings.keep:
            with suppress(KeyboardInterrupt):  # the user ends it
                signal.pause()
        return run.story


class _Run:
    """Owns the servers and the child processes of one run."""

    def __init__(
        self, settings: Settings, progress: Progress, folder: Path, stack: ExitStack
    ) -> None:
        self.story = Story(settings)
        self._settings = settings
        self._progress = progress
        self._folder = folder
        self._stack = stack
        self._spark: Child | None = None
        self._services: list[Child] = []
        self.world: World
        self.servers: Servers

    def start(self) -> None:
        """Start the servers, Spark and the generator, side by side."""
        self._progress.begin("servers start, the generator makes orders", "starting")
        orders, seed = self._settings.orders, self._settings.seed
        if self._settings.spark:
            scratch = self._stack.enter_context(_scratch())
            self._spark = self._child("pipeline", {"scratch": scratch}, {"TMPDIR": scratch})
            self._stack.callback(self._spark.kill)
        with self.story.stage("servers and generator"):
            world = _in_thread(lambda: make_world(orders, seed))
            self.servers = self._stack.enter_context(servers(self._settings))
            self._start_services()  # they need a second or two, while orders are generated
            self.world = self.story.world = world.result()
        gc.freeze()  # the world is kept to the end: the collector need not walk through it
        self._progress.note(
            f"{orders:,} orders generated: {len(self.world.commands):,} commands,"
            f" {len(self.world.telemetry):,} views and clicks of ads,"
            f" {len(self.world.bad):,} bad events"
        )

    def _start_services(self) -> None:
        addresses = {"database": self.servers.database, "broker": self.servers.broker}
        self._services.append(self._child("workers", addresses))
        for number in range(1, RELAYS + 1):
            seed = self._settings.seed + number
            self._services.append(self._child("relays", {**addresses, "seed": seed}))
        for child in self._services:
            self._stack.callback(child.end)

    def handle_and_publish(self, before_audit: Hook) -> None:
        """Run two workers, one of which is killed, and two relays, until the backlog is empty."""
        self._progress.begin(
            f"{WORKERS} workers handle commands, {RELAYS} relays publish events", "working"
        )
        story, world = self.story, self.world
        sender = Sender(self.servers, world, self._settings.seed)
        self._stack.callback(sender.close)
        with story.stage("handle and publish"):
            _Watch(self.servers, story, self._services, self._progress).run(sender)
        story.duplicates = sender.duplicates
        self._progress.note(
            f"{len(world.commands):,} commands have taken effect, {world.events.total():,} events"
            f" are published, in {story.last_published - story.first_sent:.1f} s"
        )
        before_audit(self.servers)

    def make_tables_and_judge(self) -> None:
        story, servers = self.story, self.servers
        if self._spark is not None:
            self._progress.begin("Spark makes bronze, silver, gold and marts of the log", "Spark")
            lake = {"lake": str(self._folder / LAKE)}
            addresses = {"database": servers.database, "broker": servers.broker}
            self._spark.send(json.dumps({**addresses, **lake}))
        if not self._settings.keep:
            _end_all(self._services)
        with story.stage("audit of databases and log"):
            story.books, story.log = read_books(servers), read_log(servers)
            judge_services(story.verdict, self.world, story.books, story.log, story.duplicates)
        if self._spark is None:
            story.business = business_by_sql(servers)
            return
        prepare_tables(self.world)
        self._follow_spark(self._spark)
        with story.stage("verdict"):
            story.lake = Lake(self._folder / LAKE)
            story.silver = judge_tables(
                story.verdict, self.world, story.books, story.log, story.lake
            )
            story.business = business_by_spark(story.lake)

    def _follow_spark(self, spark: Child) -> None:
        with self.story.stage("Spark: bronze, silver"):
            self._wait(spark, "taken")
        with self.story.stage("Spark: gold, marts"):
            self._wait(spark, "finished")
        self._progress.note("bronze, silver, gold and marts are made")
        spark.kill()  # all is on disk

    def _wait(self, child: Child, word: str) -> None:
        lake = self._folder / LAKE
        while word not in (child.hear(_POLL_SECONDS) or {}):
            made = sum(1 for name in TABLES if (lake / name / "_delta_log").exists())
            self._progress.advance(min(made, len(TABLES)), len(TABLES))

    def write(self) -> None:
        """Write the report and the verdict."""
        with self.story.stage("report"):
            page = render(self.story)
        (self._folder / REPORT).write_text(page)
        text = json.dumps(self.story.as_json(), indent=2) + "\n"
        (self._folder / VERDICT).write_text(text)

    def _child(
        self, name: str, settings: dict[str, Any], env: dict[str, str] | None = None
    ) -> Child:
        log = self._folder / LOGS / f"{name}.log"
        return Child(f"marketplace.demo.{name}", settings, log, env or {})


def _end_all(children: Sequence[Child]) -> None:
    """End them side by side: each may take a second."""
    with ThreadPoolExecutor(len(children)) as pool:
        list(pool.map(Child.end, children))


class Stalled(ConquietError):
    """No command was handled and no event published for a long time."""


class _Watch:
    """Counts commands and events from outside, and kills a worker when 40 % are handled."""

    def __init__(
        self, servers: Servers, story: Story, children: Sequence[Child], progress: Progress
    ) -> None:
        self._connection = servers.connect()
        self._client = servers.client
        self._children = children
        self._progress = progress
        self._story = story
        self._commands = len(story.world.commands)
        self._total = self._commands + story.world.events.total()

    def run(self, sender: Sender) -> None:
        """Send one half, kill a worker, send the rest, and wait until all is published."""
        try:
            self._wait(lambda: len(self._processes()) > 1, "the workers do not start")
            self._story.first_sent = time.time()
            sender.send_half()
            self._wait(
                lambda: self._handled() >= self._commands * _KILL_AT, "no command is handled"
            )
            sender.send_rest()
            self._kill()
            self._wait(self._is_taken_over, "no process takes over from the killed worker")
            self._wait(self._is_done, "commands are not handled, or events not published")
            self._story.last_published = time.time()
        finally:
            self._connection.close()
            self._client.close()

    def _kill(self) -> None:
        victim, _ = self._processes()[_VICTIM]
        os.kill(victim, signal.SIGKILL)
        self._story.kill = Kill(_VICTIM + 1, victim, time.time())
        self._progress.note(f"worker {_VICTIM + 1}, process {victim}, is killed by SIGKILL")

    def _is_taken_over(self) -> bool:
        kill = self._story.kill
        assert kill is not None
        pid, ms = self._processes()[_VICTIM]
        if pid == kill.pid:
            return False
        self._story.kill = kill = Kill(kill.worker, kill.pid, kill.at, pid, ms / 1_000)
        self._progress.note(f"process {pid} takes over after {kill.outage_seconds:.1f} s")
        return True

    def _processes(self) -> dict[int, tuple[int, int]]:
        """Return the newest process of each worker, and when it began in milliseconds."""
        found = {}
        for line in self._client.lrange(PROCESSES, 0, -1):
            slot, pid, ms = map(int, line.split())
            found[slot] = pid, ms
        return found

    def _handled(self) -> int:
        """Count the entries that are read and acked; a query would cost the workers time."""
        groups = [group for stream in STREAMS for group in self._groups(stream)]
        if any(group.get("entries-read") is None for group in groups):  # older than Redis 7
            return self._count("SELECT count(*) FROM processed_messages")
        return sum(int(group["entries-read"]) - int(group["pending"]) for group in groups)

    def _published(self) -> int:
        return int(self._client.xlen(DOMAIN_TOPIC))

    def _groups(self, stream: str) -> list[dict[str, Any]]:
        """Return the consumer group of a stream, or none before a worker has created it."""
        try:
            groups: list[dict[str, Any]] = self._client.xinfo_groups(stream)
        except redis.ResponseError:  # no such key yet
            return []
        return [group for group in groups if group["name"] == GROUP.encode()]

    def _count(self, query: str) -> int:
        found: Any = self._connection.execute(query.encode()).fetchone()
        return int(found[0])

    def _is_done(self) -> bool:
        if self._published() < self._story.world.events.total():
            return False
        if not all(map(self._is_read, STREAMS)):
            return False
        if self._count("SELECT count(*) FROM processed_messages") < self._commands:
            return False
        return self._count("SELECT count(*) FROM outbox_events WHERE published_at IS NULL") == 0

    def _is_read(self, stream: str) -> bool:
        """Whether every entry, duplicates included, is read and acked."""
        last = self._client.xinfo_stream(stream)["last-generated-id"]
        [state] = self._groups(stream)
        return bool(state["pending"] == 0 and state["last-delivered-id"] == last)

    def _wait(self, condition: Callable[[], bool], trouble: str) -> None:
        before, since = -1, time.monotonic()
        while not condition():
            for child in self._children:
                child.hear(0.0)  # raises if it has exited
            done = self._handled() + self._published()
            self._progress.advance(done, self._total)
            if done != before:
                before, since = done, time.monotonic()
            elif time.monotonic() - since > _STALL_SECONDS:
                raise Stalled(f"{trouble}: no progress for {_STALL_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM; ignore further ones."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _scratch() -> Iterator[str]:
    """Provide a folder for the temporary files of Java."""
    with tempfile.TemporaryDirectory(
        prefix="conquiet-demo-", ignore_cleanup_errors=True
    ) as scratch:
        yield scratch


def _in_thread(make: Callable[[], World]) -> Future[World]:
    """Call it in a thread, which does not keep the process from ending."""
    future: Future[World] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="demo-generator", daemon=True).start()
    return future
