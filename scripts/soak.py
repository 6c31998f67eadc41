"""The soak: worker → outbox → relay → log → consumer under random faults, judged at the end.

    make soak MINUTES=30              kills every few seconds, and every fault of the world
    make soak MESSAGES=1000000        as many messages as fast as they go, with kills alone

With --trace FILE consumers and relays record their steps, which tests/models/trace.py replays.

Writes a report, soak.md and soak.json, into --folder; exits with 1 if an invariant was violated.
The same --seed injects the same faults, though not at the same moments of the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import psycopg
import redis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.invariants import violations
from tests.faults.world.faults import FAULTS, a_process_is_killed, named
from tests.faults.world.service import LEASE
from tests.faults.world.stack import ROLES, VICTIMS, World
from tests.models.trace import replay_trace

DRAIN_SECONDS = 600.0
STOP_AFTER_FAULTS = 5.0
"""Faults end this long before the time does, so that the last one is recovered from."""


@dataclass
class Injected:
    """One fault."""

    second: float
    fault: str
    about: str
    seconds: float


@dataclass
class Soak:
    """What the report says."""

    seed: int
    minutes: float | None
    messages: int | None
    cores: int = os.cpu_count() or 0
    versions: dict[str, str] = field(default_factory=dict)
    commands: int = 0
    hopeless: int = 0
    effects: int = 0
    events: int = 0
    entries: int = 0
    """Of the log; more than events where some were published twice."""
    consumed: int = 0
    sent_seconds: float = 0.0
    seconds: float = 0.0
    """From the first command to the last effect of a consumer."""
    kills: int = 0
    recovery: dict[str, list[float]] = field(default_factory=dict)
    ended: dict[str, list[int]] = field(default_factory=dict)
    """Exit codes of processes that ended by themselves, and were started again."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    files: dict[str, list[float]] = field(default_factory=dict)
    faults: list[Injected] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    replayed: dict[str, int] = field(default_factory=dict)
    """Steps of the trace that the models allow, by kind."""

    @property
    def rate(self) -> float:
        return self.commands / self.seconds if self.seconds else 0.0


def inject(world: World, soak: Soak, given: argparse.Namespace) -> None:
    """Faults, until the time is over or everything is sent."""
    dice = random.Random(given.seed)
    began = time.monotonic()
    end = began + given.minutes * 60 - STOP_AFTER_FAULTS if given.minutes else float("inf")
    while time.monotonic() < end and not world.sender.is_done:
        time.sleep(dice.uniform(0.5, 1.5) * given.every)
        kills = given.kills_only or dice.random() < 0.5
        fault = a_process_is_killed if kills else dice.choice(FAULTS)
        at = time.monotonic()
        try:
            about = fault(world, dice)
        except (redis.RedisError, psycopg.Error) as error:
            about = f"cut short: {error!r:.200}"
        world.revive()
        soak.faults.append(
            Injected(round(at - began, 1), named(fault), about, round(time.monotonic() - at, 1))
        )
        print(f"{at - began:8.1f} s  {world.sender.sent:>9,} sent  {named(fault)} {about}")
    while time.monotonic() < end + STOP_AFTER_FAULTS and not world.sender.is_done:
        time.sleep(0.1)
    world.sender.stop()


def run(given: argparse.Namespace, folder: Path) -> Soak:
    soak = Soak(given.seed, given.minutes, given.messages)
    began = time.monotonic()
    proxied = not given.kills_only
    about = {"rate": given.rate, "messages": given.messages, "trace": given.trace}
    world = World(folder, proxied=proxied, read_from=given.read_from, **about)
    with world:
        soak.versions = _versions(world)
        inject(world, soak, given)
        soak.sent_seconds = round(time.monotonic() - began, 1)
        left = world.drain(given.drain)
        soak.seconds = round(time.monotonic() - began, 1)
        soak.violations += [f"not drained after {given.drain:.0f} s: {name}" for name in left[:20]]
        soak.violations += world.stop()
        print("judging …")
        judge(world, soak)
    if given.trace is not None:
        soak.replayed = replay_trace(given.trace, LEASE)
        print(f"replayed {sum(soak.replayed.values()):,} steps through the models")
    return soak


def judge(world: World, soak: Soak) -> None:
    facts = world.facts()
    soak.violations += violations(facts)
    soak.violations += world.growing() + world.ended()
    soak.commands, soak.hopeless = len(facts.accepted), len(facts.hopeless)
    soak.effects = sum((facts.effects or {}).values())
    soak.events, soak.entries = len(facts.rows), len(facts.log or ())
    soak.consumed = sum((facts.consumed or {}).values())
    for role in ROLES:
        process = world.processes[role]
        soak.memory[role] = process.memory
        soak.files[role] = process.files
        if process.ended:
            soak.ended[role] = process.ended
        if role in VICTIMS:
            soak.recovery[role] = [round(seconds, 2) for seconds in process.recoveries]
    soak.kills = sum(fault.fault == named(a_process_is_killed) for fault in soak.faults)
    soak.kills += sum(fault.about.count(named(a_process_is_killed)) for fault in soak.faults)


