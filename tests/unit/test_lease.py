"""LeaseKeeper: renews what is due, outlives errors, ends with the last lease, survives a fork."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest
from tests.waiting import eventually

from conquiet.lease import LeaseKeeper


class Lease:
    """Counts its renewals; `does` is called by each and says when the next is due."""

    def __init__(self, does=lambda: 0.02):
        self.times = []
        self.does = does

    def renew(self):
        self.times.append(time.monotonic())
        return self.does()


@pytest.fixture
def keeper(request):
    return LeaseKeeper(request.node.name)


def threads(keeper):
    return [thread for thread in threading.enumerate() if thread.name == keeper.name]


def test_a_lease_is_renewed_after_its_interval_and_then_as_it_asks(keeper):
    started = time.monotonic()
    lease = Lease(lambda: 0.1)
    keeper.add(lease, 0.05)
    eventually(lambda: len(lease.times) >= 3)
    keeper.remove(lease)
    first, second, third = lease.times[:3]
    assert first - started >= 0.05
    assert second - first >= 0.1
    assert third - second >= 0.1


def test_leases_that_are_added_at_once_share_a_thread(keeper):
    leases = [Lease() for _ in range(20)]
    barrier = threading.Barrier(len(leases))

    def add(lease):
        barrier.wait()
        keeper.add(lease, 60)

    adders = [threading.Thread(target=add, args=[lease]) for lease in leases]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert len(threads(keeper)) == 1
    for lease in leases:
        keeper.remove(lease)


def test_a_removed_lease_is_renewed_no_more_and_the_thread_ends(keeper):
    lease = Lease()
    keeper.add(lease, 0.01)
    eventually(lambda: lease.times)
    keeper.remove(lease)
    assert lease not in keeper
    eventually(lambda: not threads(keeper))
    count = len(lease.times)
    keeper.add(other := Lease(), 0.01)  # a new thread
    eventually(lambda: other.times)
    keeper.remove(other)
    assert len(lease.times) == count


def test_many_leases_share_one_thread(keeper):
    leases = [Lease() for _ in range(20)]
    for lease in leases:
        keeper.add(lease, 0.01)
    assert len(threads(keeper)) == 1
    eventually(lambda: all(len(lease.times) > 1 for lease in leases))
    for lease in leases:
        keeper.remove(lease)
    assert len(keeper) == 0


def test_short_leases_one_after_another_share_one_thread(keeper):
    seen = set()
    for _ in range(200):
        lease = Lease()
        keeper.add(lease, 10.0)
        seen.update(threads(keeper))
        keeper.remove(lease)
    assert len(seen) == 1


def test_none_ends_the_renewals(keeper):
    lease = Lease(lambda: None)
    keeper.add(lease, 0.01)
    eventually(lambda: lease not in keeper)
    assert len(lease.times) == 1


def test_an_error_is_logged_and_stops_neither_its_lease_nor_the_others(keeper, caplog):
    def fail():
        raise ConnectionError("no answer")

    broken, fine = Lease(fail), Lease()
    with caplog.at_level(logging.WARNING, "conquiet.lease"):
        keeper.add(broken, 0.02)
        keeper.add(fine, 0.02)
        eventually(lambda: len(broken.times) > 1 and len(fine.times) > 2)
    keeper.remove(broken)
    keeper.remove(fine)
    assert f"{keeper.name}: could not renew" in caplog.text
    assert "no answer" in caplog.text


def test_a_lease_that_is_added_twice_keeps_the_sooner_time(keeper):
    lease = Lease(lambda: 60.0)
    keeper.add(lease, 0.05)
    keeper.add(lease, 60.0)
    eventually(lambda: len(lease.times) == 1)
    keeper.add(lease, 0.05)
    eventually(lambda: len(lease.times) == 2)
    keeper.remove(lease)


def test_hurry_wakes_the_thread(keeper):
    lease = Lease(lambda: 60.0)
    keeper.add(lease, 60.0)
    keeper.hurry(lease, 0.02)
    eventually(lambda: len(lease.times) == 1)
    keeper.hurry(lease)
    eventually(lambda: len(lease.times) == 2)
    keeper.hurry(other := Lease())  # not registered: nothing happens
    assert other not in keeper
    keeper.remove(lease)


def test_work_that_comes_while_a_lease_is_renewed_is_not_forgotten(keeper):
    """Whatever the renewal that is running answers: it may not have seen the work."""
    for answer in (60.0, None):
        running, go_on = threading.Event(), threading.Event()

        def does(running=running, go_on=go_on, answer=answer):
            running.set()
            go_on.wait(10)
            return answer

        lease = Lease(does)
        keeper.add(lease, 0.01)
        assert running.wait(10)
        keeper.hurry(lease, 0.01)
        go_on.set()
        eventually(lambda lease=lease: len(lease.times) == 2)
        keeper.remove(lease)


def test_a_slow_renewal_blocks_no_caller(keeper):
    running, go_on = threading.Event(), threading.Event()

    def does():
        running.set()
        go_on.wait(10)
        return 60.0

    slow = Lease(does)
    keeper.add(slow, 0.0)
    assert running.wait(10)
    keeper.add(other := Lease(), 0.0)
    keeper.remove(slow)
    go_on.set()
    eventually(lambda: other.times)
    keeper.remove(other)
    assert slow not in keeper


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_forgets_the_parents_leases_and_keeps_its_own(keeper):
    parents = Lease()
    keeper.add(parents, 0.01)
    eventually(lambda: parents.times)
    with keeper._lock:  # the child must not wait for a lock of the parent
        child = os.fork()
    if child == 0:
        code = 1
        try:
            count = len(parents.times)
            own = Lease()
            assert len(keeper) == 0
            keeper.add(own, 0.01)
            eventually(lambda: len(own.times) > 1)
            assert len(parents.times) == count
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    count = len(parents.times)
    eventually(lambda: len(parents.times) > count)
    keeper.remove(parents)
