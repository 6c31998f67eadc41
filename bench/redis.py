"""Exactly-once on Redis against hand-written pipelines; a no-op against other libraries.

python bench/redis.py [--quick] [--json FILE] [--no-peers]

exactly once   read, inbox, one HSET by the handler, one event into the outbox, ack. By hand: the
               same effects by redis-py's pipelines, with the lossy SET NX of the seed in two round
               trips, or with the guarantee of ours, WATCH, for which its pipelines need four.
no-op          what other libraries consume of a stream per second, with a handler that does
               nothing. They live in a virtual environment of their own, `.venv-peers`, which this
               script makes; with --quick they take part only if it exists.

Messages have 300 bytes of JSON. Source and sink alone are in bench/redis_streams.py.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import json
import statistics
import subprocess
import uuid
import venv
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import redis

from bench.harness import Case, Options, arguments, compare, measure, report
from conquiet import Message, Router, Worker, embedded
from conquiet.redis import Inbox, Outbox, StreamSink, StreamSource, Transaction, commands

HERE = Path(__file__).parent
PEERS_HOME = HERE.parent / ".venv-peers"
PEERS: dict[str, tuple[str, int, list[str]]] = {
    "FastStream, batches of 100": ("faststream_peer.py", 20_000, ["batch"]),
    "FastStream, one by one": ("faststream_peer.py", 3_000, ["single"]),
    "taskiq-redis": ("taskiq_peer.py", 2_000, []),
    "streaq": ("streaq_peer.py", 2_000, []),
}
"""What to run, and how many messages are enough to tell its rate."""
PEER_PACKAGES = ("faststream[redis]", "taskiq-redis", "streaq")
PEER_SECONDS = 120

DATA = json.dumps({"order": 1234567, "customer": "customer-17", "text": "x" * 240}).encode()
LEASE_MS, RETENTION_MS = 30_000, 600_000
STREAM, OUTBOX = "commands", "outbox"


class PlaceOrder(msgspec.Struct):
    order: int
    customer: str
    text: str


class OrderPlaced(msgspec.Struct):
    order: int
    customer: str


def attributes(number: int) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"018f3a4e-7c1b-7000-8000-{number:012d}",
        "type": "place.order",
        "source": "/shop",
        "subject": f"order-{number}",
        "time": "2026-01-31T12:00:00.000000Z",
        "datacontenttype": "application/json",
    }


class ExactlyOnce:
    """One stream, filled once; every run reads it by a new group, under a new name."""

    def __init__(self, client: redis.Redis, messages: int) -> None:
        self.client: Any = client
        self.messages = messages
        self._names = (f"service-{number}" for number in count())
        sink = StreamSink(client, STREAM)
        for start in range(0, messages, 1_000):
            numbers = range(start, min(messages, start + 1_000))
            sink.publish([Message(DATA, attributes(n)) for n in numbers])

    # --- ours -------------------------------------------------------------------------------

    def router(self, name: str, seen: Callable[[], None]) -> Router:
        client = self.client
        router = Router()
        router.use(Transaction(client), Inbox(name), Outbox("orders", OUTBOX))

        @router.command(source="/orders")
        def place_order(order: PlaceOrder) -> list[OrderPlaced]:
            seen()
            commands(client).hset(f"order:{order.order}", "status", "placed")
            return [OrderPlaced(order.order, order.customer)]

        return router

    def by_router(self, batch: int, messages: int) -> None:
        self.client.delete(OUTBOX)
        name = next(self._names)
        router = self.router(name, lambda: None)
        source = StreamSource(self.client, STREAM, name)
        done = 0
        while done < messages:
            done += len(router.process(source.read(batch, 1.0)))
        source.close()

    def by_worker(self, batch: int, messages: int) -> None:
        self.client.delete(OUTBOX)
        name = next(self._names)
        left = messages

        def seen() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                worker.stop()

        worker = Worker(
            StreamSource(self.client, STREAM, name), self.router(name, seen), batch_size=batch
        )
        worker.run()

    # --- by hand ----------------------------------------------------------------------------

    def _read(self, name: str, batch: int, messages: int) -> Iterator[list[tuple[bytes, Any]]]:
        self.client.delete(OUTBOX)
        self.client.xgroup_create(STREAM, name, "0")
        done = 0
        while done < messages:
            reply = self.client.execute_command(
                "XREADGROUP", "GROUP", name, "c", "COUNT", batch, "STREAMS", STREAM, ">"
            )
            [(_, entries)] = reply.items() if isinstance(reply, dict) else reply
            entries = entries[0] if isinstance(reply, dict) else entries
            done += len(entries)
            yield entries

    def by_setnx(self, batch: int, messages: int) -> None:
        """SET NX for all, then everything in one EXEC: loses what crashes in between."""
        name = next(self._names)
        decode = msgspec.json.Decoder(PlaceOrder).decode
        for entries in self._read(name, batch, messages):
            keys = [f"inbox:{name}:{fields[b'id'].decode()}" for _, fields in entries]
            claims = self.client.pipeline(transaction=False)
            for key in keys:
                claims.set(key, "1", nx=True, px=RETENTION_MS)
            fresh = claims.execute()
            effects = self.client.pipeline(transaction=True)
            for (_, fields), is_new in zip(entries, fresh, strict=True):
                if is_new:
                    self._effect(effects, decode(fields[b"data"]))
            effects.xack(STREAM, name, *[entry_id for entry_id, _ in entries])
            effects.execute()

    def by_watch(self, batch: int, messages: int) -> None:
        """A lease, fenced by WATCH, and done in the same EXEC: the guarantee of ours."""
        name = next(self._names)
        decode = msgspec.json.Decoder(PlaceOrder).decode
        for entries in self._read(name, batch, messages):
            keys = [f"inbox:{name}:{fields[b'id'].decode()}" for _, fields in entries]
            token = uuid.uuid4().hex
            lease = self.client.pipeline(transaction=False)
            for key in keys:
                lease.set(key, token, nx=True, px=LEASE_MS)
            lease.execute()
            with self.client.pipeline(transaction=True) as effects:
                effects.watch(*keys)
                states = effects.mget(keys)
                effects.multi()
                for (_, fields), key, state in zip(entries, keys, states, strict=True):
                    if state == token.encode():
                        self._effect(effects, decode(fields[b"data"]))
                        effects.set(key, "done", px=RETENTION_MS)
                effects.xack(STREAM, name, *[entry_id for entry_id, _ in entries])
                effects.execute()

    def _effect(self, pipe: Any, order: PlaceOrder) -> None:
        pipe.hset(f"order:{order.order}", "status", "placed")
        event = {
            "specversion": "1.0",
            "id": str(uuid.uuid4()),
            "type": "order.placed",
            "source": "/orders",
            "time": datetime.now(UTC).isoformat(),
            "datacontenttype": "application/json",
            "data": msgspec.json.encode(OrderPlaced(order.order, order.customer)),
        }
        pipe.xadd(OUTBOX, {":topic": "orders", **event})


def exactly_once(client: redis.Redis, options: Options) -> Iterator[Case]:
    total, rounds = (4_000, 5) if options.quick else (20_000, 7)
    bench = ExactlyOnce(client, total)
    for batch, messages in ((1, total // 10), (200, total)):
        seconds = measure(
            {
                "router": lambda: bench.by_router(batch, messages),  # noqa: B023 - run at once
                "worker": lambda: bench.by_worker(batch, messages),  # noqa: B023
                "SET NX by hand": lambda: bench.by_setnx(batch, messages),  # noqa: B023
                "WATCH by hand": lambda: bench.by_watch(batch, messages),  # noqa: B023
            },
            rounds=rounds,
        )
        for ours in ("router", "worker"):
            for floor in ("SET NX by hand", "WATCH by hand"):
                yield compare(f"exactly once, {ours}", messages, seconds, ours, floor, batch=batch)


# --- other libraries ------------------------------------------------------------------------


def no_op(client: redis.Redis, url: str, options: Options) -> Iterator[Case]:
    """The same messages and a handler that does nothing, each library in its own process."""
    python = peers_python(make=not options.quick)
    if python is None:
        return
    messages, rounds = (4_000, 1) if options.quick else (20_000, 3)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in PEERS}
    for _ in range(rounds):
        seconds = measure({"worker": lambda: by_worker(client, messages)}, rounds=1)
        ours.append(messages / seconds["worker"].median)
        for name, peer in PEERS.items():
            rate = run_peer(python, url, *peer)
            if rate is not None:
                theirs[name].append(rate)
    rate = statistics.median(ours)
    for name, rates in theirs.items():
        if rates:
            other = statistics.median(rates)
            yield Case(
                name="no-op, worker",
                rate=rate,
                floor=name,
                floor_rate=other,
                ratio=rate / other,
                settings={"batch": 100},
            )


def by_worker(client: redis.Redis, messages: int) -> None:
    router = Router()
    left = messages

    @router.event()
    def place_order(order: PlaceOrder) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            worker.stop()

    worker = Worker(StreamSource(client, STREAM, uuid.uuid4().hex), router, batch_size=100)
    worker.run()


def run_peer(
    python: Path, url: str, script: str, messages: int, options: list[str]
) -> float | None:
    """Messages per second, or None if it failed."""
    command = [str(python), str(HERE / "peers" / script), url, str(messages), *options]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS)
        return messages / float(ended.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        print(f"{script} failed and is left out: {error}", file=sys.stderr)
        return None


def peers_python(*, make: bool) -> Path | None:
    """The interpreter that has the other libraries; made if need be."""
    python = PEERS_HOME / "bin" / "python"
    marker = PEERS_HOME / "complete"
    if marker.exists():
        return python
    if not make:
        print("no other libraries: run without --quick once to install them", file=sys.stderr)
        return None
    print(f"installing {', '.join(PEER_PACKAGES)} into {PEERS_HOME.name}", file=sys.stderr)
    venv.create(PEERS_HOME, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
    if subprocess.run(install).returncode != 0:
        print("they cannot be installed and are left out", file=sys.stderr)
        return None
    marker.touch()
    return python


def main() -> None:
    has_peers = "--no-peers" not in sys.argv
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--no-peers"]
    options = arguments(__doc__)
    with (
        embedded.redis(private=True) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        cases = list(exactly_once(client, options))
        if has_peers:
            cases += no_op(client, server.url, options)
    report(cases, options)


if __name__ == "__main__":
    main()
