"""The leased inbox, fenced by WATCH (R1, R2, R11), and the seed's own variant."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import redis
from tests.integration.redis.conftest import GROUP, STREAM, ids, numbered
from tests.waiting import eventually

from conquiet.errors import ConfigError, PermanentError
from conquiet.message import Message
from conquiet.redis import Inbox, InProgress, Outbox, Transaction, commands
from conquiet.redis.lease import Terms
from conquiet.redis.session import Session
from conquiet.router import Router
from conquiet.testing import deliver, message
from conquiet.testing.contracts.storing import elsewhere
from conquiet.worker import Worker

INBOX = "conquiet:inbox:{billing}:billing/handler:"


@pytest.fixture
def router(redis_client):
    """A router that counts effects; its inbox takes any setting."""

    def make(run=lambda item: None, *, inbox=None, client=None, **settings):
        used = client or redis_client
        made = Router()
        made.use(Transaction(used), inbox or Inbox("billing", **settings))

        @made.raw(name="handler")
        def handle(item: Message[bytes]) -> None:
            commands(used).incr(f"effect-{item.id}")
            run(item)

        return made

    return make


@pytest.fixture
def names(recorded):
    """The names of the commands that a function sends, apart from redis-py's greetings."""
    greetings = {"HELLO", "CLIENT", "SELECT"}

    def ask(run):
        return [name for c in recorded(run) if (name := c.split()[0]) not in greetings]

    return ask


@pytest.fixture
def effects(redis_client):
    return lambda *names: [int(redis_client.get(f"effect-{name}") or 0) for name in names]


def key(name, source="/test"):
    return f"{INBOX}{source} {name}"


# --- the two states -----------------------------------------------------------------------------


def test_a_message_is_processing_while_it_is_handled_and_done_afterwards(redis_client, router):
    seen = []

    def look(item):
        seen.append(redis_client.get(key("m-0")))
        seen.append(redis_client.pttl(key("m-0")))

    deliver(router(look, lease=10, retention=100), *numbered(1))
    value, milliseconds = seen
    assert value.startswith(b"processing:")
    assert 0 < milliseconds <= 10_000
    assert redis_client.get(key("m-0")) == b"done"
    assert 10_000 < redis_client.pttl(key("m-0")) <= 100_000


def test_r1_a_crash_between_lease_and_exec_costs_the_lease_and_not_the_message(
    redis_client, router, effects
):
    redis_client.set(key("m-0"), "processing:of-a-process-that-died", px=300)
    made = router()
    [error] = deliver(made, *numbered(1)).errors
    assert isinstance(error, InProgress)
    assert effects("m-0") == [0]
    eventually(lambda: deliver(made, *numbered(1)).acked)
    assert effects("m-0") == [1]


def test_r1_a_message_in_progress_elsewhere_is_nacked_and_its_neighbours_are_not(
    redis_client, router, effects
):
    redis_client.set(key("m-1"), "processing:somewhere", px=60_000)
    delivered = deliver(router(), *numbered(4))
    assert ids(delivered.acked) == ["m-0", "m-2", "m-3"]
    assert [type(error) for error in delivered.errors] == [InProgress]
    assert effects("m-0", "m-1", "m-2", "m-3") == [1, 0, 1, 1]
    assert redis_client.get(key("m-1")) == b"processing:somewhere"


def test_the_order_of_a_key_holds_around_a_message_that_is_held_elsewhere(
    redis_client, router, effects
):
    redis_client.set(key("m-1"), "processing:somewhere", px=60_000)
    batch = numbered(4)
    for item in batch:
        item.order_key = "a" if item.id != "m-3" else "b"
    delivered = deliver(router(), *batch)
    assert ids(delivered.acked) == ["m-0", "m-3"]
    assert effects("m-0", "m-1", "m-2", "m-3") == [1, 0, 0, 1]
    assert redis_client.get(key("m-2")) is None  # its lease was given back


def test_a_failed_handler_gives_its_lease_back_at_once(redis_client, router):
    def fail(item):
        raise ZeroDivisionError

    deliver(router(fail), *numbered(3))
    assert redis_client.keys("conquiet:*") == []


def test_a_batch_takes_two_round_trips(router, names):
    made = router()
    deliver(made, *numbered(1, first=9))
    seen = names(lambda: deliver(made, *numbered(2)))
    assert seen == [
        *("SET", "SET", "WATCH", "MGET"),
        *("MULTI", "INCRBY", "INCRBY", "SET", "SET", "EXEC"),
    ]


