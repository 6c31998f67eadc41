"""The leases of a transport: one wait for a silent server, and no connection left at the end."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import redis

from conquiet.kombu.layout import Keys
from conquiet.kombu.lease import Lease, Leases, keeper
from conquiet.kombu.settlement import Settlement


@pytest.fixture
def leases(monkeypatch):
    """A group that is tested without the thread."""
    monkeypatch.setattr(keeper, "add", Mock())
    monkeypatch.setattr(keeper, "hurry", Mock())
    return Leases()


def take(leases, client, seconds=60.0):
    settlement = Settlement(Keys(), "me", leases.hurry)
    client = leases.client(lambda: client)
    lease = Lease(client, Keys(), "me", settlement, seconds, None, leases.pulse)
    leases.add(lease)
    return lease


def server():
    return Mock(connection_pool=Mock(spec=["disconnect"]))


def silent():
    client = server()
    client.execute_command.side_effect = redis.ConnectionError("no answer")
    return client


def test_a_silent_server_is_waited_for_once_in_a_round(leases):
    client = silent()
    take(leases, client)
    take(leases, client)
    assert leases.renew() < 0.1, "the other lease is still due"
    assert client.execute_command.call_count == 1
    assert leases.renew() > 1
    assert client.execute_command.call_count == 2


def test_the_connections_are_closed_when_the_last_lease_is_over(leases):
    client = server()
    one, other = take(leases, client), take(leases, client)
    for lease in (one, other):
        assert not client.connection_pool.disconnect.called
        assert leases.renew() is not None
        leases.remove(lease)
    assert leases.renew() is None
    client.connection_pool.disconnect.assert_called_once_with(inuse_connections=False)


def test_an_ack_outlives_its_lease_until_redis_confirms_it(leases):
    client = silent()
    lease = take(leases, client)
    lease.settlement.ack("a", "1")
    leases.remove(lease)
    lease.settlement.since = -math.inf
    assert leases.renew() is not None
    assert lease.settlement.places() == [("a", "1")]
    client.execute_command.side_effect = None
    lease.settlement.since = -math.inf
    leases.renew()
    assert not lease.settlement
    assert leases.renew() is None


def test_many_acks_wake_the_thread_once(leases):
    lease = take(leases, server())
    before = keeper.hurry.call_count
    for number in range(10):
        lease.settlement.ack("a", str(number))
    assert keeper.hurry.call_count == before + 1
    leases.renew()
    lease.settlement.ack("a", "10")
    assert keeper.hurry.call_count == before + 2
