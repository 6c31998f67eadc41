"""Transaction: one MULTI … EXEC per batch, and what becomes of it."""

from __future__ import annotations

import re
import threading

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.faults.proxy import Proxy
from tests.integration.redis.conftest import ids, numbered

from conquiet.errors import Blameless, ConfigError, StoreError
from conquiet.memory import Log
from conquiet.message import Message
from conquiet.middleware import DeadLetter
from conquiet.redis import (
    Inbox,
    PartialExecError,
    StreamSink,
    StreamSource,
    Transaction,
    UnknownOutcome,
    commands,
)
from conquiet.redis.transaction import ExecRefused
from conquiet.router import Router
from conquiet.testing import deliver, message


@pytest.fixture
def router(redis_client):
    """A router whose handler is given; `Transaction` comes first."""

    def make(handle, *middlewares, outside=(), client=None):
        made = Router()
        made.use(*outside, Transaction(client or redis_client), *middlewares)
        made.raw(name="handler", source="/test")(handle)
        return made

    return make


@pytest.fixture
def proxied(redis_client):
    """A proxy before the worker's Redis, and a client that knows only the proxy."""
    settings = redis_client.connection_pool.connection_kwargs
    with Proxy(settings["port"]) as proxy:
        client = redis.Redis(
            port=proxy.port, db=settings["db"], retry=Retry(NoBackoff(), 0), socket_timeout=1.0
        )
        with client:
            yield proxy, client


@pytest.fixture
def sent(recorded):
    """What a function sends, apart from redis-py's greetings."""
    greeting = re.compile(r"(HELLO|CLIENT|SELECT)\b")
    return lambda run: [command for command in recorded(run) if not greeting.match(command)]


# --- one EXEC -----------------------------------------------------------------------------------


def test_a_batch_is_one_multi_and_one_exec(redis_client, router, sent):
    def handle(item: Message[bytes]) -> None:
        commands(redis_client).set(item.id, 1)

    made = router(handle)
    deliver(made, *numbered(1, 99))
    seen = sent(lambda: deliver(made, *numbered(3)))
    assert seen == ["MULTI", "SET m-0 1", "SET m-1 1", "SET m-2 1", "EXEC"]


def test_a_failed_handler_sends_nothing_at_all(redis_client, router, sent):
    def handle(item: Message[bytes]) -> None:
        commands(redis_client).set(item.id, 1)
        raise ZeroDivisionError

    assert sent(lambda: deliver(router(handle), *numbered(1))) == []


def test_a_transaction_without_commands_sends_nothing(router, sent):
    def handle(item: Message[bytes]) -> None:
        pass

    assert sent(lambda: deliver(router(handle), *numbered(3))) == []


def test_an_async_handler_finds_the_transaction_of_its_worker(redis_client, router):
    async def handle(item: Message[bytes]) -> None:
        commands(redis_client).set(item.id, 1)
        if item.id == "m-1":
            raise ZeroDivisionError

    made = router(handle)
    assert ids(deliver(made, *numbered(2)).acked) == ["m-0"]
    made.close()
    assert redis_client.keys() == [b"m-0"]


