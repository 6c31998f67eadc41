"""`outbox_events` in the order of each aggregate, by several relays."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from tests.integration.events.samples import notification, rows
from tests.integration.sql.claiming import ListSink, running
from tests.waiting import eventually

from conquiet.acking import settle
from conquiet.events import EventSource, emit
from conquiet.relay import Relay, publish_batch

Opens = Callable[..., EventSource]


@pytest.fixture
def open_source(engine: Engine) -> Iterator[Opens]:
    opened: list[EventSource] = []

    def make(**options: Any) -> EventSource:
        options = {"poll": 0.02, "wakeup": False, "ordered": True, **options}
        opened.append(EventSource(engine, **options))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


def stored(engine: Engine, *aggregates: uuid.UUID) -> list[str]:
    """An event of each aggregate, in a transaction of its own; their ids."""
    ids = []
    for aggregate in aggregates:
        with Session(engine) as session, session.begin():
            ids += [str(id_) for id_ in emit(session, notification(aggregate_id=aggregate))]
    return ids


def rested(source: EventSource) -> None:
    source.backoff._rows.clear()


def send_again(engine: Engine) -> None:
    """What `conquiet outbox retry --all` does."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_events SET attempt_count = 0"))


def test_nothing_overtakes_an_event_that_another_transaction_has_locked(
    engine: Engine, open_source: Opens
) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no row locks")
    aggregate = uuid.uuid4()
    ids = stored(engine, aggregate, aggregate, aggregate)
    source = open_source()
    with engine.begin() as other:
        lock = text("SELECT 1 FROM outbox_events WHERE id = :id FOR UPDATE")
        other.execute(lock, {"id": ids[0]})
        assert source.read(10, 0) == []
    assert [message.id for message in source.read(10, 0)] == ids


def test_an_aggregate_is_published_by_one_relay_at_a_time(engine, open_source: Opens) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    stored(engine, first, second, first, second)
    ours, theirs = open_source(), open_source()
    [mine] = ours.read(1, 0)
    assert mine.key not in {message.key for message in theirs.read(10, 0)}


def test_a_stuck_aggregate_blocks_only_itself(engine, open_source: Opens) -> None:
    stuck, free = uuid.uuid4(), uuid.uuid4()
    one, two, three, four = stored(engine, stuck, stuck, free, free)
    source = open_source(max_attempts=1)
    sink = ListSink()
    sink.bad = {one}
    for _ in range(3):
        publish_batch(source, sink, 10, ordered=True)
        rested(source)
    assert sink.ids == [three, four]
    send_again(engine)
    sink.bad = set()
    publish_batch(source, sink, 10, ordered=True)
    assert sink.ids == [three, four, one, two]


def test_nothing_overtakes_a_row_that_was_parked_out_of_order(engine, open_source: Opens) -> None:
    """By a relay that kept no order: what is before it may go, what is behind it waits."""
    aggregate = uuid.uuid4()
    one, two, three = stored(engine, aggregate, aggregate, aggregate)
    with engine.begin() as connection:
        parked = text("UPDATE outbox_events SET attempt_count = 10 WHERE id = :id")
        connection.execute(parked, {"id": two})
    source = open_source()
    [message] = source.read(10, 0)
    assert message.id == one
    message.ack()
    assert list(source.read(10, 0)) == []
    send_again(engine)
    assert [message.id for message in source.read(10, 0)] == [two, three]


def test_a_row_that_cannot_be_read_holds_up_its_aggregate(engine, open_source: Opens) -> None:
    source = open_source()
    broken, free = uuid.uuid4(), uuid.uuid4()
    one, two, three = stored(engine, broken, broken, free)
    build = source._message

    def refuse(row, acking):
        if str(row.id) == one:
            raise RecursionError("too deep")
        return build(row, acking)

    source._message = refuse  # type: ignore[method-assign]
    [message] = source.read(10, 0)
    assert message.id == three
    message.ack()
    attempts = {str(row.id): (row.attempt_count, row.published_at) for row in rows(engine)}
    assert attempts[one] == (10, None)  # for good: it is parked
    assert attempts[two] == (0, None)


def test_a_resting_aggregate_rests_whole(engine, open_source: Opens) -> None:
    aggregate = uuid.uuid4()
    ids = stored(engine, aggregate, aggregate)
    source = open_source()
    sink = ListSink()
    sink.bad = {ids[0]}
    publish_batch(source, sink, 10, ordered=True)
    assert list(source.read(10, 0)) == []
    rested(source)
    assert [message.id for message in source.read(10, 0)] == ids


def test_a_hot_aggregate_does_not_starve_the_others(engine, open_source: Opens) -> None:
    hot, others = uuid.UUID(int=1 << 64), [uuid.uuid4() for _ in range(4)]
    stored(engine, *[hot] * 20, *others)
    source = open_source()
    seen = set()
    for _ in range(30):
        messages = source.read(2, 0)
        seen |= {message.key for message in messages}
        settle([message.acking for message in messages if message.acking])
        if len(seen) == 5:
            break
        stored(engine, hot)
    assert seen == {str(aggregate) for aggregate in (hot, *others)}


def test_several_relays_keep_the_order_of_every_aggregate(engine: Engine) -> None:
    aggregates = [uuid.uuid4() for _ in range(7)]
    events = [notification(aggregate_id=aggregates[number % 7]) for number in range(210)]
    with Session(engine) as session, session.begin():
        emit(session, *events)
    sink = ListSink()
    relays = [
        Relay(EventSource(engine, poll=0.02, ordered=True), sink, batch_size=9, ordered=True)
        for _ in range(3)
    ]
    with running(relays):
        eventually(lambda: all(row.published_at for row in rows(engine)), timeout=30)
    assert len(sink.ids) == 210
    for aggregate in aggregates:
        wanted = [str(event.id) for event in events if event.aggregate_id == aggregate]
        assert [sent.id for sent in sink.sent if sent.key == str(aggregate)] == wanted
