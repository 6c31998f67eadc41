"""An outbox, a relay and a sink together: what a failure costs the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from tests.integration.sql.claiming import fill, made, rows, unpublished
from tests.unit.sinks.http_receiver import Receiver

from conquiet.registry import open_sink
from conquiet.relay import Relay
from conquiet.sql.outbox_source import OutboxSource


@pytest.fixture
def engine(sqlite_url: str) -> Iterator[Engine]:
    with made(sqlite_url) as engine:
        yield engine


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def relay(engine: Engine, receiver: Receiver) -> Iterator[Relay]:
    source = OutboxSource(engine, poll=0.01, wakeup=False)
    sink = open_sink(receiver.url)
    yield Relay(source, sink, batch_size=20)
    source.close()
    sink.close()


def test_an_outage_of_the_receiver_costs_no_row_an_attempt(
    engine: Engine, receiver: Receiver, relay: Relay
) -> None:
    fill(engine, 20)
    with receiver.outage():
        outages = 0
        while outages < 3:  # rows that were given back rest for a moment
            outages += relay.run_once(0.05).outage is not None
    assert unpublished(engine) == 20
    assert {row.attempts for row in rows(engine)} == {0}
    while unpublished(engine):
        assert relay.run_once(0.05).failed == 0
    assert {message.id for message in receiver.arrived} == {f"e-{n}" for n in range(1, 21)}


def test_a_row_that_the_receiver_rejects_pays_alone(
    engine: Engine, receiver: Receiver, relay: Relay
) -> None:
    fill(engine, 10)
    receiver.answers["e-3"] = [422]
    outcome = relay.run_once()
    assert (outcome.published, outcome.failed) == (9, 1)
    assert {row.event_id: row.attempts for row in rows(engine) if row.attempts} == {"e-3": 1}
    [row] = [row for row in rows(engine) if row.published_at is None]
    assert "422" in row.last_error
