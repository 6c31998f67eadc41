"""Other libraries and conquiet under the same kills: what each lost, into docs/reliability.md.

    make peers                                 all of them, a few minutes
    python scripts/peers.py --only taskiq      those with that in their name; changes no page

Each is installed, once, into a virtual environment of its own, .venv-peer-NAME-VERSION.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psycopg
import redis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.collect import with_section
from tests.faults.peers import trial
from tests.faults.peers.catalogue import PEERS, SELLERS, Peer
from tests.faults.peers.trial import Outcome, Sales, Trial

from conquiet import embedded

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
# The servers are not killed here: they need not survive it, and leave the disk to others.
FORGETFUL = ("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off")


class Ground:
    """A Redis and a PostgreSQL for all trials, one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.redis = embedded.redis(private=True)
        self.postgres = embedded.postgres(private=True, options=FORGETFUL)

    @contextmanager
    def trial(self, peer: Peer) -> Iterator[Trial]:
        database = self.postgres.create_database()
        tried = Trial(peer, self.redis, database, self._folder / f"{time.time_ns()}.log")
        try:
            yield tried
        finally:
            tried.close()
            self.postgres.drop_database(database)

    def versions(self) -> str:
        with psycopg.connect(self.postgres.url) as found:
            postgres = (found.info.parameter_status("server_version") or "").split()[0]
        with redis.Redis.from_url(self.redis.url) as client:
            about = client.info("server")
        server = str(about.get("server_name", "Redis")).capitalize()
        number = about.get("valkey_version") or about["redis_version"]
        return f"Python {platform.python_version()}, PostgreSQL {postgres}, {server} {number}"


def versions(peers: Iterable[Peer]) -> dict[str, str]:
    """By name, of what each environment has."""
    found: dict[str, str] = {}
    for peer in peers:
        code = "import sys; from importlib.metadata import version\n"
        code += "print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep=', ')"
        command = [str(peer.python()), "-c", code, *peer.versions]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        found.setdefault(peer.name.split(",")[0], answer.stdout.strip())
    return found


# --- the tables ---------------------------------------------------------------------------------


def _table(names: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    marks = ["---"] * 2 + ["---:"] * (len(names) - 2)
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join(marks)}|"]
    return lines + [f"| {' | '.join(map(_text, row))} |" for row in rows]


def _text(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def consumers_table(found: list[tuple[Peer, Outcome]]) -> list[str]:
    names = (
        *("consumer", "settings", "once", "repeated", "held", "lost", "effects without event"),
        *("events without effect", "events repeated", "drain"),
    )
    rows = [
        (
            *(peer.name, peer.settings, of.once, of.repeated, of.held, of.lost, of.silent),
            *(of.unfounded, of.events_repeated, f"{of.drain_seconds:.0f} s"),
        )
        for peer, of in found
    ]
    return _table(names, rows)


def returns_table(found: list[tuple[Peer, Outcome]]) -> list[str]:
    lines = [
        "| consumer | settings | what a killed process had comes back after |",
        "|---|---|---|",
    ]
    return lines + [f"| {p.name} | {p.settings} | {p.returns} |" for p, _ in found]


def sellers_table(found: list[tuple[Peer, Sales]]) -> list[str]:
    names = ("sender", "how", "rows", "rows without command", "commands without row")
    rows = [
        (peer.name, peer.settings, of.rows, of.rows_alone, of.commands_alone) for peer, of in found
    ]
    return _table(names, rows)


def report(
    ground: Ground,
    given: argparse.Namespace,
    consumers: list[tuple[Peer, Outcome]],
    sellers: list[tuple[Peer, Sales]],
) -> str:
    about = "; ".join(f"{name}: {has}" for name, has in versions(p for p, _ in consumers).items())
    load = os.getloadavg()[2]
    return "\n".join(
        [
            f"`python scripts/peers.py --commands {given.commands} --kills {given.kills}"
            f" --sale-kills {given.sale_kills} --seed {given.seed}` · {time.strftime('%Y-%m-%d')},"
            f" {os.cpu_count()} cores (load {load:.0f}), {ground.versions()}. {about}.",
            "",
            *consumers_table(consumers),
            "",
            *returns_table(consumers),
            "",
            *sellers_table(sellers),
        ]
    )


def try_consumers(ground: Ground, given: argparse.Namespace) -> Iterator[tuple[Peer, Outcome]]:
    for peer in chosen(PEERS, given.only):
        began = time.monotonic()
        with ground.trial(peer) as tried:
            outcome = trial.consume(
                tried, commands=given.commands, kills=given.kills, seed=given.seed
            )
        print(f"{time.monotonic() - began:4.0f} s  {peer.name}: {outcome}", flush=True)
        yield peer, outcome


def try_sellers(ground: Ground, given: argparse.Namespace) -> Iterator[tuple[Peer, Sales]]:
    for peer in chosen(SELLERS, given.only):
        with ground.trial(peer) as tried:
            sales = trial.sell(tried, kills=given.sale_kills, seed=given.seed)
        print(f"{peer.name}: {sales}", flush=True)
        yield peer, sales


def chosen(peers: Iterable[Peer], words: list[str]) -> list[Peer]:
    return [peer for peer in peers if not words or any(word in peer.name for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", type=int, default=5_000, help="to each consumer")
    parser.add_argument("--kills", type=int, default=10, help="of each consumer")
    parser.add_argument("--sale-kills", type=int, default=20, help="of each sender")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="a part of a peer's name")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started goes with us
    for peer in chosen(PEERS, given.only):
        peer.python()  # installed before the first is measured
    with tempfile.TemporaryDirectory(prefix="conquiet-peers-") as folder:
        ground = Ground(Path(folder))
        with ground.redis, ground.postgres:
            consumers = list(try_consumers(ground, given))
            sellers = list(try_sellers(ground, given))
            text = report(ground, given, consumers, sellers)
    print(text)
    if given.json:
        figures = [[peer._asdict(), asdict(found)] for peer, found in (*consumers, *sellers)]
        given.json.write_text(json.dumps(figures, indent=1))
    if not given.only:
        PAGE.write_text(with_section(PAGE.read_text(), "peers", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
