"""The leased inbox: its two states, its keys, acks in the EXEC, nesting."""

from __future__ import annotations

import pytest
import redis
from tests.integration.redis.conftest import GROUP, STREAM, ids, numbered
from tests.integration.redis.inboxes import key
from tests.waiting import eventually

from conquiet.errors import ConfigError, PermanentError
from conquiet.message import Message
from conquiet.redis import Inbox, InProgress, Outbox, Transaction, commands
from conquiet.router import Router
from conquiet.testing import deliver, message
from conquiet.worker import Worker


@pytest.fixture
def names(recorded):
    """The names of the commands that a function sends, apart from redis-py's greetings."""
    greetings = {"HELLO", "CLIENT", "SELECT"}

    def ask(run):
        return [name for c in recorded(run) if (name := c.split()[0]) not in greetings]

    return ask


# --- the two states ---------------------------------------------------------------------------


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


def test_a_crash_between_lease_and_exec_costs_the_lease_and_not_the_message(
    redis_client, router, effects
):
    redis_client.set(key("m-0"), "processing:of-a-process-that-died", px=300)
    made = router()
    [error] = deliver(made, *numbered(1)).errors
    assert isinstance(error, InProgress)
    assert effects("m-0") == [0]
    eventually(lambda: deliver(made, *numbered(1)).acked)
    assert effects("m-0") == [1]


def test_a_message_in_progress_elsewhere_is_nacked_and_its_neighbours_are_not(
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


def test_a_message_is_forgotten_after_its_retention(redis_client, router, effects):
    made = router(retention=1.0)
    deliver(made, *numbered(1))
    deliver(made, *numbered(1))
    assert effects("m-0") == [1]
    eventually(lambda: not redis_client.exists(key("m-0")))
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


# --- keys --------------------------------------------------------------------------------


def test_the_key_names_consumer_source_and_id_and_has_a_hash_tag(redis_client, router):
    deliver(router(), message(id="a-1", source="/shop"))
    assert redis_client.keys("conquiet:*") == [
        b"conquiet:inbox:{billing}:billing/handler:/shop a-1"
    ]


def test_two_services_on_one_redis_do_not_swallow_each_others_messages(router, effects):
    for subscriber in ("billing", "shipping", "billing"):
        deliver(router(inbox=Inbox(subscriber)), *numbered(1))
    assert effects("m-0") == [2]


def test_names_with_colons_cannot_be_mistaken(router, effects):
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


# --- acks in the EXEC -------------------------------------------------------------------------


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


# --- a transaction inside another -------------------------------------------------------------


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
