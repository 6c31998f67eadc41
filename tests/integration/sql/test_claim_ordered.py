"""Claims that keep the order of every key."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, update
from tests.integration.sql.claiming import (
    OUTBOX,
    ListSink,
    fill,
    rested,
    row,
    rows,
    running,
    store,
    the,
    unpublished,
)
from tests.waiting import eventually

from conquiet.acking import settle
from conquiet.errors import GivenBack
from conquiet.message import Message
from conquiet.relay import Outcome, Relay, publish_batch
from conquiet.sql.outbox_source import OutboxSource


def test_the_rows_of_a_key_come_in_order_and_several_at_once(engine, open_source):
    store(engine, *(row(n, key="ab"[n % 2]) for n in range(1, 9)))
    messages = open_source(ordered=True).read(8, 0)
    for key in "ab":
        numbers = [int(m.id[2:]) for m in messages if m.key == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 4


def test_a_key_is_published_by_one_relay_at_a_time(engine, open_source):
    store(engine, *(row(n, key="ab"[n % 2]) for n in range(1, 9)))
    ours, theirs = open_source(ordered=True), open_source(ordered=True)
    mine = ours.read(1, 0)
    assert len(mine) == 1
    others = theirs.read(10, 0)
    assert {message.key for message in others}.isdisjoint({mine[0].key})


def test_a_stuck_key_blocks_only_itself(engine, open_source):
    store(engine, row(1, key="stuck"), row(2, key="stuck"), row(3, key="free"), row(4))
    source = open_source(ordered=True, max_attempts=1)
    sink = ListSink()
    sink.bad = {"e-1"}
    publish_batch(source, sink, 10, ordered=True)
    for _ in range(3):
        rested(source)
        publish_batch(source, sink, 10, ordered=True)
    assert sorted(sink.ids) == ["e-3", "e-4"]
    assert the(engine, "e-1").parked_at is not None
    with engine.begin() as connection:  # what `conquiet outbox retry` does
        connection.execute(update(OUTBOX).values(parked_at=None, attempts=0))
    sink.bad = set()
    rested(source)
    publish_batch(source, sink, 10, ordered=True)
    assert sink.ids[-2:] == ["e-1", "e-2"]


def test_a_key_that_got_stuck_while_it_was_claimed_is_left_alone(postgres, monkeypatch):
    """Its last holder parks a row and lets go between the two statements of a claim."""
    store(postgres, row(1, key="k"), row(2, key="k"), row(3, key="free"))
    source = OutboxSource(postgres, ordered=True, wakeup=False)
    lock_keys = source._claimer._lock_keys

    def lock_then_park(*arguments):
        keys = lock_keys(*arguments)
        with postgres.begin() as connection:
            parked = update(OUTBOX).where(OUTBOX.c.event_id == "e-1")
            connection.execute(parked.values(parked_at=func.now()))
        return keys

    monkeypatch.setattr(source._claimer, "_lock_keys", lock_then_park)
    assert [message.id for message in source.read(10, 0)] == ["e-3"]
    source.close()


@pytest.mark.parametrize(("locked", "claimed"), [("e-1", ["e-5"]), ("e-3", ["e-1", "e-2", "e-5"])])
def test_nothing_overtakes_a_row_that_another_transaction_has_locked(postgres, locked, claimed):
    store(postgres, *(row(n, key="k") for n in range(1, 5)), row(5, key="free"))
    source = OutboxSource(postgres, ordered=True, wakeup=False)
    with postgres.begin() as other:
        other.execute(select(OUTBOX).where(OUTBOX.c.event_id == locked).with_for_update())
        messages = source.read(20, 0)
        assert [message.id for message in messages] == claimed
        settle([message.acking for message in messages])
    rest = source.read(20, 0)
    assert [message.id for message in rest] == [f"e-{n}" for n in range(len(claimed), 5)]
    settle([message.acking for message in rest])
    source.close()


def test_a_key_is_locked_by_whatever_name_a_relay_knows_the_table(postgres):
    store(postgres, *(row(n, key="k") for n in range(1, 5)))
    ours = OutboxSource(postgres, "outbox", ordered=True, wakeup=False)
    theirs = OutboxSource(postgres, "public.outbox", ordered=True, wakeup=False)
    assert [message.id for message in ours.read(1, 0)] == ["e-1"]
    assert theirs.read(10, 0) == []
    ours.close()
    assert [message.id for message in theirs.read(10, 0)] == [f"e-{n}" for n in range(1, 5)]
    theirs.close()


def test_a_resting_key_rests_whole(engine, open_source):
    store(engine, row(1, key="k"), row(2, key="k"))
    source = open_source(ordered=True)
    first, second = source.read(10, 0)
    settle([], [(first.acking, ValueError("no")), (second.acking, GivenBack("its turn"))])
    assert source.read(10, 0) == []
    rested(source)
    assert [message.id for message in source.read(10, 0)] == ["e-1", "e-2"]


def test_an_empty_key_is_a_key_too(engine, open_source):
    store(engine, row(1, key=""), row(2, key="a"))
    assert len(open_source(ordered=True).read(10, 0)) == 2


def test_rows_without_key_are_not_starved_by_keys(engine, open_source):
    store(engine, *(row(n, key=f"k{n}") for n in range(1, 21)), row(21))
    source = open_source(ordered=True)
    messages = source.read(4, 0)
    seen = {message.id for message in messages}
    while messages and "e-21" not in seen and len(seen) <= 20:
        settle([message.acking for message in messages])
        messages = source.read(4, 0)
        seen |= {message.id for message in messages}
    assert "e-21" in seen


def test_every_key_gets_its_turn(engine, open_source):
    """A key that is written all the time does not keep the others from being claimed."""
    store(engine, *(row(n, key=f"k{n % 5}") for n in range(1, 51)))
    source = open_source(ordered=True)
    seen = set()
    for number in range(10):
        store(engine, row(100 + number, key="k0"))
        messages = source.read(1, 0)
        seen |= {message.key for message in messages}
        settle([message.acking for message in messages])
    assert seen == {f"k{n}" for n in range(5)} or engine.dialect.name == "sqlite"


def test_several_relays_keep_the_order_of_every_key(engine):
    store(engine, *(row(n, key=f"k{n % 7}") for n in range(1, 301)))
    sink = ListSink()
    relays = [
        Relay(
            OutboxSource(engine, poll=0.02, wakeup=False, ordered=True),
            sink,
            batch_size=9,
            ordered=True,
        )
        for _ in range(3)
    ]
    with running(relays):
        eventually(lambda: unpublished(engine) == 0, timeout=30)
    assert len(sink.ids) == 300
    for key in range(7):
        numbers = [int(id_[2:]) for id_ in sink.ids if int(id_[2:]) % 7 == key]
        assert numbers == sorted(numbers)


def test_an_ordered_batch_leaves_to_the_next_what_there_is_no_time_for(engine, open_source):
    fill(engine, 3, key="a")
    sink = ListSink()
    relay = Relay(open_source(ordered=True), sink, ordered=True, publish_seconds=0)
    assert relay.run_once() == Outcome(published=1)
    assert unpublished(engine) == 2
    while relay.run_once().published:
        pass
    assert sink.ids == ["e-1", "e-2", "e-3"]
    assert {row.attempts for row in rows(engine)} == {0}


def test_a_relay_publishes_nothing_after_a_failed_row_of_the_same_key():
    sink = ListSink()
    sink.bad = {"2"}
    messages = [
        Message(b"", {"id": str(n), "type": "t", "partitionkey": "k" if n < 4 else "other"})
        for n in range(1, 6)
    ]

    class Once:
        def read(self, limit, timeout):
            return messages

        def close(self): ...

    publish_batch(Once(), sink, 10, ordered=True)
    assert sorted(sink.ids) == ["1", "4", "5"]
