"""The tour: orders from a command to the next service, with everything that goes wrong on the way.

    commands ──▶ 2 billing processes ──▶ outbox ──▶ 2 relays ──▶ event log ──▶ shipping
    (stream)     transaction, inbox                             (stream)      inbox

On a private PostgreSQL and a private Redis, which are gone afterwards. Some commands and some
events come twice, and one of the billing processes is killed in the middle. At the end, both
databases and the log are counted without the help of conquiet; the exit code is 1 if anything
is missing or was done twice.

    python examples/tour.py --orders 5000
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import redis
from sqlalchemy import text

from conquiet import Message, Router, Worker, embedded, sql
from conquiet.processes import run_processes
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.sink import Sink
from conquiet.sql import schema

CHUNK = 250
SHARE_OF_DUPLICATES = 0.1
LEASE_SECONDS = 2.0
"""How long the messages of a killed process wait before another takes them over."""


class PlaceOrder(msgspec.Struct):
    id: str
    customer: str
    amount: int


class OrderPlaced(msgspec.Struct):
    id: str
    amount: int


# --- billing: commands in, money booked, events out -------------------------------------------


def make_billing(database: str, broker: str) -> Worker:
    """The worker of one billing process."""
    engine = sql.engine(database)
    router = Router()
    router.use(sql.Transaction(engine), sql.Inbox("billing"), sql.Outbox("orders"))

    @router.command(source="/billing")
    def place_order(order: PlaceOrder) -> list[OrderPlaced]:
        book(order)
        return [OrderPlaced(order.id, order.amount)]

    def book(order: PlaceOrder) -> None:
        """An adapter. The table has no key: an order that is booked twice is there twice."""
        with sql.connection(engine) as connection:
            connection.execute(
                text("INSERT INTO orders VALUES (:id, :customer, :amount)"),
                {"id": order.id, "customer": order.customer, "amount": order.amount},
            )

    client: Any = redis.Redis.from_url(broker)
    client.sadd("billing", os.getpid())
    source = StreamSource(client, "commands", group="billing", lease=LEASE_SECONDS)
    return Worker(source, router, batch_size=100)


# --- shipping: the next service ---------------------------------------------------------------


def make_shipping(database: str, broker: str) -> Worker:
    engine = sql.engine(database)
    router = Router()
    router.use(sql.Transaction(engine), sql.Inbox("shipping"))

    @router.event()
    def ship(order: OrderPlaced) -> None:
        with sql.connection(engine) as connection:
            connection.execute(
                text("INSERT INTO shipments (order_id, amount) VALUES (:id, :amount)"),
                {"id": order.id, "amount": order.amount},
            )

    source = StreamSource(redis.Redis.from_url(broker), "orders", group="shipping")
    return Worker(source, router, batch_size=100)


# --- what goes wrong --------------------------------------------------------------------------


class Stutter:
    """A sink that publishes some messages twice, as every broker does sooner or later."""

    def __init__(self, sink: Sink, dice: random.Random) -> None:
        self.repeated = 0
        self._sink = sink
        self._dice = dice

    def publish(self, messages: Sequence[Message[Any]]) -> Sequence[Exception | None]:
        twice = [m for m in messages if self._dice.random() < SHARE_OF_DUPLICATES]
        self.repeated += len(twice)
        return self._sink.publish([*messages, *twice])[: len(messages)]

    def close(self) -> None:
        self._sink.close()


def kill_one_of(pids: Sequence[int]) -> int:
    victim = min(pids)
    os.kill(victim, signal.SIGKILL)
    return victim


# --- the tour ---------------------------------------------------------------------------------


class Tour:
    """What was set up, and what the generator of the orders knows."""

    def __init__(self, billing: str, shipping: str, broker: str, orders: int, seed: int) -> None:
        self.billing, self.shipping, self.broker = billing, shipping, broker
        self.client: Any = redis.Redis.from_url(broker)
        self.orders = orders
        dice = random.Random(seed)
        self.commands = [
            PlaceOrder(f"order-{n}", f"customer-{dice.randrange(50)}", dice.randrange(100, 10_000))
            for n in range(orders)
        ]
        self.command_sink = Stutter(StreamSink(self.client, "commands"), dice)
        self.event_sinks = [
            Stutter(StreamSink(redis.Redis.from_url(broker)), random.Random(seed + n))
            for n in (1, 2)
        ]

    def prepare(self) -> None:
        with psycopg.connect(self.billing) as connection:
            connection.execute("CREATE TABLE orders (id text, customer text, amount bigint)")
        with psycopg.connect(self.shipping) as connection:
            connection.execute("CREATE TABLE shipments (order_id text, amount bigint)")
        schema.init(self.billing)
        schema.init(self.shipping)

    def run(self) -> None:
        with self._billing_processes(), self._relays(), self._shipping_worker():
            wait_for(lambda: len(self._billing_pids()) >= 2, "two billing processes")
            step(f"{self.orders:,} commands, 1 in {1 / SHARE_OF_DUPLICATES:.0f} of them twice")
            for start in range(0, self.orders, CHUNK):
                self._send(self.commands[start : start + CHUNK])
                if self.orders // 2 in range(start, start + CHUNK):
                    wait_for(lambda: self._count("orders") > 0, "the first orders")
                    victim = kill_one_of(self._billing_pids())
                    step(f"billing process {victim} killed; its work is taken over")
            limit = 60 + self.orders / 200
            wait_for(self._all_done, "every order shipped", limit, self._progress)

    def _send(self, commands: Sequence[PlaceOrder]) -> None:
        messages = [
            Message(command, {"id": command.id, "type": "place.order", "source": "/web"})
            for command in commands
        ]
        assert not any(self.command_sink.publish(messages))

    @contextmanager
    def _billing_processes(self) -> Iterator[None]:
        """A supervisor and its two children; see `--billing` in `main`."""
        command = [sys.executable, __file__, "--billing", self.billing, self.broker]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as supervisor:
            try:
                yield
            finally:
                supervisor.terminate()

    @contextmanager
    def _relays(self) -> Iterator[None]:
        relays = [Relay(sql.OutboxSource(self.billing), sink) for sink in self.event_sinks]
        threads = [threading.Thread(target=relay.run, daemon=True) for relay in relays]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for relay in relays:
                relay.stop()
            for thread in threads:
                thread.join()

    @contextmanager
    def _shipping_worker(self) -> Iterator[None]:
        worker = make_shipping(self.shipping, self.broker)
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    def _billing_pids(self) -> list[int]:
        return [int(pid) for pid in self.client.smembers("billing")]

    def _count(self, table: str) -> int:
        return int(scalar(self.shipping if table == "shipments" else self.billing, table))

    def _all_done(self) -> bool:
        """Nothing is waiting any more: neither to be handled, nor published, nor acked."""
        return (
            scalar(self.billing, "outbox WHERE published_at IS NULL") == 0
            and self._is_read("commands", "billing")
            and self._is_read("orders", "shipping")
        )

    def _is_read(self, stream: str, group: str) -> bool:
        last = self.client.xinfo_stream(stream)["last-generated-id"]
        [state] = [g for g in self.client.xinfo_groups(stream) if g["name"] == group.encode()]
        return bool(state["pending"] == 0 and state["last-delivered-id"] == last)

    def _progress(self) -> str:
        numbers = self._count("orders"), self._count("outbox"), self._count("shipments")
        return "{:,} orders, {:,} events, {:,} shipments".format(*numbers)

    # --- the verdict: by counting, without conquiet -------------------------------------------

    def verdict(self) -> bool:
        count, amount = self.orders, sum(command.amount for command in self.commands)
        ids = {command.id for command in self.commands}
        events = [fields for _, fields in self.client.xrange("orders")]
        shipped = set(column(self.shipping, "SELECT order_id FROM shipments"))
        repeated = sum(sink.repeated for sink in self.event_sinks)
        commands = self.client.xlen("commands")
        lines = [
            ("commands sent, with duplicates", count + self.command_sink.repeated, commands),
            ("orders (effects)", count, self._count("orders")),
            ("money booked", amount, scalar(self.billing, "orders", "sum(amount)")),
            ("events in the outbox", count, self._count("outbox")),
            ("events in the log, without duplicates", count, len({e[b"id"] for e in events})),
            ("shipments", count, self._count("shipments")),
            ("money shipped", amount, scalar(self.shipping, "shipments", "sum(amount)")),
            ("lost", 0, len(ids - shipped)),
        ]
        print(f"\n{'':<40}{'expected':>12}{'found':>12}")
        for name, expected, found in lines:
            print(
                f"{name:<40}{expected:>12,}{found:>12,}  {'ok' if expected == found else 'WRONG'}"
            )
        dropped = commands - self._count("orders"), len(events) - len(shipped)
        print(f"{'duplicates dropped by billing':<40}{'':>12}{dropped[0]:>12,}")
        print(f"{'duplicates dropped by shipping':<40}{'':>12}{dropped[1]:>12,}")
        return all(expected == found for _, expected, found in lines) and (
            dropped[1] >= repeated  # a relay, too, may publish twice; never less
        )


# --- small things -----------------------------------------------------------------------------

started = time.monotonic()


def step(what: str) -> None:
    print(f"{time.monotonic() - started:5.1f} s  {what}", flush=True)


def wait_for(
    condition: Callable[[], bool],
    what: str,
    limit: float = 60.0,
    progress: Callable[[], str] | None = None,
) -> None:
    end = time.monotonic() + limit
    shown = 0.0
    while not condition():
        if time.monotonic() > end:
            step(f"gave up after {limit:.0f} s: {what}")
            return
        if progress is not None and time.monotonic() - shown > 1:
            shown = time.monotonic()
            step(progress())
        time.sleep(0.05)
    step(what)


def stop_with_the_tour() -> None:
    """The pipe ends when the tour does, whatever it died of."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def column(database: str, query: str) -> list[Any]:
    with psycopg.connect(database) as connection:
        return [row[0] for row in connection.execute(query.encode()).fetchall()]


def scalar(database: str, table: str, what: str = "count(*)") -> int:
    return int(column(database, f"SELECT {what} FROM {table}")[0] or 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="One order, from the command to the next service.")
    parser.add_argument("--orders", type=int, default=5_000, metavar="N")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="of the orders and faults")
    parser.add_argument("--billing", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.billing:  # started by the tour itself
        database, broker = options.billing
        threading.Thread(target=stop_with_the_tour, daemon=True).start()
        return run_processes(make_billing, 2, arguments={"database": database, "broker": broker})
    if options.orders < 1:
        parser.error("--orders: at least 1")
    with embedded.postgres(private=True) as postgres, embedded.redis(private=True) as server:
        step("a private PostgreSQL and a private Redis run")
        databases = postgres.create_database("billing"), postgres.create_database("shipping")
        tour = Tour(*databases, server.url, options.orders, options.seed)
        tour.prepare()
        tour.run()
        is_right = tour.verdict()
    print("\nverdict: " + ("every order took effect once" if is_right else "WRONG, see above"))
    step("all servers and processes are gone")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
