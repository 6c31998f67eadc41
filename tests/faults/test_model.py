"""Two workers and a relay, stepped in any order, crashing anywhere, against a model of ten lines.

Each is a greenlet that stops before its read, inside its transaction, before its commit is acked,
between publish and mark; hypothesis decides who goes on, who dies, and whose lease ends.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator

import pytest
import redis
from greenlet import GreenletExit, getcurrent, greenlet
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import text
from tests.faults import invariants
from tests.faults.crash.sql_paths import ORDERS, UPSERT

from conquiet import Acking, Message, Router, sql
from conquiet import redis as redis_room
from conquiet.acking import State
from conquiet.redis import StreamSink, StreamSource, outbox_source
from conquiet.relay.relay import publish_messages

COMMANDS, GROUP, OUTBOX, EVENTS = "commands", "billing", "outbox", "events"
LONG = 60.0


class Model:
    """What has to be true, whoever did what in whichever order."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def wrong(self, effects: Counter[str], stored: Counter[str], log: list[str]) -> list[str]:
        found = [f"{name}: {count} effects" for name, count in effects.items() if count != 1]
        if effects != stored:
            found.append(f"effects {effects} and events {stored} differ")
        found += [f"{name} was told, and did not happen" for name in set(log) - set(effects)]
        return found

    def missing(self, effects: Counter[str], log: list[str]) -> set[str]:
        return set(self.sent) - set(effects) | set(effects) - set(log)


def stop_here() -> None:
    """Let hypothesis decide who goes on."""
    getcurrent().parent.switch()


class Stores:
    """Where commands come from and events go: Redis. Where effects go is told by a subclass."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.url = client.connection_pool.connection_kwargs

    def connect(self) -> redis.Redis:
        known = {name: self.url[name] for name in ("host", "port", "db")}
        return redis.Redis(**known, retry=Retry(NoBackoff(), 0))

    def empty(self) -> None:
        self.client.flushdb()
        self.client.xgroup_create(COMMANDS, GROUP, id="0", mkstream=True)

    def send(self, name: str) -> None:
        entry = {"specversion": "1.0", "id": name, "type": "place.order", "source": "/web"}
        self.client.xadd(COMMANDS, {**entry, "data": json.dumps({"command": name, "number": 0})})

    def log(self) -> list[str]:
        return [event.command for event in invariants.read_log(self.client, EVENTS)]

    def end_leases(self) -> None:
        """What the time would do: keys expire, entries have been idle for long."""
        for key in self.client.scan_iter("conquiet:inbox:*"):
            if self.client.get(key) != b"done":
                self.client.delete(key)
        for stream, group in ((COMMANDS, GROUP), (OUTBOX, "outbox-publisher")):
            if self.client.exists(stream) and self.client.xinfo_groups(stream):
                for entry in self.client.xpending_range(stream, group, "-", "+", 100):
                    owner, id_ = entry["consumer"], entry["message_id"]
                    idle = int(LONG * 2000)
                    self.client.xclaim(stream, group, owner, 0, [id_], idle=idle, justid=True)

    def settled(self) -> bool:
        return not invariants.unsettled_entries(self.client, COMMANDS, GROUP)


class RedisStores(Stores):
    def chain(self, client):
        room = redis_room
        return room.Transaction(client), room.Inbox("b", lease=LONG), room.Outbox(EVENTS, OUTBOX)

    def take_effect(self, client, name):
        redis_room.commands(client).hincrby("effects", name, 1)

    def effects(self) -> Counter[str]:
        return invariants.read_counts(self.client, "effects")

    def empty(self) -> None:
        super().empty()
        self.everything_stored: Counter[str] = Counter()
        self._seen: set[str] = set()

    def stored(self) -> Counter[str]:
        """An entry leaves the outbox when it is published: those seen before count too."""
        for event in (*invariants.read_log(self.client, OUTBOX), *self._published()):
            if event.id not in self._seen:
                self._seen.add(event.id)
                self.everything_stored[event.command] += 1
        return self.everything_stored

    def _published(self):
        return invariants.read_log(self.client, EVENTS)

    def outbox(self, client):
        return outbox_source(client, OUTBOX, consumer="relay", max_idle=LONG, block=0.01)

    def published(self) -> bool:
        return not self.client.xlen(OUTBOX)

    def close(self) -> None:
        pass


class SqlStores(Stores):
    """Who meets another's lock gives up at once: one thread cannot wait for itself."""

    def __init__(self, client: redis.Redis, url: str) -> None:
        super().__init__(client)
        impatient = {"timeout": 0.0} if url.startswith("sqlite") else {}
        if not impatient:
            impatient = {"options": "-c lock_timeout=1ms"}
        self.engine = sql.engine(url, connect_args=impatient, pool_size=10)
        sql.schema.init(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text(ORDERS))

    def chain(self, client):
        outbox = sql.Outbox(EVENTS, notify=False)
        return sql.Transaction(self.engine), sql.Inbox("b"), outbox

    def take_effect(self, client, name):
        with sql.connection(self.engine) as connection:
            connection.execute(UPSERT, {"id": name})

    def empty(self) -> None:
        super().empty()
        with self.engine.begin() as connection:
            for table in ("orders", "outbox", "processed_messages"):
                connection.execute(text(f"DELETE FROM {table}"))

    def effects(self) -> Counter[str]:
        with self.engine.connect() as connection:
            return Counter(dict(connection.execute(text("SELECT id, amount FROM orders")).all()))

    def _rows(self, condition: str = "") -> list[str]:
        with self.engine.connect() as connection:
            found = connection.execute(text("SELECT data FROM outbox " + condition)).scalars()
            return [json.loads(bytes(data))["command"] for data in found]

    def stored(self) -> Counter[str]:
        marked = set(self._rows("WHERE published_at IS NOT NULL"))
        assert marked <= set(self.log()), f"{marked} are marked, and not all in the log"
        return Counter(self._rows())

    def outbox(self, client):
        return sql.OutboxSource(self.engine, wakeup=False, poll=0.001)

    def published(self) -> bool:
        return not self._rows("WHERE published_at IS NULL")

    def close(self) -> None:
        self.engine.dispose()


