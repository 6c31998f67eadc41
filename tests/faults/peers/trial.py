"""The kill scripts: the same for every peer, by the same seed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import redis
from tests.faults.peers import reader
from tests.faults.peers.catalogue import HERE, Peer

from conquiet import embedded

RATE = 500
"""Commands a second, at most: an equal share for each life of the consumer."""
BUSY_SECONDS = (0.05, 0.6)
"""How long a consumer lives after its first effect."""
SALES_BETWEEN = (20, 80)
PATIENCE_SECONDS = 20.0
DONE_SECONDS = 1.5
"""Without a change and with nothing held: it is over."""
TABLES = """
CREATE TABLE effects (command TEXT NOT NULL);
CREATE TABLE sales (command TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Outcome:
    """What became of the commands; once + repeated + held + lost is what was sent."""

    sent: int
    once: int
    repeated: int
    held: int
    """No effect, and the broker or the database has it still."""
    lost: int
    """No effect, and it is nowhere."""
    silent: int
    """Effects without an event."""
    unfounded: int
    """Events without an effect."""
    events_repeated: int
    drain_seconds: float


@dataclass(frozen=True)
class Sales:
    """What became of business rows whose process was killed between row and command."""

    rows: int
    rows_alone: int
    commands_alone: int


class Trial:
    """One peer, on an empty Redis and a new database."""

    def __init__(
        self, peer: Peer, redis_server: embedded.RedisServer, database: str, log: Path
    ) -> None:
        self.peer, self._log = peer, log
        self._redis, self._database = redis_server.url, database
        self._python = str(peer.python())
        with redis.Redis.from_url(self._redis) as client:
            client.flushall()
        self._found = psycopg.connect(database, autocommit=True)
        self._found.execute(TABLES)

    def close(self) -> None:
        self._found.close()

    def read(self) -> reader.Stores:
        return reader.read(self._database, self._redis, self.peer.held, self.peer.events)

    def count(self, table: str) -> int:
        row = self._found.execute(f"SELECT count(*) FROM {table}").fetchone()
        assert row is not None
        return int(row[0])

    @contextlib.contextmanager
    def run(self, mode: str) -> Iterator[subprocess.Popen[str]]:
        """A process with a group of its own, so that all of its processes are killed at once."""
        servers = {"PEER_REDIS": self._redis, "PEER_DATABASE": self._database}
        options = {"PEER_KIND": self.peer.kind, "PEER_SAFE": "1" if self.peer.safe else ""}
        with self._log.open("a") as log:
            process = subprocess.Popen(
                [self._python, self.peer.program, mode],
                cwd=HERE,
                env={**os.environ, **servers, **options},
                stdin=subprocess.PIPE,
                stdout=log if mode == "work" else subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def until_more(self, table: str, more: int) -> bool:
        """Until there are so many more rows; false if there are none for too long."""
        goal = self.count(table) + more
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.count(table) < goal:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def trouble(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self.peer.name}: {what}:\n{self._log.read_text()[-3000:]}")


class Feed:
    """Hands commands to a sender in the background, as many as are allowed."""

    def __init__(self, sender: subprocess.Popen[str]) -> None:
        assert sender.stdin is not None
        assert sender.stdout is not None
        self._to, self._from = sender.stdin, sender.stdout
        self._allowed = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._ticks = itertools.count(1)
        self.sent = 0
        for what in (self._feed, self._listen):
            threading.Thread(target=what, daemon=True).start()

    def allow(self, more: int) -> None:
        self._allowed.release(more)

    def tick(self) -> None:
        """A command that does not count: some peers look for old ones only when one is new."""
        self._say(f"tick-{next(self._ticks)}")

    def _feed(self) -> None:
        for number in itertools.count():
            self._allowed.acquire()
            self._say(f"cmd-{number:05}")
            time.sleep(1 / RATE)

    def _say(self, command: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # it is dead: then not all are sent
            self._to.write(f"{command}\n")
            self._to.flush()

    def _listen(self) -> None:
        for line in self._from:
            self.sent += line.startswith("cmd-")


def consume(trial: Trial, *, commands: int, kills: int, seed: int) -> Outcome:
    """Send commands, kill the consumer while it is busy, wait for what comes back, count."""
    dice = random.Random(seed)
    share = commands // (kills + 1)
    with trial.run("send") as sender:
        if sender.stdout is None or sender.stdout.readline() != "ready\n":
            raise trial.trouble("its sender does not start")
        feed = Feed(sender)
        for kill in range(kills):
            with trial.run("work") as worker:
                if kill == 0:
                    _until_ready(trial, feed, worker)
                feed.allow(share)
                trial.until_more("effects", 1)
                time.sleep(dice.uniform(*BUSY_SECONDS))
        with trial.run("work"):
            feed.allow(commands - kills * share)
            stores, seconds = _drain(trial, feed, commands)
    return judge(stores, {f"cmd-{number:05}" for number in range(commands)}, seconds)


def _until_ready(trial: Trial, feed: Feed, worker: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    while not trial.count("effects"):
        if time.monotonic() > deadline or worker.poll() is not None:
            raise trial.trouble("its consumer handles nothing")
        feed.tick()
        time.sleep(0.2)


def _drain(trial: Trial, feed: Feed, commands: int) -> tuple[reader.Stores, float]:
    """Until nothing is held, or nothing has changed for as long as something could come back."""
    deadline = time.monotonic() + commands / RATE + 3 * PATIENCE_SECONDS
    while feed.sent < commands:
        if time.monotonic() > deadline:
            raise trial.trouble(f"its sender has sent {feed.sent} of {commands}")
        time.sleep(0.05)
    began = changed = time.monotonic()
    stores = trial.read()
    while time.monotonic() - changed < (trial.peer.quiet if stores.held else DONE_SECONDS):
        feed.tick()
        time.sleep(0.5)
        last, stores = stores, trial.read()
        if stores != last:
            changed = time.monotonic()
    return stores, changed - began


def judge(stores: reader.Stores, sent: set[str], seconds: float) -> Outcome:
    effects, events = stores.effects, stores.events
    missing = sent - effects.keys()
    return Outcome(
        sent=len(sent),
        once=sum(number == 1 for number in effects.values()),
        repeated=sum(number > 1 for number in effects.values()),
        held=len(missing & stores.held),
        lost=len(missing - stores.held),
        silent=len(effects.keys() - events.keys()),
        unfounded=len(events.keys() - effects.keys()),
        events_repeated=sum(number > 1 for number in events.values()),
        drain_seconds=round(seconds, 1),
    )


def sell(trial: Trial, *, kills: int, seed: int) -> Sales:
    """Kill a process that writes a row and sends a command, and see which of the two there is."""
    dice = random.Random(seed)
    with trial.run("sell") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise trial.trouble("its seller does not start")
        for _ in range(kills):
            print(file=process.stdin, flush=True)
            child = int(process.stdout.readline())
            if not trial.until_more("sales", dice.randint(*SALES_BETWEEN)):
                raise trial.trouble("its seller sells nothing")
            time.sleep(dice.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
        process.stdin.close()
        process.wait(60)
    stores = trial.read()
    commands = stores.held | stores.events.keys()
    return Sales(len(stores.sold), len(stores.sold - commands), len(commands - stores.sold))
