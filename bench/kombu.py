"""Kombu: our transport over Redis Streams beside Kombu's own over lists, in one run.

python bench/kombu.py [--quick] [--json FILE]

publish        one by one, and in batches (Kombu 5.7) of 100.
consume        receive and ack, with room for 1, 10 and 100 unacked messages: through drain_events,
               as a program of its own does, and through the event loop, as Celery does; and there
               with acks that Redis has confirmed when they return.
fanout         one message published, five queues that get it.
idle           what Redis computes for 80 idle Celery workers: each reads tasks, control commands
               and the heartbeats of all, and sends one every 2 seconds.
memory         what Redis holds for a message that is ready, and for one that is not yet acked.

Messages have 300 bytes of JSON. Both transports have a server of their own.
"""

from __future__ import annotations

import sys

sys.path[0] = sys.path[0].removesuffix("/bench")  # see bench/__init__.py

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import redis
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.asynchronous import Hub

import conquiet.kombu  # noqa: F401 - registers redis-streams
from bench.harness import Case, Seconds, arguments, compare, report
from conquiet import embedded

BODY = {"order": 1234567, "customer": "customer-17", "text": "x" * 240}
QUEUE = Queue("bench", durable=False)
FANOUT = 5
BATCH = 100
LISTS, STREAMS = "lists", "streams"
SCHEMES = {LISTS: "redis", STREAMS: "redis-streams"}


class Size(NamedTuple):
    """How much is measured."""

    messages: int
    rounds: int


class Transport:
    """One contestant, with a server of its own and one connection to publish on."""

    def __init__(self, name: str, until: ExitStack) -> None:
        self.server = until.enter_context(embedded.redis(private=True))
        self.redis = until.enter_context(redis.Redis.from_url(self.server.url))
        self.url = self.server.url.replace("redis://", f"{SCHEMES[name]}://", 1)
        self._connection = until.enter_context(self.connect())
        self.channel = self._connection.channel()
        self.producer = Producer(self.channel, serializer="json")

    def connect(self, **options: Any) -> Connection:
        return Connection(self.url, transport_options=options)

    def empty(self) -> None:
        QUEUE(self.channel).declare()
        self.channel.queue_purge(QUEUE.name)

    def fill(self, messages: int) -> None:
        self.empty()
        self.publish_batches(messages)

    def publish(self, messages: int) -> None:
        for _ in range(messages):
            self.producer.publish(BODY, routing_key=QUEUE.name)

    def publish_batches(self, messages: int) -> None:
        for start in range(0, messages, BATCH):
            with self.producer.batch(BATCH):
                self.publish(min(BATCH, messages - start))

    def bytes_used(self) -> int:
        return int(self.redis.info("memory")["used_memory"])


class Consuming:
    """A consumer that acks what it gets, and counts it."""

    def __init__(self, transport: Transport, prefetch: int, **options: Any) -> None:
        self.got = 0
        self.connection = transport.connect(**options)
        self._consumer = Consumer(
            self.connection,
            [QUEUE],
            callbacks=[self._receive],
            accept=["json"],
            prefetch_count=prefetch,
        )

    def _receive(self, body: Any, message: Any) -> None:
        message.ack()
        self.got += 1

    def drain(self, messages: int) -> None:
        with self._consumer:
            while self.got < messages:
                self.connection.drain_events(timeout=5)

    def loop(self, messages: int) -> None:
        hub = Hub()
        with self._consumer:
            self.connection.register_with_event_loop(hub)
            while self.got < messages:
                hub.run_once()
        hub.close()

    def close(self) -> None:
        self.connection.release()


