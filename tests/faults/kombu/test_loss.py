"""SIGKILL of busy consumers and of Redis: none of the messages is lost."""

from __future__ import annotations

import pytest
from tests.faults.kombu import loss
from tests.faults.kombu.consumer import PREFETCH


def test_no_message_is_lost_when_consumers_and_redis_are_killed(private_redis, tmp_path):
    found = loss.measure("redis-streams", private_redis, tmp_path, messages=1_000, kills=5)
    assert found.lost == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_message_of_12000_is_lost_by_60_kills(private_redis, tmp_path):
    found = loss.measure("redis-streams", private_redis, tmp_path, messages=12_000, kills=60)
    assert found.lost == 0
    # Of each victim no more than it may hold, and the server's death is one more.
    assert found.duplicates <= (found.kills + 1) * PREFETCH