class Process:
    """A worker or a relay: goes on from stop to stop, until it is killed."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.client = stores.connect()
        self.life = greenlet(self.live)

    def live(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        self.life.switch()

    def crash(self) -> None:
        pool = self.client.connection_pool  # so that nothing is given back in good order:
        pool.connection_kwargs["port"] = 1
        pool.disconnect()
        while not self.life.dead:  # a router takes it for a failing handler, and goes on
            self.life.throw(GreenletExit)
        self.client.close()


class AWorker(Process):
    def live(self) -> None:
        source = StreamSource(
            self.client, COMMANDS, GROUP, lease=LONG, claim_interval=0.0001, backoff=0.0001
        )
        router = Router()
        router.use(*self.stores.chain(self.client))

        @router.raw(type="place.order", name="place", source="/shop")
        def place(message: Message[bytes]) -> Message[bytes]:
            stop_here()
            self.stores.take_effect(self.client, message.id)
            stop_here()
            return Message(message.data, {"type": "order.placed"})

        while True:
            stop_here()
            batch = list(source.read(2, 0.0))
            stop_here()
            if batch:
                handled = router.run(batch)
                stop_here()
                router.settle(handled)


class ARelay(Process):
    def live(self) -> None:
        source = self.stores.outbox(self.client)
        try:
            while True:
                stop_here()
                publish_messages(source.read(2, 0.0), Stopping(StreamSink(self.client)))
        except GreenletExit:
            source.close()  # a database lets go of what a dead process has claimed
            raise


class Stopping:
    """A sink that stops before and after it publishes."""

    def __init__(self, sink: StreamSink) -> None:
        self._sink = sink

    def publish(self, messages):
        stop_here()
        answers = self._sink.publish(messages)
        stop_here()
        return answers


def check(stores: Stores, examples: int) -> None:
    names = itertools.count()
    kinds = (AWorker, AWorker, ARelay)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            stores.empty()
            self.model = Model()
            self.processes = [kind(stores) for kind in kinds]

        @rule(count=st.integers(1, 3))
        def send(self, count: int) -> None:
            for _ in range(count):
                self.model.sent.append(f"c-{next(names)}")
                stores.send(self.model.sent[-1])

        @rule(who=st.integers(0, 2), steps=st.integers(1, 6))
        def go_on(self, who: int, steps: int) -> None:
            for _ in range(steps):
                self.processes[who].step()

        @rule(who=st.integers(0, 2))
        def crash(self, who: int) -> None:
            self.processes[who].crash()
            self.processes[who] = kinds[who](stores)

        @rule()
        def leases_end(self) -> None:
            stores.end_leases()

        @invariant()
        def nothing_is_wrong(self) -> None:
            wrong = self.model.wrong(stores.effects(), stores.stored(), stores.log())
            assert not wrong, wrong

        def teardown(self) -> None:
            for process in self.processes:
                process.crash()
            stores.end_leases()
            last = [AWorker(stores), ARelay(stores)]
            for _ in range(500):
                if stores.settled() and stores.published():
                    break
                for process in last:
                    process.step()
            for process in last:
                process.crash()
            missing = self.model.missing(stores.effects(), stores.log())
            assert not missing, f"{missing} are lost"
            self.nothing_is_wrong()

    run_state_machine_as_test(Machine, settings=_settings(examples))


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # to shrink takes longer than to read twenty steps
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(params=["redis", "postgresql", "sqlite"])
def stores(request, redis_client) -> Iterator[Stores]:
    if request.param == "redis":
        made: Stores = RedisStores(redis_client)
    else:
        name = {"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]
        made = SqlStores(redis_client, request.getfixturevalue(name))
    yield made
    made.close()


def test_any_interleaving_of_two_workers_and_a_relay_is_exactly_once(stores):
    check(stores, examples=12)


class ForgetfulStores(RedisStores):
    def chain(self, client):
        return redis_room.Transaction(client), redis_room.Outbox(EVENTS, OUTBOX)


class SimpleInbox(RedisStores):
    """One SET NX before the transaction: what a crash leaves behind counts as done."""

    def chain(self, client):
        inbox = redis_room.Inbox("b", mode="setnx", client=client)
        return inbox, redis_room.Transaction(client), redis_room.Outbox(EVENTS, OUTBOX)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "found"), [(ForgetfulStores, "2 effects"), (SimpleInbox, "are lost")]
)
def test_the_model_finds_what_a_chain_without_a_sound_inbox_does(redis_client, kind, found):
    with pytest.raises(AssertionError, match=found):
        check(kind(redis_client), examples=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundreds_of_interleavings_of_two_workers_and_a_relay_are_exactly_once(stores):
    check(stores, examples=300)


# --- acking -------------------------------------------------------------------------------------


def test_any_order_of_acks_and_nacks_settles_a_shared_message_once():
    class Machine(RuleBasedStateMachine):
        """A message that is shared, and shared again, among workers that settle it in any order.

        The model: a share says what it first said; one that was split says nack as soon as one
        of its parts does, else ack when all of them have; what it said is final.
        """

        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []
            root = Acking.calling(
                lambda: self.heard.append("acked"), lambda error: self.heard.append("nacked")
            )
            self.ackings = [root]
            self.parent: list[int | None] = [None]
            self.parts: list[int] = [0]
            self.said: list[list[str]] = [[]]

        @rule(which=st.integers(0, 50), count=st.integers(1, 3))
        def split(self, which: int, count: int) -> None:
            which %= len(self.ackings)
            if self.parts[which] or self.said[which]:
                return
            self.parts[which] = count
            for share in self.ackings[which].split(count):
                self.ackings.append(share)
                self.parent.append(which)
                self.parts.append(0)
                self.said.append([])

        @rule(which=st.integers(0, 50), good=st.booleans())
        def settle(self, which: int, good: bool) -> None:
            which %= len(self.ackings)
            acking = self.ackings[which]
            if self.parts[which]:
                return
            expected = not self.said[which]
            assert (acking.ack() if good else acking.nack()) is expected
            if expected:
                self.said[which].append("acked" if good else "nacked")
                self.tell(which)

        def tell(self, which: int) -> None:
            above = self.parent[which]
            if above is None or self.said[above]:
                return
            words = [
                self.said[n][0] for n, up in enumerate(self.parent) if up == above and self.said[n]
            ]
            if "nacked" in words or len(words) == self.parts[above]:
                self.said[above].append("nacked" if "nacked" in words else "acked")
                self.tell(above)

        @invariant()
        def agree(self) -> None:
            assert self.heard == self.said[0]
            for acking, said in zip(self.ackings, self.said, strict=True):
                assert acking.state is (State(said[0]) if said else State.PENDING)

    run_state_machine_as_test(Machine, settings=_settings(60))