def test_a_twin_in_the_same_batch_is_leased_and_done_once(router, names, effects):
    made = router()
    deliver(made, *numbered(1, 99))
    seen = names(lambda: deliver(made, *numbered(1), *numbered(1)))
    assert seen.count("SET") == 2  # processing, done
    assert effects("m-0") == [1]


def test_duplicates_alone_take_one_and_write_nothing(router, names):
    made = router()
    deliver(made, *numbered(2))
    seen = names(lambda: deliver(made, *numbered(2)))
    assert seen == ["SET", "SET", "WATCH", "MGET", "UNWATCH"]


def test_a_message_is_forgotten_after_its_retention(router, effects):
    made = router(retention=0.2)
    deliver(made, *numbered(1))
    deliver(made, *numbered(1))
    assert effects("m-0") == [1]
    time.sleep(0.25)
    deliver(made, *numbered(1))
    assert effects("m-0") == [2]


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decodes", [False, True])
def test_any_client_will_do(redis_url, router, effects, protocol, decodes):
    settings = {"protocol": protocol, "decode_responses": decodes, "health_check_interval": 1}
    with redis.Redis.from_url(redis_url, **settings) as client:
        made = router(client=client)
        for _ in range(2):
            assert len(deliver(made, *numbered(3)).acked) == 3
    assert effects("m-0", "m-1", "m-2") == [1, 1, 1]


# --- R2: the fence ------------------------------------------------------------------------------


def test_r2_a_slow_holder_whose_lease_ran_out_writes_nothing(
    redis_client, router, effects, monkeypatch
):
    stop_renewing(monkeypatch)
    taken = threading.Event()

    def slow(item):
        if not taken.is_set():
            taken.set()
            time.sleep(0.3)
            # Meanwhile the lease ended, and somebody else took effect.
            assert elsewhere(lambda: len(deliver(router(), *numbered(1)).acked)) == 1

    assert len(deliver(router(slow, lease=0.1), *numbered(1)).acked) == 1  # as a duplicate
    assert effects("m-0") == [1]


def test_r2_a_slow_holder_is_nacked_while_another_holds_the_lease(
    redis_client, router, effects, monkeypatch
):
    stop_renewing(monkeypatch)

    def slow(item):
        time.sleep(0.15)
        redis_client.set(key("m-0"), "processing:of-another", nx=True, px=60_000)

    [error] = deliver(router(slow, lease=0.1), *numbered(1)).errors
    assert isinstance(error, InProgress)
    assert effects("m-0") == [0]
    assert redis_client.get(key("m-0")) == b"processing:of-another"


def test_r2_a_batch_that_is_fenced_runs_again_one_by_one(
    redis_client, router, effects, monkeypatch
):
    stop_renewing(monkeypatch)
    stolen = []

    def steal(item):
        if item.id == "m-1" and not stolen:
            stolen.append(redis_client.set(key("m-1"), "processing:stolen", px=60_000))

    delivered = deliver(router(steal), *numbered(3))
    assert ids(delivered.acked) == ["m-0", "m-2"]
    assert [type(error) for error in delivered.errors] == [InProgress]
    assert effects("m-0", "m-1", "m-2") == [1, 0, 1]


def test_r2_a_lease_that_ended_and_that_nobody_took_does_no_harm(router, effects, monkeypatch):
    stop_renewing(monkeypatch)
    pauses = [0.1]
    made = router(lambda item: time.sleep(pauses.pop() if pauses else 0), lease=0.05)
    assert len(deliver(made, *numbered(1)).acked) == 1
    assert effects("m-0") == [1]


def test_a_long_handler_keeps_its_lease(redis_client, router, effects):
    others = []

    def long(item):
        for _ in range(10):
            time.sleep(0.1)
            others.extend(elsewhere(lambda: deliver(router(), *numbered(1)).errors))

    assert len(deliver(router(long, lease=0.3), *numbered(1)).acked) == 1
    assert [type(error) for error in others] == [InProgress] * 10
    assert effects("m-0") == [1]


def test_a_lease_lost_while_it_is_renewed_writes_nothing(redis_client, router, effects, caplog):
    def long(item):
        if redis_client.get("stolen") is None:
            redis_client.set("stolen", 1)
            redis_client.set(key("m-0"), "processing:stolen", px=60_000)
            time.sleep(0.5)

    with caplog.at_level(logging.WARNING):
        [error] = deliver(router(long, lease=0.3), *numbered(1)).errors
    assert isinstance(error, InProgress)
    assert effects("m-0") == [0]


