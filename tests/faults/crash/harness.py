"""Every crash point of a scenario: count the calls in a clean run, then die at each of them.

    python -m tests.faults.crash.harness "worker over Redis" [--postgres URL] [--distinct|--every N]

After a call is before the next call of the same thread: no store can tell the two apart. With
`--distinct` only one of the two is run, and everything else; with `--every N` an Nth of the points.

This process has imported everything, and forks a child for each run: imports cost nothing. Each
run has stores of its own: a database of a private Redis, a schema of PostgreSQL, a directory.
First all are killed, then, when every lease has ended, all are restarted, and then judged.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.faults import invariants
from tests.faults.crash.scenario import Place, Scenario
from tests.faults.seam import Fate, Point, Seam

from conquiet import embedded

ROOM = "tests.faults.crash"
SCENARIOS = {
    "worker over PostgreSQL": "sql_paths:WorkerOverPostgres",
    "worker over SQLite": "sql_paths:WorkerOverSqlite",
    "worker over Redis": "redis_paths:WorkerOverRedis",
    "log over PostgreSQL": "sql_paths:LogOverPostgres",
    "log over SQLite": "sql_paths:LogOverSqlite",
    "log over PostgreSQL, with an inbox": "sql_paths:LogOverPostgresWithInbox",
    "log over SQLite, with an inbox": "sql_paths:LogOverSqliteWithInbox",
    "async worker over PostgreSQL, asyncpg": "sql_paths:WorkerOverAsyncpg",
    "async worker over PostgreSQL, psycopg": "sql_paths:WorkerOverAsyncPsycopg",
    "async worker over Redis": "redis_paths:AsyncWorkerOverRedis",
    "relay over PostgreSQL": "sql_paths:RelayOverPostgres",
    "relay over PostgreSQL, ordered": "sql_paths:OrderedRelayOverPostgres",
    "relay over PostgreSQL, from the log": "sql_paths:RelayFromTheLog",
    "relay over PostgreSQL, from the log without rows": "sql_paths:RelayFromTheLogWithoutRows",
    "relay over PostgreSQL, changing to the log": "sql_paths:RelayChangingToTheLog",
    "relay over SQLite": "sql_paths:RelayOverSqlite",
    "relay over Redis": "redis_paths:RelayOverRedis",
    "delayed, over PostgreSQL": "sql_paths:DelayedOverPostgres",
    "delayed, over SQLite": "sql_paths:DelayedOverSqlite",
    "delayed, over Redis": "redis_paths:DelayedOverRedis",
    "later, over PostgreSQL": "sql_paths:LaterOverPostgres",
    "later, over SQLite": "sql_paths:LaterOverSqlite",
    "later, over Redis": "redis_paths:LaterOverRedis",
    "schedule, over PostgreSQL": "sql_paths:ScheduleOverPostgres",
    "schedule, over SQLite": "sql_paths:ScheduleOverSqlite",
    "schedule, over Redis": "redis_paths:ScheduleOverRedis",
    "Kombu transport": "kombu_path:KombuTransport",
    "worker over RabbitMQ": "broker_paths:WorkerOverRabbitmq",
    "worker over Kafka": "broker_paths:WorkerOverKafka",
    "worker over Kafka, offsets in SQLite": "broker_paths:WorkerOverKafkaWithPositions",
    "worker over SQS": "broker_paths:WorkerOverSqs",
    "Spark sink, task retried": "spark_sink:SparkSink",
    "Spark sink, query restarted": "spark_sink:RestartedQuery",
}
BROKEN = {
    "delayed, over SQLite, that moves in two transactions": (
        "sql_paths:MovingTwice",
        "not moved to the outbox once",
    ),
    "worker over Redis, with an inbox that loses": (
        "redis_paths:WithTheSimpleInbox",
        "took effect 0 times",
    ),
    "worker over SQLite, without an inbox": ("sql_paths:WithoutInbox", "took effect 2 times"),
    "relay over SQLite, that marks before it publishes": (
        "sql_paths:MarkingFirst",
        "is marked as published, and is not in the log",
    ),
    "Spark sink, that does not look": ("spark_sink:Careless", "not each row once"),
}
"""What the harness has to find out, and by which words."""
CHILD_SECONDS = 60
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Processes are killed here and no machines: files need no disk."""
DATABASES = 2_000


@dataclass
class Report:
    """What was found."""

    scenario: str
    calls: int = 0
    """I/O calls of the clean run."""
    points: int = 0
    """Before and after each call, and amid it if it sends something."""
    killed: int = 0
    unreached: list[str] = field(default_factory=list)
    """Kills that did not happen in three tries, because the runs made fewer calls than the clean
    one, where it depends on the moment who sends an ack; they were judged as they were."""
    bypassed: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Run:
    """One run: where it happens, where it is to die."""

    place: Place
    fate: Fate | None = None
    label: str = ""

    @property
    def name(self) -> str:
        if self.fate is None:
            return "clean run"
        return f"{self.fate.side} {self.fate.lane} {self.fate.number} ({self.label})"


