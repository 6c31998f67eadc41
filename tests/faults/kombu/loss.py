"""How many messages are lost when a busy consumer is killed again and again.

    python -m tests.faults.kombu.loss --messages 12000 --kills 60

Runs Kombu's list transport and ours after each other, each on a Redis of its own with an AOF that
is synced at every write, and kills that Redis too, in the middle.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kombu import Producer
from tests import zygote
from tests.faults.kombu.consumer import QUEUE, connect

from conquiet import embedded

ROOT = Path(__file__).resolve().parents[3]
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
LEASE = 2.0
# Kombu's lists look for what was not acked every ten seconds.
PATIENCE_SECONDS = {"redis": 40.0, "redis-streams": 20.0}


@dataclass(frozen=True)
class Loss:
    """What became of the messages."""

    messages: int
    kills: int
    lost: int
    duplicates: int
    seconds: float


class Record:
    """The file in which consumers note what they handle."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def count(self) -> int:
        return self.path.read_bytes().count(b"\n")

    def numbers(self) -> list[int]:
        # A kill in the middle of a write leaves at most the beginning of the last line.
        return [int(line) for line in self.path.read_text().splitlines()]


@contextmanager
def consuming(url: str, record: Record) -> Iterator[subprocess.Popen[bytes]]:
    """A consumer in a process of its own, killed at the end."""
    command = [sys.executable, "-m", "tests.faults.kombu.consumer", url, str(record.path)]
    log = record.path.with_suffix(".log").open("ab")
    with log, zygote.Popen([*command, str(LEASE)], cwd=ROOT, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()


def publish(url: str, messages: int) -> None:
    with connect(url, LEASE) as connection, connection.channel() as channel:
        producer = Producer(channel, serializer="json")
        QUEUE(channel).declare()
        for number in range(messages):
            producer.publish(number, routing_key=QUEUE.name)


def measure(
    scheme: str, server: embedded.RedisServer, directory: Path, *, messages: int, kills: int
) -> Loss:
    """Kill consumers while they are busy, and the server once; then wait for what is left."""
    start = time.monotonic()
    url = server.url.replace("redis://", f"{scheme}://", 1)
    publish(url, messages)
    record = Record(directory / f"{scheme}.txt")
    dice = random.Random(kills)
    part = messages // (kills + 1)
    for kill in range(kills):
        with consuming(url, record):
            if kill == kills // 2:
                until_busy(record, part // 4)
                server.kill()
                server.restart()
            until_busy(record, dice.randint(part // 4, part // 2))
    with consuming(url, record):
        until_done(record, messages, PATIENCE_SECONDS[scheme])
    numbers = record.numbers()
    lost = messages - len(set(numbers))
    return Loss(messages, kills, lost, len(numbers) - len(set(numbers)), time.monotonic() - start)


def until_busy(record: Record, more: int, patience: float = 60.0) -> None:
    """Until so many more messages were handled."""
    goal = record.count() + more
    deadline = time.monotonic() + patience
    while record.count() < goal:
        if time.monotonic() > deadline:
            log = record.path.with_suffix(".log").read_text()
            raise TimeoutError(f"no consumer handles messages:\n{log[-3000:]}")
        time.sleep(0.001)


def until_done(record: Record, messages: int, patience: float) -> None:
    """Until all were handled, or none came for as long as one could still come back."""
    seen, since = -1, time.monotonic()
    while len(set(record.numbers())) < messages and time.monotonic() - since < patience:
        if record.count() != seen:
            seen, since = record.count(), time.monotonic()
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=12_000)
    parser.add_argument("--kills", type=int, default=60)
    given = parser.parse_args()
    print(f"{'transport':14} {'messages':>9} {'kills':>6} {'lost':>6} {'twice':>6} {'seconds':>8}")
    for scheme in ("redis", "redis-streams"):
        with (
            tempfile.TemporaryDirectory() as directory,
            embedded.redis(options=DURABLE, private=True) as server,
        ):
            found = measure(
                scheme, server, Path(directory), messages=given.messages, kills=given.kills
            )
        print(
            f"{scheme:14} {found.messages:>9,} {found.kills:>6} {found.lost:>6}"
            f" {found.duplicates:>6} {found.seconds:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