class Broadcast:
    """Five queues of a fanout exchange, each read by a channel of its own."""

    def __init__(self, transport: Transport) -> None:
        self.got = 0
        self._transport = transport
        self._exchange = Exchange("bench-fanout", type="fanout", durable=False)
        # The publisher's channel must know the type: an exchange it does not know is a direct one.
        self._exchange(transport.channel).declare()
        self._connection = transport.connect()
        self._consumers = [self._consumer(number) for number in range(FANOUT)]
        for consumer in self._consumers:
            consumer.consume()
        with suppress(TimeoutError):  # lists get only what is published after they subscribed
            while True:
                self._connection.drain_events(timeout=0.2)

    def _consumer(self, number: int) -> Consumer:
        queue = Queue(f"bench-fanout-{number}", exchange=self._exchange, auto_delete=True)
        return Consumer(
            self._connection.channel(), [queue], callbacks=[self._receive], accept=["json"]
        )

    def _receive(self, body: Any, message: Any) -> None:
        message.ack()
        self.got += 1

    def run(self, messages: int) -> None:
        for _ in range(messages):
            self._transport.producer.publish(BODY, exchange=self._exchange, routing_key="")
        while self.got < FANOUT * messages:
            self._connection.drain_events(timeout=5)

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.cancel()
        self._connection.release()


Prepared = tuple[Callable[[], object], Callable[[], object]]
"""What is timed, and what is to be closed thereafter."""