class Harness:
    """Runs a scenario, again and again."""

    def __init__(self, scenario: Scenario, redis_port: int, postgres: str, folder: Path) -> None:
        self.scenario = scenario
        self.report = Report(scenario.name)
        self._redis_port = redis_port
        self._postgres = postgres
        self._folder = folder
        self._runs = 0

    def all_points(self, jobs: int, distinct: bool, every: int) -> Report:
        began = time.monotonic()
        gc.freeze()  # or a child's first collection copies all that it shares with us
        points = self._clean_run()
        if self.scenario.warms_up:
            points = self._clean_run()
        last = {point.lane: point.number for point in points}
        runs = [
            Run(self._place(), Fate(point.lane, point.number, side), point.label)
            for point in points
            for side in point.sides
            if side != "after" or not distinct or last[point.lane] == point.number
        ][::every]
        self.report.points = len(runs)
        runs += self._killed(runs, jobs)
        time.sleep(self.scenario.lease)
        for run, status in self._in_children([Run(r.place, None, r.name) for r in runs], jobs, 2):
            if status:
                self._wrong(run.label, f"the restart ended with {status}: {_last_words(run)}")
        for run in runs:
            self._judge(run)
        self._look_for_sessions()
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def _killed(self, runs: list[Run], jobs: int, tries: int = 3) -> list[Run]:
        """Kill each run; what made fewer calls this time is tried again, and given back."""
        for run in runs:
            self.scenario.prepare(run.place)
        missed = []
        for run, status in self._in_children(runs, jobs, 1):
            if status == -signal.SIGKILL:
                self.report.killed += 1
            elif status == 0:
                missed.append(Run(self._place(), run.fate, run.label))
            else:
                self._wrong(run.name, f"ended with {status}: {_last_words(run)}")
        if not missed or tries == 1:
            self.report.unreached = [run.name for run in missed]
            return []
        return missed + self._killed(missed, jobs, tries - 1)

    def _clean_run(self) -> list[Point]:
        run = Run(self._place())
        self.scenario.prepare(run.place)
        [(_, status)] = self._in_children([run], 1, 1)
        if status:
            raise SystemExit(f"the clean run ended with {status}: {_last_words(run)}")
        told = json.loads((run.place.folder / "seam.json").read_text())
        self.report.bypassed = told["bypassed"]
        points = [Point(**point) for point in told["points"]]
        self.report.calls = len(points)
        self.report.labels = [f"{p.lane} {p.number}: {p.label}" for p in points]
        self._judge(run)
        return points

    def _judge(self, run: Run) -> None:
        try:
            for violation in invariants.violations(self.scenario.facts(run.place)):
                self._wrong(run.name, violation)
        except Exception as error:
            self._wrong(run.name, f"its stores cannot be read: {error!r}")

    def _look_for_sessions(self) -> None:
        if self.scenario.needs_postgres:
            import psycopg

            with psycopg.connect(self._postgres) as connection:
                for session in invariants.sessions_left(connection):
                    self._wrong("all", f"{session} is left")

    def _wrong(self, where: str, what: str) -> None:
        self.report.violations.append(f"{where}: {what}")

    def _place(self) -> Place:
        number = self._runs
        self._runs += 1
        folder = self._folder / str(number)
        folder.mkdir()
        separator = "&" if "?" in self._postgres else "?"
        options = quote(f"-csearch_path=run_{number}", safe="")
        return Place(
            f"redis://127.0.0.1:{self._redis_port}/{number}",
            f"{self._postgres}{separator}options={options}",
            folder,
        )

    def _in_children(
        self, runs: Iterable[Run], jobs: int, attempt: int
    ) -> Iterator[tuple[Run, int]]:
        """Each run in a child, some at a time; gives how it ended, negative if by a signal."""
        waiting, running = list(reversed(list(runs))), dict[int, Run]()
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop()
                running[_fork(lambda run=run: self._live(run, attempt))] = run
            pid, status = os.wait()
            yield running.pop(pid), os.waitstatus_to_exitcode(status)

    def _live(self, run: Run, attempt: int) -> None:
        """The life of a child."""
        signal.alarm(CHILD_SECONDS)
        words = os.open(run.place.folder / "words", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(words, stream)
        seam = Seam(run.fate)
        if attempt == 1:
            seam.install()
        self.scenario.run(run.place, seam, attempt)
        points = [asdict(point) for point in seam.points]
        is_audited = run.fate is None and self.scenario.is_audited
        told = {"points": points, "bypassed": seam.audit() if is_audited else []}
        (run.place.folder / "seam.json").write_text(json.dumps(told))


def _fork(live: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        live()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # no finalizers of what belongs to the parent


def _last_words(run: Run) -> str:
    path = run.place.folder / "words"
    return path.read_text(errors="replace")[-1500:] if path.exists() else ""


def scenario_of(name: str) -> Scenario:
    path = SCENARIOS[name] if name in SCENARIOS else BROKEN[name][0]
    module, _, kind = path.partition(":")
    made: Any = getattr(importlib.import_module(f"{ROOM}.{module}"), kind)
    return made()


def crash_everywhere(
    name: str, postgres: str, jobs: int, distinct: bool = False, every: int = 1
) -> Report:
    scenario = scenario_of(name)
    options = ("--databases", str(DATABASES))
    with (
        tempfile.TemporaryDirectory(prefix="conquiet-crash-", dir=_MEMORY) as folder,
        embedded.redis(options=options, private=True) as server,
        scenario.serve(),
    ):
        harness = Harness(scenario, server.port, postgres, Path(folder))
        return harness.all_points(jobs, distinct, every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=[*SCENARIOS, *BROKEN])
    parser.add_argument("--postgres", default="", help="the URL of an empty database")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--labels", action="store_true", help="list the calls of the clean run")
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    report = crash_everywhere(
        given.scenario, given.postgres, given.jobs, given.distinct, given.every
    )
    if given.json:
        print(json.dumps(asdict(report)))
        return 0
    if given.labels:
        print("\n".join(report.labels))
    print(
        f"{report.scenario}: {report.calls} calls, {report.points} crash points,"
        f" {report.killed} kills, {len(report.unreached)} not reached,"
        f" {len(report.violations)} violations, {report.seconds} s"
    )
    for what in (*report.bypassed, *report.unreached, *report.violations):
        print(f"  {what}")
    return 1 if report.violations or report.bypassed else 0


if __name__ == "__main__":
    sys.exit(main())