@pytest.mark.parametrize("between", ["the handler and the renewal", "the EXEC and the WATCH"])
def test_a_renewal_makes_nothing_good_that_happened_before_it(
    redis_client, router, effects, monkeypatch, between
):
    """Whoever took the lease may be done, and gone, when the keys are watched again."""
    exchange = Session.exchange

    def interrupted(session, packed):
        if b"PEXPIRE" not in b"".join(packed) or redis_client.incr("renewals") > 1:
            return exchange(session, packed)
        lease = redis_client.get(key("m-0"))
        if between == "the handler and the renewal":
            redis_client.set(key("m-0"), "processing:stolen")
            redis_client.set(key("m-0"), lease, px=60_000)
            return exchange(session, packed)
        replies = exchange(session, packed[:-2])
        redis_client.set(key("m-0"), "processing:stolen", px=60_000)
        return replies + exchange(session, packed[-2:])

    monkeypatch.setattr(Session, "exchange", interrupted)
    runs = []

    def long(item):
        runs.append(item.id)
        if len(runs) == 1:
            eventually(lambda: int(redis_client.get("renewals") or 0) > 0)
            time.sleep(0.05)

    delivered = deliver(router(long, lease=0.3), *numbered(1))
    if between == "the EXEC and the WATCH":
        assert isinstance(delivered.errors[0], InProgress)
        assert effects("m-0") == [0]
    else:
        assert len(runs) == 2  # nothing was written of the first
        assert effects("m-0") == [1]


def test_a_lease_whose_reply_was_lost_has_one_taker():
    terms = Terms(lease=30.0, retention=60.0)
    terms.abandon({b"key": b"processing:1"})
    assert not terms.recognise(b"other", b"processing:1")
    assert terms.recognise(b"key", b"processing:1")
    assert not terms.recognise(b"key", b"processing:1")


def test_the_thread_that_renews_ends_when_there_is_nothing_to_renew(router):
    deliver(router(lease=0.1), *numbered(1))
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name == "conquiet-leases"], timeout=10
    )


def stop_renewing(monkeypatch):
    monkeypatch.setattr("conquiet.redis.lease.Leases.renew", lambda self, every: None)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_changes_nothing(router, effects, monkeypatch, jump):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    made = router(lambda item: time.sleep(0.2), lease=0.1)
    for _ in range(2):
        assert len(deliver(made, *numbered(2)).acked) == 2
    assert effects("m-0", "m-1") == [1, 1]


# --- R11: keys ----------------------------------------------------------------------------------


def test_r11_the_key_names_consumer_source_and_id_and_has_a_hash_tag(redis_client, router):
    deliver(router(), message(id="a-1", source="/shop"))
    assert redis_client.keys("conquiet:*") == [
        b"conquiet:inbox:{billing}:billing/handler:/shop a-1"
    ]


def test_r11_two_services_on_one_redis_do_not_swallow_each_others_messages(router, effects):
    for subscriber in ("billing", "shipping", "billing"):
        deliver(router(inbox=Inbox(subscriber)), *numbered(1))
    assert effects("m-0") == [2]


def test_r11_names_with_colons_cannot_be_mistaken(router, effects):
    deliver(router(inbox=Inbox("a:b", tag="t")), message(id="x", source="c"))
    deliver(router(inbox=Inbox("a", tag="t")), message(id="x", source="b/handler:c"))
    assert effects("x") == [2]


def test_a_key_function_tells_messages_apart_by_something_else(router, effects):
    made = router(key=lambda item: item.attributes["idempotencykey"])
    for name, same in (("m-0", "1"), ("m-1", "1"), ("m-2", "2")):
        deliver(made, message(id=name, idempotencykey=same))
    assert effects("m-0", "m-1", "m-2") == [1, 0, 1]


def test_an_id_that_is_no_text_fails_for_good(router):
    [error] = deliver(router(), message(id="\ud800")).errors
    assert isinstance(error, PermanentError)


