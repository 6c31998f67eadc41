"""The seed's own inbox: SET NX before the transaction, and what it loses."""

from __future__ import annotations

import time

import pytest
from tests.integration.redis.conftest import ids, numbered
from tests.integration.redis.inboxes import key

from conquiet.errors import ConfigError, PermanentError
from conquiet.message import Message
from conquiet.redis import Inbox, Transaction, commands
from conquiet.router import Router
from conquiet.testing import deliver, message


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


def test_setnx_loses_the_message_of_a_crash_as_its_documentation_says(
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
