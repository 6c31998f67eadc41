"""The fence of the leased inbox: who lost a lease writes nothing, and how leases are kept."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from tests.integration.redis.conftest import ids, numbered
from tests.integration.redis.inboxes import key
from tests.waiting import eventually

from conquiet.redis import InProgress
from conquiet.redis.connection import Connection
from conquiet.redis.lease import LeaseTerms
from conquiet.testing import deliver
from conquiet.testing.contracts.transaction import elsewhere


def stop_renewing(monkeypatch):
    monkeypatch.setattr("conquiet.redis.lease.Leases.renew", lambda self: None)


def test_a_slow_holder_whose_lease_ran_out_writes_nothing(
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


def test_a_slow_holder_is_nacked_while_another_holds_the_lease(
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


def test_a_batch_that_is_fenced_runs_again_one_by_one(redis_client, router, effects, monkeypatch):
    stop_renewing(monkeypatch)
    stolen = []

    def steal(item):
        if item.id == "m-1" and not stolen:
            stolen.append(redis_client.set(key("m-1"), "processing:stolen", px=60_000))

    delivered = deliver(router(steal), *numbered(3))
    assert ids(delivered.acked) == ["m-0", "m-2"]
    assert [type(error) for error in delivered.errors] == [InProgress]
    assert effects("m-0", "m-1", "m-2") == [1, 0, 1]


def test_a_lease_that_ended_and_that_nobody_took_does_no_harm(router, effects, monkeypatch):
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
    exchange = Connection.exchange

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

    monkeypatch.setattr(Connection, "exchange", interrupted)
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
    terms = LeaseTerms(lease=30.0, retention=60.0)
    terms.abandon({b"key": b"processing:1"})
    assert not terms.take_over(b"other", b"processing:1")
    assert terms.take_over(b"key", b"processing:1")
    assert not terms.take_over(b"key", b"processing:1")


def test_the_thread_that_renews_ends_when_there_is_nothing_to_renew(router):
    deliver(router(lease=0.1), *numbered(1))
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name == "conquiet-leases"], timeout=10
    )


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_changes_nothing(router, effects, monkeypatch, jump):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    made = router(lambda item: time.sleep(0.2), lease=0.1)
    for _ in range(2):
        assert len(deliver(made, *numbered(2)).acked) == 2
    assert effects("m-0", "m-1") == [1, 1]