@pytest.mark.parametrize(
    "settings",
    [
        {"lease": 0},
        {"retention": -1},
        {"lease": float("nan")},
        {"mode": "both"},
        {"mode": "setnx"},
        {"tag": ""},
        {"tag": "a}b"},
        {"client": object()},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        Inbox("billing", **settings)


# --- acks in the EXEC ---------------------------------------------------------------------------


def test_the_ack_of_a_stream_on_the_same_redis_rides_in_the_exec(
    redis_client, router, source, publish, pending, recorded
):
    publish(3)
    opened, made = source(), router()
    deliver(made, message())
    seen = recorded(lambda: made.process(opened.read(10, 1)))
    acks = [number for number, command in enumerate(seen) if command.startswith("XACK")]
    assert len(acks) == 1
    assert seen.index("MULTI") < acks[0] < seen.index("EXEC")
    assert pending() == []
    assert opened.in_flight == 0


def test_a_duplicate_is_acked_by_the_exec_too(router, source, publish, pending, effects):
    made = router()
    publish(2)
    made.process(source().read(10, 1))
    publish(2)
    made.process(source().read(10, 1))
    assert pending() == []
    assert effects("m-0", "m-1") == [1, 1]


def test_a_message_held_elsewhere_stays_pending(redis_client, router, source, publish, pending):
    publish(2)
    redis_client.set(key("m-0"), "processing:elsewhere", px=60_000)
    router().process(source().read(10, 1))
    assert len(pending()) == 1


def test_a_failed_handler_acks_nothing(router, source, publish, pending):
    def fail(item):
        if item.id == "m-1":
            raise ZeroDivisionError

    publish(3)
    router(fail).process(source().read(10, 1))
    assert len(pending()) == 1


def test_a_stream_on_another_redis_is_acked_after_the_commit(
    redis_client, router, source, publish, pending, recorded
):
    publish(1)
    settings = redis_client.connection_pool.connection_kwargs
    with redis.Redis(port=settings["port"], db=3) as other:
        made, opened = router(client=other), source()
        seen = recorded(lambda: made.process(opened.read(10, 1)))
        other.flushdb()
    names = [command.split()[0] for command in seen]
    assert names.index("EXEC") < names.index("XACK")
    assert pending() == []


def test_a_message_that_two_handlers_take_is_acked_when_both_are_done(
    redis_client, source, publish, pending
):
    made = Router()
    made.use(Transaction(redis_client), Inbox("billing"))
    fails = [1, 2]  # in the batch, and then alone

    @made.raw(name="first")
    def first(item: Message[bytes]) -> None:
        commands(redis_client).incr("first")

    @made.raw(name="second")
    def second(item: Message[bytes]) -> None:
        commands(redis_client).incr("second")
        if fails:
            fails.pop()
            raise ZeroDivisionError

    publish(1)
    opened = source()
    made.process(opened.read(10, 1))
    assert len(pending()) == 1
    made.process(opened.read(10, 1))
    assert pending() == []
    assert redis_client.mget("first", "second") == [b"1", b"1"]


def test_a_worker_over_the_whole_path_takes_each_message_into_effect_once(
    redis_client, source, publish, pending
):
    made = Router()
    made.use(Transaction(redis_client), Inbox("billing"), Outbox("sales", "outbox"))

    @made.raw(name="handler", source="/billing")
    def handle(item: Message[bytes]) -> list[Message[bytes]]:
        commands(redis_client).hincrby("effects", item.id, 1)
        return [Message(b"{}", {"type": "billed", "id": f"{item.id}/billed"})]

    publish(300)
    publish(100)  # again
    worker = Worker(source(), made, batch_size=50, threads=2)
    worker.start()
    eventually(lambda: worker.health().handled >= 400, timeout=30)
    worker.stop()
    assert redis_client.hgetall("effects") == {b"m-%d" % n: b"1" for n in range(300)}
    assert redis_client.xlen("outbox") == 300
    assert pending(STREAM, GROUP) == []


# --- a transaction inside another -----------------------------------------------------------------


@pytest.fixture
def nested(redis_client):
    """Runs a function in the handler of an outer transaction with an inbox of its own."""

    def run(inside):
        outer = Router()
        outer.use(Transaction(redis_client), Inbox("outer"))

        @outer.raw(name="outer")
        def handle(item: Message[bytes]) -> None:
            inside()

        return deliver(outer, message(id="outer"))

    return run


def test_a_part_that_fails_costs_its_neighbours_nothing(
    redis_client, router, nested, effects, source, publish, pending
):
    def fail(item):
        if item.id == "m-1":
            raise ValueError(item.id)

    made = router(fail)
    publish(3)
    reader = source(backoff=60.0)
    messages = reader.read(10, 1.0)
    handled = []
    assert len(nested(lambda: handled.append(made.run(messages))).acked) == 1
    made.settle(handled[0])  # after the commit of the transaction around it
    assert effects("m-0", "m-1", "m-2") == [1, 0, 1]
    assert [redis_client.get(key(f"m-{n}")) for n in range(3)] == [b"done", None, b"done"]
    assert len(pending()) == 1  # and not lost with the acks of the first try
    assert reader.in_flight == 1


def test_a_message_twice_in_one_transaction_takes_effect_once(router, nested, effects):
    made = router()
    delivered = []

    def twice():
        delivered.extend(deliver(made, *numbered(1)) for _ in range(2))

    nested(twice)
    assert [len(item.acked) for item in delivered] == [1, 1]
    assert effects("m-0") == [1]


# --- the seed's variant -------------------------------------------------------------------------


@pytest.fixture
def seed_router(redis_client):
    def make(run=lambda item: None, **settings):
        made = Router()
        made.use(
            Inbox("billing", mode="setnx", client=redis_client, **settings),
            Transaction(redis_client),
        )

        @made.raw(name="handler")
        def handle(item: Message[bytes]) -> None:
            commands(redis_client).incr(f"effect-{item.id}")
            run(item)

        return made

    return make


def test_setnx_lets_the_first_pass_and_acks_the_second(redis_client, seed_router, effects):
    made = seed_router(retention=100)
    for _ in range(2):
        assert len(deliver(made, *numbered(2)).acked) == 2
    assert effects("m-0", "m-1") == [1, 1]
    assert 0 < redis_client.pttl(key("m-0")) <= 100_000


def test_setnx_deletes_the_key_when_the_handler_fails(redis_client, seed_router, effects):
    failures = [ZeroDivisionError()]

    def fail_once(item):
        if item.id == "m-1" and failures:
            raise failures.pop()

    made = seed_router(fail_once)
    assert ids(deliver(made, *numbered(3)).acked) == ["m-0", "m-1", "m-2"]
    failures.extend([ZeroDivisionError(), ZeroDivisionError()])
    assert ids(deliver(made, *numbered(1, first=1)).acked) == ["m-1"]
    assert effects("m-0", "m-1", "m-2") == [1, 1, 1]


def test_setnx_a_message_that_fails_can_come_again(redis_client, seed_router, effects):
    failures = [ZeroDivisionError()]

    def fail_once(item):
        if failures:
            raise failures.pop()

    made = seed_router(fail_once)
    assert len(deliver(made, *numbered(1)).nacked) == 1
    assert redis_client.keys() == []
    assert len(deliver(made, *numbered(1)).acked) == 1
    assert effects("m-0") == [1]


def test_setnx_keys_expire(seed_router, effects):
    made = seed_router(retention=0.1)
    deliver(made, *numbered(1))
    time.sleep(0.15)
    deliver(made, *numbered(1))
    assert effects("m-0") == [2]


def test_setnx_takes_a_key_function(seed_router, effects):
    made = seed_router(key=lambda item: item.attributes["idempotencykey"])
    for name in ("m-0", "m-1"):
        deliver(made, message(id=name, idempotencykey="same"))
    assert effects("m-0", "m-1") == [1, 0]


def test_setnx_a_message_without_id_is_refused_and_claims_nothing(redis_client, seed_router):
    [error] = deliver(seed_router(), message(id="")).errors
    assert isinstance(error, PermanentError)
    assert redis_client.keys() == []


def test_setnx_stands_outside_the_transaction(redis_client):
    made = Router()
    made.use(Transaction(redis_client), Inbox("billing", mode="setnx", client=redis_client))
    with pytest.raises(ConfigError, match="order"):
        made.start()


def test_r1_setnx_loses_the_message_of_a_crash_as_its_documentation_says(
    redis_client, seed_router, effects
):

    # What a process leaves behind that was killed after SET NX and before EXEC:
    redis_client.set(key("m-0"), "done", px=60_000)
    assert len(deliver(seed_router(), *numbered(1)).acked) == 1  # acked, and gone
    assert effects("m-0") == [0]  # without any effect


def test_a_router_may_go_from_setnx_to_leased(router, seed_router, effects):
    deliver(seed_router(), *numbered(1))
    assert len(deliver(router(), *numbered(1)).acked) == 1
    assert effects("m-0") == [1]