def test_threads_have_transactions_of_their_own(redis_client, router):
    barrier = threading.Barrier(4)

    def handle(item: Message[bytes]) -> None:
        commands(redis_client).rpush(f"list-{item.id}", *range(50))
        barrier.wait(10)

    made = router(handle)
    threads = [
        threading.Thread(target=deliver, args=(made, *numbered(1, first=n))) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [redis_client.llen(f"list-m-{n}") for n in range(4)] == [50] * 4


@pytest.mark.parametrize(
    "client", [redis.Redis(single_connection_client=False).pipeline(), object()]
)
def test_what_is_no_client_is_refused(client):
    with pytest.raises(ConfigError):
        Transaction(client)


def test_a_client_of_one_connection_is_refused(redis_url):
    with (
        redis.Redis.from_url(redis_url, single_connection_client=True) as client,
        pytest.raises(ConfigError, match="single_connection_client"),
    ):
        Transaction(client)


def test_the_connection_goes_back_to_its_pool_whatever_happens(redis_url, redis_client):
    pool = redis.BlockingConnectionPool.from_url(redis_url, max_connections=1, timeout=1)
    with redis.Redis(connection_pool=pool) as client:
        made = Router()
        made.use(Transaction(client), Inbox("billing"))
        made.raw(name="handler")(_failing_for(client))
        for _ in range(5):
            deliver(made, *numbered(2), message(id="bad"))
        assert client.ping()
    pool.disconnect()


def _failing_for(client):
    def handle(item: Message[bytes]) -> None:
        commands(client).incr("n")
        if item.id == "bad":
            raise ZeroDivisionError

    return handle


# --- EXEC is no rollback --------------------------------------------------------------------


def wrong_for(redis_client, bad):
    def handle(item: Message[bytes]) -> None:
        commands(redis_client).incr(f"before-{item.id}")
        if item.id == bad:
            commands(redis_client).lpush("text", "an error when it runs")
        commands(redis_client).incr(f"after-{item.id}")

    return handle


def test_partly_applied_is_permanent_and_names_the_command(redis_client, router):
    redis_client.set("text", "not a list")
    made = router(wrong_for(redis_client, "m-0"), Inbox("billing"))
    [error] = deliver(made, *numbered(1)).errors
    assert isinstance(error, PartialExecError)
    assert "LPUSH text: WRONGTYPE" in str(error)
    assert "id=m-0" in str(error)
    assert error.failed[0][0] == "LPUSH text"
    assert redis_client.mget("before-m-0", "after-m-0") == [b"1", b"1"]


def test_what_was_partly_applied_is_done_and_does_not_run_again(redis_client, router):
    redis_client.set("text", "not a list")
    made = router(wrong_for(redis_client, "m-0"), Inbox("billing"))
    deliver(made, *numbered(1))
    assert len(deliver(made, *numbered(1)).acked) == 1
    assert redis_client.get("before-m-0") == b"1"


def test_only_the_message_whose_command_failed_goes_to_the_dead_letters(redis_client, router):
    redis_client.set("text", "not a list")
    log = Log()
    made = router(
        wrong_for(redis_client, "m-2"), Inbox("billing"), outside=[DeadLetter(log.sink("dead"))]
    )
    assert len(deliver(made, *numbered(4)).acked) == 4
    [letter] = log.replay()
    assert letter.id == "m-2"
    assert "LPUSH text" in letter.attributes["deadreason"]
    effects = redis_client.mget(*[f"after-m-{n}" for n in range(4)])
    assert effects == [b"1"] * 4


def test_without_the_middleware_the_source_writes_the_dead_letter(redis_client, router):
    redis_client.set("text", "not a list")
    made = router(wrong_for(redis_client, "m-1"), Inbox("billing"))
    StreamSink(redis_client, "orders").publish(numbered(3))
    source = StreamSource(redis_client, "orders", "billing")
    made.process(source.read(10, 1.0))
    assert redis_client.xpending("orders", "billing")["pending"] == 0
    assert source.in_flight == 0
    source.close()
    [(_, letter)] = redis_client.xrange("orders:dead")
    assert letter[b"id"] == b"m-1"
    assert b"LPUSH text" in letter[b"deadreason"]


def test_a_command_that_cannot_be_queued_aborts_it_all_and_is_blamed_alone(redis_client, router):
    def handle(item: Message[bytes]) -> None:
        commands(redis_client).incr(f"effect-{item.id}")
        if item.id == "m-1":
            commands(redis_client).execute_command("HSET", "too few")

    delivered = deliver(router(handle, Inbox("billing")), *numbered(3))
    assert ids(delivered.acked) == ["m-0", "m-2"]
    [error] = delivered.errors
    assert isinstance(error, ExecRefused)
    assert "HSET too few" in str(error)
    effects = redis_client.mget(*[f"effect-m-{n}" for n in range(3)])
    assert effects == [b"1", None, b"1"]


def test_a_server_without_memory_is_nobodys_fault(redis_client, router):
    def handle(item: Message[bytes]) -> None:
        commands(redis_client).set(item.id, "x")

    made = router(handle)
    deliver(made, *numbered(1, 99))
    redis_client.config_set("maxmemory", 1)
    try:
        [error] = deliver(made, *numbered(1)).errors
    finally:
        redis_client.config_set("maxmemory", 0)
    assert isinstance(error, StoreError)
    assert "maxmemory" in str(error)
    assert len(deliver(made, *numbered(1)).acked) == 1


def test_after_a_refusal_by_the_server_it_is_looked_for_anew(redis_client, router):
    """Behind a Sentinel it may be another one: the old master refuses as a replica."""

    def handle(item: Message[bytes]) -> None:
        commands(redis_client).set(item.id, "x")

    made = router(handle)
    deliver(made, *numbered(1))
    before = redis_client.client_id()
    redis_client.config_set("min-replicas-to-write", 1)
    try:
        [error] = deliver(made, *numbered(1, 1)).errors
    finally:
        redis_client.config_set("min-replicas-to-write", 0)
    assert isinstance(error, StoreError)
    assert redis_client.client_id() != before


def test_a_user_without_multi_is_told_before_anything_takes_effect(redis_client, redis_url):
    redis_client.execute_command(
        *("ACL", "SETUSER", "clerk", "on", ">pass", "~*", "+@all", "-multi")
    )
    try:
        settings = redis_client.connection_pool.connection_kwargs
        with redis.Redis(
            port=settings["port"], db=settings["db"], username="clerk", password="pass"
        ) as client:
            made = Router()
            made.use(Transaction(client))

            @made.raw(name="handler")
            def handle(item: Message[bytes]) -> None:
                commands(client).set("k", 1)

            [error] = deliver(made, *numbered(1)).errors
        assert isinstance(error, StoreError)
        assert "multi" in str(error).lower()
        assert redis_client.get("k") is None
    finally:
        redis_client.execute_command("ACL", "DELUSER", "clerk")


# --- no reply -------------------------------------------------------------------------------


def counting(client):
    def handle(item: Message[bytes]) -> None:
        commands(client).incr(f"effect-{item.id}")

    return handle


def test_a_lost_reply_of_exec_is_found_done_at_the_next_delivery(redis_client, router, proxied):
    proxy, client = proxied

    def handle(item: Message[bytes]) -> None:
        commands(client).incr(f"effect-{item.id}")
        if not redis_client.set("cut", 1, nx=True):
            return
        proxy.lose_replies(1)

    made = router(handle, Inbox("billing"), client=client)
    delivered = deliver(made, *numbered(2))
    assert [type(error) for error in delivered.errors] == [UnknownOutcome] * 2
    assert all(isinstance(error, Blameless) for error in delivered.errors)
    assert redis_client.get("effect-m-0") == b"1"
    assert len(deliver(made, *numbered(2)).acked) == 2
    assert redis_client.mget("effect-m-0", "effect-m-1") == [b"1", b"1"]


def test_the_inbox_key_survives_an_ambiguous_error(redis_client, router, proxied):
    proxy, client = proxied

    def handle(item: Message[bytes]) -> None:
        commands(client).incr(f"effect-{item.id}")
        proxy.refuse()

    deliver(router(handle, Inbox("billing", lease=60), client=client), *numbered(1))
    proxy.heal()
    [key] = redis_client.keys("conquiet:inbox:*")
    assert redis_client.get(key).startswith(b"processing:")
    assert redis_client.get("effect-m-0") is None


def test_what_was_not_executed_runs_at_the_next_delivery_without_waiting_for_its_lease(
    redis_client, router, proxied
):
    proxy, client = proxied
    faults = [proxy.cut]

    def handle(item: Message[bytes]) -> None:
        commands(client).incr(f"effect-{item.id}")
        if faults:
            faults.pop()()

    made = router(handle, Inbox("billing", lease=3600), client=client)
    delivered = deliver(made, *numbered(3))
    if delivered.nacked:  # the cut was noticed only when EXEC had been sent
        delivered = deliver(made, *numbered(3))
    assert len(delivered.acked) == 3
    assert redis_client.mget(*[f"effect-m-{n}" for n in range(3)]) == [b"1"] * 3


def test_a_lost_reply_to_the_lease_does_not_cost_the_lease(redis_client, router, proxied):
    proxy, client = proxied

    def handle(item: Message[bytes]) -> None:
        commands(client).incr(f"effect-{item.id}")

    made = router(handle, Inbox("billing", lease=3600), client=client)
    deliver(made, *numbered(1, 99))  # the pool is warm now
    proxy.lose_replies(1)
    assert len(deliver(made, *numbered(2)).acked) == 2
    assert redis_client.mget("effect-m-0", "effect-m-1") == [b"1", b"1"]


def test_without_an_inbox_a_lost_reply_is_not_tried_again_by_itself(redis_client, router, proxied):
    proxy, client = proxied

    def handle(item: Message[bytes]) -> None:
        commands(client).incr("effect")

    made = router(handle, client=client)
    deliver(made, *numbered(1))  # the pool is warm now
    proxy.lose_replies(1)
    [error] = deliver(made, *numbered(1, first=1)).errors
    assert isinstance(error, UnknownOutcome)
    assert redis_client.get("effect") == b"2"


def test_a_connection_that_is_replaced_between_watch_and_exec_writes_nothing(
    redis_client, router, redis_url
):
    with redis.Redis.from_url(redis_url) as client:
        tries = []

        def handle(item: Message[bytes]) -> None:
            commands(client).incr("effect")
            tries.append(item.id)
            if len(tries) == 1:  # as an operator, a failover or redis-py itself may do
                client.connection_pool.disconnect(inuse_connections=True)

        made = router(handle, Inbox("billing"), client=client)
        assert len(deliver(made, *numbered(1)).acked) == 1
    assert len(tries) == 2
    assert redis_client.get("effect") == b"1"


# --- watching data ------------------------------------------------------------------------------


def test_watched_data_that_changes_makes_the_handler_run_again(redis_client, router):
    redis_client.set("balance", 10)
    runs = []

    def handle(item: Message[bytes]) -> None:
        found = commands(redis_client)
        found.watch("balance")
        balance = int(found.reader.get("balance"))
        runs.append(balance)
        if len(runs) == 1:
            redis_client.incr("balance")
        found.set("balance", balance * 2)

    assert len(deliver(router(handle, Inbox("billing")), *numbered(1)).acked) == 1
    assert runs == [10, 11]
    assert redis_client.get("balance") == b"22"


def test_a_read_that_fails_in_a_handler_is_the_stores_fault(redis_client, router, proxied):
    proxy, client = proxied

    def handle(item: Message[bytes]) -> None:
        proxy.refuse()
        client.get("k")

    [error] = deliver(router(handle, client=client), *numbered(1)).errors
    assert isinstance(error, StoreError)


def test_a_server_of_the_handlers_own_that_is_away_holds_up_no_neighbour(redis_client, router):
    other = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))

    def handle(item: Message) -> None:
        commands(redis_client).set(f"done:{item.id}", 1)
        if item.id == "m-3":
            other.get("rate")

    delivered = deliver(router(handle, Inbox("test")), *numbered(8))
    assert ids(delivered.nacked) == ["m-3"]
    assert not isinstance(delivered.errors[0], Blameless)
    assert len(redis_client.keys("done:*")) == 7