def _versions(world: World) -> dict[str, str]:
    with psycopg.connect(world.postgres.url) as connection:
        postgres = connection.info.parameter_status("server_version") or ""
    with world.client() as client:
        about = client.info("server")
        server = about.get("valkey_version") or about["redis_version"]
    return {
        "Python": platform.python_version(),
        "PostgreSQL": postgres.split()[0],
        str(about.get("server_name", "Redis")).capitalize(): server,
        **{name: version(name) for name in ("conquiet", "redis", "psycopg", "sqlalchemy")},
    }


# --- the report ---------------------------------------------------------------------------------


def write(soak: Soak, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_text(json.dumps(asdict(soak), indent=1))
    (folder / "soak.md").write_text("\n".join(_lines(soak)) + "\n")
    return folder / "soak.md"


def _lines(soak: Soak) -> list[str]:
    verdict = f"**{len(soak.violations)} violations**" if soak.violations else "**no violation**"
    lines = [
        "# Soak",
        "",
        f"{verdict}. Seed {soak.seed}, {soak.cores} cores;"
        f" {', '.join(f'{name} {number}' for name, number in soak.versions.items())}.",
        "",
        *_table(
            ("", ""),
            [
                ("commands accepted", f"{soak.commands:,}"),
                ("of them poison, rolled back", f"{soak.hopeless:,}"),
                ("effects", f"{soak.effects:,}"),
                ("events in the outbox", f"{soak.events:,}"),
                (
                    "entries of the log",
                    f"{soak.entries:,}, {soak.entries - soak.events:,} repeated",
                ),
                ("effects of the consumer", f"{soak.consumed:,}"),
                ("seconds", f"{soak.seconds:,.0f}, {soak.sent_seconds:,.0f} until all were sent"),
                ("rate", f"{soak.rate:,.0f} commands a second, end to end"),
                ("kills of processes", f"{soak.kills:,}"),
                ("faults", f"{len(soak.faults):,}"),
            ],
        ),
    ]
    if soak.violations:
        lines += ["", "## Violations", "", *(f"- {what}" for what in soak.violations[:100])]
    lines += ["", "## Recovery after a kill", "", *_recovery(soak)]
    lines += ["", "## Memory and open files", "", *_growth(soak)]
    if soak.ended:
        lines += ["", "Ended by themselves, and started again (exit codes):", ""]
        lines += [f"- {role}: {codes}" for role, codes in soak.ended.items()]
    lines += ["", "## Faults", ""]
    lines += _table(
        ("second", "fault", "", "lasted"),
        [(f"{f.second:.1f}", f.fault, f.about, f"{f.seconds:.1f} s") for f in soak.faults],
    )
    return lines


def _recovery(soak: Soak) -> list[str]:
    rows = []
    for role, times in soak.recovery.items():
        if times:
            middle, most = statistics.median(times), max(times)
            rows.append((role, str(len(times)), f"{middle:.2f} s", f"{most:.2f} s"))
    lines = _table(("process", "kills", "median", "longest"), rows)
    return [*lines, "", "From the kill to the first message that the next process has handled."]


def _growth(soak: Soak) -> list[str]:
    rows = []
    for role in ROLES:
        if role in VICTIMS or not soak.memory[role]:
            continue
        memory, files = soak.memory[role], soak.files[role]
        third = max(1, len(memory) // 3)
        rows.append(
            (
                role,
                f"{statistics.median(memory[third:-third] or memory):.0f} MB",
                f"{statistics.median(memory[-third:]):.0f} MB",
                f"{statistics.median(files[third:-third] or files):.0f}",
                f"{statistics.median(files[-third:]):.0f}",
            )
        )
    names = ("never killed", "memory, second third", "last third", "files, second third", "last")
    return _table(names, rows)


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names), *body]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="how long; 30 unless --messages is given")
    parser.add_argument("--messages", type=int, help="how many, instead of for how long")
    parser.add_argument("--rate", type=float, default=None, help="commands a second; 0: no limit")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between faults, about")
    parser.add_argument("--kills-only", action="store_true", help="no proxies, no other faults")
    parser.add_argument(
        "--trace", type=Path, help="record the steps of consumers and relays; implies --kills-only"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--drain", type=float, default=DRAIN_SECONDS)
    parser.add_argument(
        "--from", dest="read_from", choices=("claim", "wal"), default="claim", help="as of a relay"
    )
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    given = parser.parse_args()
    if given.minutes is None and given.messages is None:
        given.minutes = 30.0
    if given.messages is not None or given.trace is not None:
        given.kills_only = True  # of faults, the models that a trace is replayed in know kills
    if given.rate is None:
        given.rate = 0.0 if given.messages is not None else 300.0
    print(f"seed {given.seed}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and mounts go with us
    folder = Path(tempfile.mkdtemp(prefix="conquiet-soak-"))
    try:
        folder.chmod(0o755)  # PostgreSQL is no root
        soak = run(given, folder)
        for log in folder.glob("*.log"):
            given.folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, given.folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    path = write(soak, given.folder)
    print("\n".join(_lines(soak)[:24]))
    print(f"\nreport: {path}")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