def measure(
    transports: dict[str, Transport], prepare: Callable[[Transport], Prepared], rounds: int
) -> dict[str, Seconds]:
    """As the harness does, with a part before and after that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in transports}
    for number in range(rounds + 1):
        for name, transport in transports.items():
            run, close = prepare(transport)
            gc.collect()
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            close()
            if number:
                taken[name].append(seconds)
    return {name: Seconds(min(all_), statistics.median(all_)) for name, all_ in taken.items()}


def publishing(transports: dict[str, Transport], size: Size) -> Iterator[Case]:
    messages = 4 * size.messages  # which take no longer than to consume a quarter of them

    def one_by_one(transport: Transport) -> Prepared:
        transport.empty()
        return lambda: transport.publish(messages), lambda: None

    def in_batches(transport: Transport) -> Prepared:
        transport.empty()
        return lambda: transport.publish_batches(messages), lambda: None

    seconds = measure(transports, one_by_one, size.rounds)
    yield compare("publish", messages, seconds, STREAMS, LISTS)
    seconds = measure(transports, in_batches, size.rounds)
    yield compare("publish in batches", messages, seconds, STREAMS, LISTS, batch=BATCH)


def consuming(transports: dict[str, Transport], size: Size) -> Iterator[Case]:
    ways = {"drain_events": False, "event loop": False, "event loop, confirmed": True}
    for way, confirm in ways.items():
        for prefetch in (1, 10, 100):

            def prepare(
                transport: Transport,
                way: str = way,
                room: int = prefetch,
                confirm: bool = confirm,
            ) -> Prepared:
                transport.fill(size.messages)
                consumer = Consuming(transport, room, confirm_acks=confirm)
                run = consumer.drain if way == "drain_events" else consumer.loop
                return lambda: run(size.messages), consumer.close

            seconds = measure(transports, prepare, size.rounds)
            name = f"consume and ack, {way}"
            yield compare(name, size.messages, seconds, STREAMS, LISTS, prefetch=prefetch)


def fanout(transports: dict[str, Transport], size: Size) -> Iterator[Case]:
    published = size.messages // FANOUT

    def prepare(transport: Transport) -> Prepared:
        broadcast = Broadcast(transport)
        return lambda: broadcast.run(published), broadcast.close

    seconds = measure(transports, prepare, size.rounds)
    name = "fanout, published and received"
    yield compare(name, published * FANOUT, seconds, STREAMS, LISTS, queues=FANOUT)


class Idle:
    """Workers without tasks, on one event loop; Redis cannot tell them from many processes."""

    def __init__(self, transport: Transport, workers: int) -> None:
        self.received = 0
        self._transport = transport
        self._workers = workers
        self._events = Exchange("celeryev", type="fanout")
        self._events(transport.channel).declare()
        self._connections = [transport.connect() for _ in range(workers)]
        self._hub = Hub()
        for number, connection in enumerate(self._connections):
            self._consume(number, connection)
            connection.register_with_event_loop(self._hub)
        self._hub.call_repeatedly(0.01, lambda: None)  # so that a turn of the loop is short
        self._run(2)  # the first fetches, and all subscriptions

    def _consume(self, number: int, connection: Connection) -> None:
        control = Exchange("celery.pidbox", type="fanout", durable=False)
        short: dict[str, Any] = {"durable": False, "auto_delete": True}
        for queue in (
            Queue("celery"),
            Queue(f"{number}.celery.pidbox", control, expires=10, **short),
            Queue(f"celeryev.{number}", self._events, "worker.#", expires=60, **short),
        ):
            callbacks = [self._receive]
            Consumer(connection.channel(), [queue], callbacks=callbacks, no_ack=True).consume()

    def _receive(self, body: Any, message: Any) -> None:
        self.received += 1

    def cpu_percent(self, seconds: float) -> float:
        """Run, and return the percentage of a core that Redis took."""
        before = self._cpu_seconds()
        self._run(seconds)
        return 100 * (self._cpu_seconds() - before) / seconds

    def _run(self, seconds: float) -> None:
        producer = Producer(self._transport.channel, self._events, serializer="json")
        self.received, sent, began = 0, 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            for _ in range(int(spent * self._workers / 2) - sent):
                producer.publish(BODY, routing_key="worker.heartbeat")
                sent += 1
            self._hub.run_once()

    def _cpu_seconds(self) -> float:
        used = self._transport.redis.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    def close(self) -> None:
        self._hub.close()
        for connection in self._connections:
            connection.release()


def idle(transports: dict[str, Transport], seconds: float) -> Iterator[Case]:
    """Not a rate: percent of a core."""
    workers = 80
    used = {}
    for name, transport in transports.items():
        crowd = Idle(transport, workers)
        used[name] = crowd.cpu_percent(seconds)
        crowd.close()
    yield Case(
        name="CPU of Redis for idle workers, percent of a core",
        rate=used[STREAMS],
        floor=LISTS,
        floor_rate=used[LISTS],
        ratio=used[STREAMS] / used[LISTS],
        settings={"workers": workers},
    )


def memory(transports: dict[str, Transport]) -> Iterator[Case]:
    """Not a rate: bytes for each of 10,000 messages."""
    messages = 10_000
    ready: dict[str, float] = {}
    pending: dict[str, float] = {}
    for name, transport in transports.items():
        transport.empty()
        before = transport.bytes_used()
        transport.publish_batches(messages)
        ready[name] = (transport.bytes_used() - before) / messages
        kept: list[Any] = []
        with transport.connect() as connection:
            on_message = {"callbacks": [lambda body, message, kept=kept: kept.append(message)]}
            with Consumer(connection, [QUEUE], accept=["json"], **on_message):
                while len(kept) < messages:
                    connection.drain_events(timeout=5)
                pending[name] = (transport.bytes_used() - before) / messages
            for message in kept:
                message.ack()
    for state, used in (("ready", ready), ("not yet acked", pending)):
        yield Case(
            name=f"memory, bytes per message that is {state}",
            rate=used[STREAMS],
            floor=LISTS,
            floor_rate=used[LISTS],
            ratio=used[STREAMS] / used[LISTS],
            settings={"messages": messages},
        )


def main() -> None:
    options = arguments(__doc__)
    size = Size(500, 5) if options.quick else Size(5_000, 5)
    with ExitStack() as until:
        transports = {name: Transport(name, until) for name in SCHEMES}
        cases = [
            *publishing(transports, size),
            *consuming(transports, size),
            *fanout(transports, size),
            *idle(transports, 5 if options.quick else 20),
            *memory(transports),
        ]
    report(cases, options)


if __name__ == "__main__":
    main()
