"""The world does its worst to worker, relay and consumer; nothing is lost, nothing happens twice.

Every thousandth command is poison. Long: each fault has six processes and two servers to itself.
"""

from __future__ import annotations

import random
import time

import pytest
from tests import needs
from tests.faults.invariants import told, violations
from tests.faults.world.faults import FAULTS, NOT_DONE, named
from tests.faults.world.stack import World, wait_for

ROUNDS = 3
RATE = 300.0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_every_command_takes_effect_once_and_every_event_arrives(fault, tmp_path, redis_server):
    withstand(fault, tmp_path, "claim")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_the_same_with_relays_that_follow_the_write_ahead_log(fault, tmp_path, redis_server):
    withstand(fault, tmp_path, "wal")


def withstand(fault, folder, read_from):
    dice = random.Random(fault.__name__)
    with World(folder, rate=RATE, messages=None, proxied=True, read_from=read_from) as world:
        assert wait_for(lambda: world.sender.sent > 300, 60)
        for _ in range(ROUNDS):
            happened = fault(world, dice)
            print(named(fault), happened)
            if happened == NOT_DONE:
                pytest.skip(f"{needs.PREFIX}the right to mount a tmpfs: run it as root")
            time.sleep(0.5)
        assert wait_for(lambda: world.sender.sent > 1_500, 60)
        world.sender.stop()
        left = world.drain(180)
        assert not left, told(left)
        # They live, and have nothing to do: whatever is open now and then is closed again.
        assert wait_for(lambda: not world.transactions(), 30), told(world.transactions())
        stopped = world.stop()
        assert not stopped, told(stopped)
        assert not world.ended(), told(world.ended())
        found = violations(world.facts())
        assert not found, told(found)
