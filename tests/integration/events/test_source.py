"""The source of a relay over `outbox_events`: the contract of sources, and what is its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from datetime import datetime

import msgspec
import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy import event as hooks
from sqlalchemy.orm import Session
from tests.integration.events.samples import notification, one_of_each, rows, store
from tests.integration.sql.claiming import ListSink
from tests.waiting import eventually

from conquiet.errors import ConfigError, GivenBack, InvalidMessage, SinkUnavailable, StoreError
from conquiet.events import EventSource, emit, schema
from conquiet.events.check import check
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay import Relay
from conquiet.relay.inspection import Inspection
from conquiet.sql import Cleanup
from conquiet.sql import engine as make_engine
from conquiet.sql.claim import MAX_ERROR_CHARACTERS
from marketplace.catalog import CATALOG


@pytest.fixture
def source(engine: Engine) -> Iterator[EventSource]:
    made = EventSource(engine, poll=0.02, max_attempts=3)
    yield made
    made.close()


def rows_but_payload(engine: Engine) -> list:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT id, attempt_count, last_error FROM outbox_events"))
        return list(found)


def taken(source: EventSource, count: int, seconds: float = 10.0) -> list:
    """Exactly so many messages."""
    got: list = []
    end = time.monotonic() + seconds
    while len(got) < count and time.monotonic() < end:
        got.extend(source.read(count - len(got), 0.1))
    assert len(got) == count
    return got


# --- what goes out --------------------------------------------------------------------------


def test_a_message_carries_the_locked_topic_and_attributes(source: EventSource) -> None:
    event = notification()
    with Session(source.engine) as session, session.begin():
        emit(session, event)
    [message] = taken(source, 1)
    assert message.topic == "domain-events"
    attributes = message.attributes
    assert attributes["event_id"] == attributes["id"] == str(event.id)
    assert attributes["event_type"] == attributes["type"] == "notification_requested"
    assert attributes["aggregate_type"] == "notification"
    assert attributes["aggregate_id"] == attributes["subject"] == str(event.aggregate_id)
    assert attributes["created_at"] == attributes["time"]
    assert attributes["created_at"].endswith("Z")
    assert datetime.fromisoformat(attributes["created_at"]).tzinfo is not None
    assert message.key == str(event.aggregate_id)


def test_the_data_is_the_envelope_byte_for_byte_the_same_in_both_databases(
    source: EventSource,
) -> None:
    events = one_of_each()
    with source.engine.begin() as connection:
        emit(connection, *events)
    for message, event in zip(taken(source, len(events)), events, strict=True):
        assert message.data == check(event).payload_json.encode()


def test_the_event_id_is_the_same_everywhere(source: EventSource) -> None:
    [id_] = store(source.engine, 1)
    [message] = taken(source, 1)
    payload = msgspec.json.decode(message.data)
    assert {id_, payload["eventId"], message.id, message.attributes["event_id"]} == {id_}


def test_a_row_of_an_unknown_type_goes_out_as_well(empty: Engine) -> None:
    schema.init(empty, CATALOG)
    store(empty, 1)
    source = EventSource(empty)
    assert len(source.read(10, 1.0)) == 1  # it was given no catalog
    source.close()


# --- settling -------------------------------------------------------------------------------


def test_ack_sets_published_at_and_only_then(source: EventSource) -> None:
    store(source.engine, 2)
    first, second = taken(source, 2)
    assert [row.published_at for row in rows(source.engine)] == [None, None]
    first.ack()
    second.ack()
    assert all(row.published_at is not None for row in rows(source.engine))
    assert [row.attempt_count for row in rows(source.engine)] == [0, 0]


def test_nack_counts_an_attempt_and_says_why(source: EventSource) -> None:
    store(source.engine, 1)
    taken(source, 1)[0].nack(ValueError("refused"))
    [row] = rows(source.engine)
    assert (row.attempt_count, row.last_error) == (1, "ValueError: refused")
    assert row.published_at is None
    assert taken(source, 1)[0].deliveries == 2


@pytest.mark.parametrize("error", [StoreError, GivenBack, SinkUnavailable])
def test_a_blameless_error_costs_no_attempt(source: EventSource, error) -> None:
    store(source.engine, 1)
    taken(source, 1)[0].nack(error("not its fault"))
    [row] = rows(source.engine)
    assert (row.attempt_count, row.last_error) == (0, None)
    assert taken(source, 1)[0].deliveries == 1


def test_a_row_at_its_maximum_is_claimed_no_more_and_can_be_sent_again(
    source: EventSource, caplog
) -> None:
    source.backoff._clock = lambda: time.monotonic() * 100  # rests end a hundredfold
    [id_] = store(source.engine, 1)
    with caplog.at_level(logging.ERROR, "conquiet.relay"):
        for _ in range(3):
            taken(source, 1)[0].nack(ValueError("refused"))
    assert f"parked: event_id={id_} event_type=notification_requested" in caplog.text
    [record] = caplog.records
    assert (record.event_id, record.attempt) == (id_, 3)  # type: ignore[attr-defined]
    assert list(source.read(10, 0.3)) == []
    assert rows(source.engine)[0].attempt_count == 3
    with source.engine.begin() as connection:
        connection.execute(text("UPDATE outbox_events SET attempt_count = 0"))
    assert taken(source, 1)[0].id == id_


def test_a_row_that_can_never_be_published_is_parked_at_once(source: EventSource) -> None:
    store(source.engine, 2)
    first, second = taken(source, 2)
    first.nack(InvalidMessage("it will never fit"))
    second.nack(ValueError("refused"))
    assert [row.attempt_count for row in rows(source.engine)] == [source.max_attempts, 1]


def test_a_failed_row_rests_and_lets_the_others_pass(source: EventSource) -> None:
    ids = store(source.engine, 2)
    first, second = taken(source, 2)
    first.nack(ValueError("refused"))
    second.ack()
    assert list(source.read(10, 0.0)) == []
    assert taken(source, 1)[0].id == ids[0]


def test_last_error_is_cut_on_a_character_and_is_text(source: EventSource) -> None:
    store(source.engine, 1)
    taken(source, 1)[0].nack(ValueError("ö\0\ud800" + "☃" * 5_000))
    kept = rows(source.engine)[0].last_error
    assert len(kept) == MAX_ERROR_CHARACTERS
    assert kept.startswith("ValueError: ö\ufffd")
    assert kept.endswith("☃…")


def test_one_row_that_cannot_be_marked_costs_its_neighbours_nothing(
    source: EventSource,
) -> None:
    ids = store(source.engine, 3)
    with source.engine.begin() as connection:
        if source.engine.dialect.name == "sqlite":
            connection.execute(
                text(
                    "CREATE TRIGGER broken BEFORE UPDATE OF published_at ON outbox_events"
                    f" WHEN NEW.id = '{ids[1]}' BEGIN SELECT RAISE(ABORT, 'no'); END"
                )
            )
        else:
            connection.execute(
                text(
                    f"ALTER TABLE outbox_events ADD CHECK (id <> '{ids[1]}'"
                    " OR published_at IS NULL)"
                )
            )
    messages = taken(source, 3)
    for message in messages:
        message.ack()
    found = rows(source.engine)
    assert [row.published_at is not None for row in found] == [True, False, True]
    assert found[1].last_error.startswith("published, but not marked")


def test_a_payload_that_is_no_json_fails_alone(sqlite_url: str) -> None:
    engine = make_engine(sqlite_url)
    schema.init(engine, CATALOG, append_only=False)
    ids = store(engine, 2)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outbox_events SET payload_json = '{' WHERE id = :id"), {"id": ids[0]}
        )
    source = EventSource(engine)
    [message] = source.read(10, 1.0)
    message.ack()
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT attempt_count, last_error FROM outbox_events ORDER BY id")
        ).all()
    source.close()
    engine.dispose()
    assert [row[0] for row in found] == [source.max_attempts, 0]
    assert "payload_json is not JSON" in found[0][1]


def test_a_row_that_nobody_can_read_costs_its_neighbours_nothing(engine: Engine, caplog) -> None:
    """JSONB takes what no decoder does; whoever wrote it, the others go out."""
    ids = store(engine, 3)
    deep = "[" * 3_000 + "]" * 3_000
    with engine.begin() as connection:
        copy = (
            "INSERT INTO outbox_events (id, event_type, aggregate_type, aggregate_id, payload_json)"
            " SELECT :id, event_type, aggregate_type, aggregate_id, :deep"
            " FROM outbox_events LIMIT 1"
        )
        if engine.dialect.name == "postgresql":
            copy = copy.replace(":id", "CAST(:id AS uuid)").replace(":deep", "CAST(:deep AS jsonb)")
        broken = str(notification().id)
        connection.execute(text(copy), {"id": broken, "deep": deep})
    sink = ListSink()
    relay = Relay(EventSource(engine, poll=0.02, wakeup=False), sink)
    relay.run_once()
    relay.source.close()
    assert sink.ids == ids
    [failed] = [row for row in rows_but_payload(engine) if row.attempt_count]
    assert str(failed.id) == broken
    assert "cannot be read" in failed.last_error
    assert f"not published: event_id={broken}" in caplog.text


def test_a_slow_sink_is_not_ended_for_being_idle_in_a_transaction(database_url: str) -> None:
    engine = make_engine(database_url)
    schema.init(engine, CATALOG)
    with engine.begin() as connection:
        impatient = "SET idle_in_transaction_session_timeout = 50"
        connection.execute(text(f'ALTER DATABASE "{engine.url.database}" {impatient}'))
    engine.dispose()
    store(engine, 1)
    source = EventSource(engine)
    [message] = source.read(1, 1.0)
    time.sleep(0.3)  # longer than the server would wait
    message.ack()
    assert rows(engine)[0].published_at is not None
    source.close()
    engine.dispose()


# --- several relays -------------------------------------------------------------------------


def test_what_is_claimed_is_not_claimed_again(source: EventSource) -> None:
    store(source.engine, 3)
    other = EventSource(source.engine, poll=0.02)
    taken(source, 3)
    assert list(source.read(10, 0.2)) == []
    assert list(other.read(10, 0.2)) == []
    source.close()
    assert len(taken(other, 3)) == 3
    other.close()


def test_two_sources_share_rows_in_postgresql(postgres: Engine) -> None:
    ids = store(postgres, 4)
    first, second = EventSource(postgres), EventSource(postgres)
    one, two = first.read(2, 1.0), second.read(2, 1.0)
    assert [message.id for message in (*one, *two)] == ids
    first.close()
    second.close()


def test_several_relays_publish_every_row_once(engine: Engine) -> None:
    ids = store(engine, 300)
    sinks = [ListSink() for _ in range(3)]
    relays = [Relay(EventSource(engine, poll=0.02), sink, batch_size=7) for sink in sinks]
    threads = [threading.Thread(target=relay.run, daemon=True) for relay in relays]
    for thread in threads:
        thread.start()
    eventually(lambda: all(row.published_at is not None for row in rows(engine)), timeout=60)
    for relay in relays:
        relay.stop()
    for thread in threads:
        thread.join(30)
    assert sorted(id_ for sink in sinks for id_ in sink.ids) == sorted(ids)


def test_a_crash_gives_the_rows_back_at_once(postgres: Engine) -> None:
    ids = store(postgres, 2)
    dead = EventSource(postgres)
    taken(dead, 2)
    for claim in dead._claims:
        claim._opened.connection.connection.driver_connection.close()
    other = EventSource(postgres, poll=0.02)
    assert [message.id for message in taken(other, 2)] == ids
    other.close()
    dead.close()


def test_an_outage_costs_no_attempts(engine: Engine) -> None:
    store(engine, 20)
    sink = ListSink()
    sink.out = True
    relay = Relay(EventSource(engine, poll=0.02), sink, longest_pause=0.05)
    for _ in range(5):
        relay.run_once()
    assert {row.attempt_count for row in rows(engine)} == {0}
    sink.out = False
    eventually(lambda: relay.run_once(0.1) and len(sink.ids) == 20, timeout=20)
    relay.source.close()


def test_a_failing_message_fails_alone(engine: Engine) -> None:
    ids = store(engine, 3)
    sink = ListSink()
    sink.bad = {ids[1]}
    relay = Relay(EventSource(engine, poll=0.02), sink)
    relay.run_once(1.0)
    relay.source.close()
    assert [(row.attempt_count, row.published_at is None) for row in rows(engine)] == [
        (0, False),
        (1, True),
        (0, False),
    ]


def test_a_commit_wakes_a_waiting_relay(engine: Engine) -> None:
    source = EventSource(engine, poll=60.0)
    got: list = []
    reader = threading.Thread(target=lambda: got.extend(source.read(1, 30.0)), daemon=True)
    began = time.monotonic()
    reader.start()
    eventually(lambda: _listens(engine), timeout=10)
    store(engine, 1)
    reader.join(30)
    source.close()
    assert len(got) == 1
    assert time.monotonic() - began < 20


def _listens(engine: Engine) -> bool:
    if engine.dialect.name == "sqlite":
        return True
    with engine.connect() as connection:
        found = connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query ILIKE 'LISTEN%'"
            )
        )
        return bool(found.scalar_one())


# --- the rest -------------------------------------------------------------------------------


def test_what_nobody_settles_is_given_up_after_a_while(engine: Engine, caplog) -> None:
    store(engine, 1)
    source = EventSource(engine, poll=0.02, hold=0.05)
    [forgotten] = taken(source, 1)
    with caplog.at_level(logging.WARNING, "conquiet.relay"):
        [again] = taken(source, 1)
    forgotten.ack()
    assert source.late == 1
    assert rows(engine)[0].published_at is None
    again.ack()
    source.close()
    assert "were not settled within" in caplog.text


def test_a_closed_source_reads_nothing(source: EventSource) -> None:
    store(source.engine, 1)
    source.close()
    assert list(source.read(10, 1.0)) == []


def test_a_database_that_is_away_is_nobodys_fault() -> None:
    source = EventSource("postgresql://nobody@127.0.0.1:1/none?password=s3cret")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1/none") as caught:
        source.read(1, 0)
    assert "s3cret" not in str(caught.value)
    source.close()


@pytest.mark.parametrize(
    "settings", [{"max_attempts": 0}, {"max_attempts": True}, {"poll": 0}, {"hold": -1}]
)
def test_settings_that_cannot_work_are_refused(sqlite_url: str, settings) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EventSource(sqlite_url, **settings)


def test_from_emit_through_a_relay_and_a_stream_to_a_consumer(engine: Engine, redis_url) -> None:
    events = one_of_each()
    with Session(engine) as session, session.begin():
        emit(session, *events)
    with redis.Redis.from_url(redis_url) as client:
        sink = StreamSink(client)
        relay = Relay(EventSource(engine, cloudevents=True), sink)
        relay.run_once(1.0)
        relay.source.close()
        sink.close()
        stream = StreamSource(client, "domain-events", group="analytics")
        got = stream.read(100, 5.0)
        opened = [CATALOG.open(message.type, message.data) for message in got]
        stream.close()
    assert [one.data for one in opened] == [event.data for event in events]
    assert [message.attributes["aggregatetype"] for message in got] == [
        event.aggregate_type for event in events
    ]


# --- the rows of semantics.md that no test above is named for ---------------------------------


def test_the_claim_is_read_to_its_end_before_anything_is_published(engine: Engine) -> None:
    """While the sink works, the claim is idle: locks on PostgreSQL, nothing at all on SQLite."""
    store(engine, 3)
    found: list[str] = []

    class Looking(ListSink):
        def publish_each(self, messages):
            if engine.dialect.name == "sqlite":
                found.append(f"{engine.pool.checkedout()} connections")  # type: ignore[attr-defined]
                return super().publish_each(messages)
            query = (
                "SELECT state FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND state <> 'idle'"
            )
            with engine.connect() as connection:
                found.extend(connection.execute(text(query)).scalars())
            return super().publish_each(messages)

    source = EventSource(engine, poll=0.02, wakeup=False)
    Relay(source, Looking()).run_once()
    source.close()
    is_sqlite = engine.dialect.name == "sqlite"
    assert found == (["0 connections"] if is_sqlite else ["idle in transaction"])
    assert all(row.published_at is not None for row in rows(engine))


@pytest.mark.parametrize("name", ['outbox_events"; DROP TABLE x', "Events", "a.b.outbox_events"])
def test_names_that_would_need_quoting_are_refused(engine: Engine, name: str) -> None:
    for make in (
        lambda: EventSource(engine, name),
        lambda: Cleanup(engine, inbox=None, outbox=name),
        lambda: schema.ddl("sqlite", CATALOG, name),
        lambda: Inspection(engine, name),
    ):
        with pytest.raises(ConfigError, match="table name"):
            make()


def test_a_commit_does_not_wait_for_its_notification(postgres: Engine) -> None:
    """The transaction sends none; a thread does, when it has committed."""
    said: list[str] = []

    def note(connection, cursor, statement, *rest):
        said.append(statement.lower())

    hooks.listen(postgres, "before_cursor_execute", note)
    store(postgres, 1)
    assert any("insert into outbox_events" in statement for statement in said)
    assert not any("notify" in statement for statement in said)
