"""The outbox from the write-ahead log: order, settling, takeover, the change and its way back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator

import asyncpg
import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session
from tests.integration.sql.claiming import ListSink, fill, row, rows, running, store, the
from tests.waiting import eventually

from conquiet.errors import ConfigError, SinkUnavailable, StoreError
from conquiet.message import Message
from conquiet.relay import Outcome, Relay
from conquiet.relay.inspection import Inspection
from conquiet.sql import Cleanup, Inbox, Outbox, OutboxSource, Transaction, WalSource, schema
from conquiet.sql import engine as make_engine
from conquiet.sql.wal import Slot, WalOutbox
from conquiet.testing.contracts import SourceContract


@pytest.fixture
def outbox(database_url: str) -> Iterator[Engine]:
    made = make_engine(database_url, pool_size=20)
    with made.connect() as connection:
        if connection.execute(text("SHOW wal_level")).scalar() != "logical":
            pytest.skip("wal_level of the given PostgreSQL is not logical")
    schema.init(made)
    yield made
    made.dispose()


def drain(relay: Relay, seconds: float = 60.0) -> None:
    """Publish until nothing comes any more, and the position is confirmed."""
    until = time.monotonic() + seconds
    engine = relay.source.engine
    with engine.connect() as connection:
        written = connection.execute(text("SELECT pg_current_wal_insert_lsn()::text")).scalar()
    passed = text(
        "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        " AND confirmed_flush_lsn >= CAST(:written AS pg_lsn)"
    )
    while time.monotonic() < until:
        if relay.run_once(0.1) == Outcome():
            with engine.connect() as connection:
                if connection.execute(passed, {"written": written}).scalar():
                    return
    raise AssertionError("there is no end")


def leave(engine: Engine) -> None:
    WalOutbox(engine).leave(lambda seconds: True)


@pytest.mark.slow
class TestContract(SourceContract):
    lease = None
    keeps_place = False

    @pytest.fixture(autouse=True)
    def _database(self, outbox: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr("conquiet.sql.claim._FIRST_DELAY_SECONDS", 0.1)
        self.engine = outbox
        self.opened: list[WalSource] = []
        first = self.open(0.0)
        first.read(1, 0)  # the slot begins before the first message
        first.close()
        yield
        for source in self.opened:
            source.close()

    def open(self, lease: float) -> WalSource:
        self.opened.append(WalSource(self.engine, poll=0.02))
        return self.opened[-1]

    def publish(self, messages) -> None:
        with Transaction(self.engine).scope(messages):
            Outbox("orders").store(messages)

    def crash(self, source: WalSource) -> None:
        source._closed = True
        if source._stream is not None:
            source._lose(source._stream)

    @pytest.mark.parametrize("acked", [0])
    def test_acking_k_of_n_and_crashing_returns_the_other_n_minus_k(self, acked: int) -> None:
        """Not for some of them: the position moves by whole transactions, and when it is read."""
        super().test_acking_k_of_n_and_crashing_returns_the_other_n_minus_k(acked)

    def test_any_sequence_of_settlements_loses_nothing_and_repeats_nothing(self) -> None:
        pytest.skip("one reader at a time: the others wait")


def test_rows_come_in_the_order_of_their_commits_and_are_not_marked(outbox: Engine) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    with outbox.connect() as early, outbox.connect() as late:
        for connection, number in ((early, 1), (late, 2)):
            connection.execute(schema.outbox_table().insert(), [row(number)])
        late.commit()
        drain(relay)
        early.commit()
    drain(relay)
    source.close()
    assert sink.ids == ["e-2", "e-1"]
    assert [one.published_at for one in rows(outbox)] == [None, None]


@pytest.mark.parametrize("how", ["in binary", "columns of another order", "as text"])
def test_a_row_becomes_the_message_that_a_claim_makes_of_it(
    outbox: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "as text":  # as PostgreSQL 13 sends them
        monkeypatch.setattr("conquiet.sql.wal_source._BINARY_SINCE", 1_000_000)
    plain = {"id": "e-3", "type": "order.placed", "source": "/shop"}
    with outbox.begin() as connection:
        if how == "columns of another order":
            connection.execute(text("ALTER TABLE outbox RENAME COLUMN data TO former"))
            connection.execute(text("ALTER TABLE outbox ALTER COLUMN former DROP NOT NULL"))
            connection.execute(text("ALTER TABLE outbox ADD COLUMN data bytea NOT NULL"))
    source = WalSource(outbox)
    source.read(1, 0)
    store(
        outbox,
        row(1, data=bytes(range(256)), key="k"),
        row(2, data=b"", attributes={"source": "/ä", "number": 2**40, "flag": True}),
        row(3, content_type="text/xml", topic="öde", attributes=plain | {"subject": "s"}, key="s"),
        row(4, attributes=plain | {"subject": "s"}, key="another", attempts=70_000),
        row(5, key=""),
    )
    with outbox.begin() as connection:  # a description of the table comes amid the rows
        connection.execute(text("ALTER TABLE outbox ADD COLUMN more text"))
        connection.execute(text("ALTER TABLE outbox ALTER COLUMN created_at DROP NOT NULL"))
    store(outbox, row(6, data=b"x" * 100_000, created_at=None))
    found: list[Message[bytes]] = []
    eventually(lambda: len(found.extend(source.read(10, 0.1)) or found) == 6, timeout=30)
    source.close()
    leave(outbox)
    claims = OutboxSource(outbox)
    wanted = claims.read(10, 0)
    assert [seen(one) for one in found] == [seen(one) for one in wanted]
    claims.close()


def seen(message: Message[bytes]) -> tuple[object, ...]:
    return message.data, message.attributes, message.topic, message.deliveries


def test_a_new_relay_goes_on_where_the_last_one_stopped(outbox: Engine) -> None:
    sink = ListSink()
    for part in range(3):
        fill(outbox, 70, first=100 * part)
        source = WalSource(outbox)
        relay = Relay(source, sink, batch_size=50)
        relay.run_once(30)  # a part of a transaction
        source.close()
    source = WalSource(outbox)
    drain(Relay(source, sink))
    source.close()
    assert Counter(sink.ids) == {f"e-{100 * p + n}": 1 for p in range(3) for n in range(70)}


def test_changing_from_claims_to_the_log_and_back_publishes_each_row_once(outbox: Engine) -> None:
    """Under writers that never pause, and with rows that are claimed at the moment of change."""
    sink = ListSink()
    ending = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        while not ending.is_set():
            fill(outbox, 3, first=written)
            written += 3

    def publish(source: OutboxSource | WalSource, least: int) -> Relay:
        relay = Relay(source, sink, batch_size=7)
        with running([relay]):
            before = len(sink.sent)
            eventually(lambda: len(sink.sent) >= before + least, timeout=60)
        return relay

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2):
            publish(OutboxSource(outbox, poll=0.02), 60)
            held = OutboxSource(outbox, poll=0.02)  # a claim that is under way when it changes
            claimed = held.read(5, 10)
            source = WalSource(outbox)
            relay = Relay(source, sink, batch_size=7)
            with running([relay]):
                eventually(source.outbox.is_entered, timeout=60)
                sink.publish_each(claimed)
                for message in claimed:
                    message.ack()
                before = len(sink.sent)
                eventually(lambda seen=before: len(sink.sent) >= seen + 60, timeout=60)
            held.close()
            leave(outbox)
    finally:
        ending.set()
        writer.join()
    source = OutboxSource(outbox)
    while Relay(source, sink).run_once().published:
        pass
    source.close()
    assert Counter(sink.ids) == {f"e-{number}": 1 for number in range(written)}


def test_claims_are_refused_while_the_log_is_followed(outbox: Engine) -> None:
    claims = [OutboxSource(outbox), OutboxSource(outbox, ordered=True)]
    assert [list(source.read(1, 0)) for source in claims] == [[], []]
    source = WalSource(outbox)
    source.read(1, 0)
    for refused in claims:
        with pytest.raises(StoreError, match=r"write-ahead log.*--from wal.*--from claim"):
            refused.read(1, 0)
    source.close()
    leave(outbox)
    fill(outbox, 1)
    assert len(claims[0].read(1, 0)) == 1
    for refused in claims:
        refused.close()
    with outbox.connect() as connection:  # the slot is gone, and keeps no log any more
        query = text(
            "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        )
        assert connection.execute(query).scalar() == 0


@pytest.mark.parametrize("how", ["dropped", "of another server"])
def test_a_lost_slot_is_replaced_and_no_row_is_lost(outbox: Engine, how: str, caplog) -> None:
    sink = ListSink()
    source = WalSource(outbox)
    drain(Relay(source, sink))
    fill(outbox, 10)
    drain(Relay(source, sink))
    source.close()
    fill(outbox, 10, first=11)
    slot = source.slot()
    assert slot is not None
    assert not slot.is_lost
    if how == "dropped":
        eventually(lambda: drop_free_slot(outbox), timeout=30)  # once its reader has left
    else:
        with outbox.begin() as connection:
            connection.execute(text("UPDATE outbox_wal SET system = 'another'"))
    fill(outbox, 10, first=21)
    with caplog.at_level("ERROR", "conquiet.relay"):
        again = WalSource(outbox)
        drain(Relay(again, sink))
    again.close()
    assert {f"e-{number}" for number in range(1, 31)} == set(sink.ids)
    assert "are claimed" in caplog.text


def test_the_position_waits_for_the_sink(outbox: Engine) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink, batch_size=5)
    drain(relay)
    fill(outbox, 20)
    sink.out = True
    for _ in range(3):
        assert isinstance(relay.run_once(10).outage, SinkUnavailable)
    source.close()
    assert all(one.attempts == 0 and one.last_error is None for one in rows(outbox))
    sink.out = False
    source = WalSource(outbox)
    drain(Relay(source, sink))
    source.close()
    assert sink.ids == [f"e-{number}" for number in range(1, 21)]


def test_a_row_that_fails_is_claimed_marked_or_parked_and_holds_up_no_other(
    outbox: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.sql.claim._FIRST_DELAY_SECONDS", 0.02)
    source, sink = WalSource(outbox, max_attempts=3, poll=0.02), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    sink.bad = {"e-3", "e-5"}
    fill(outbox, 10)
    with running([relay]):
        eventually(lambda: the(outbox, "e-5").attempts >= 1, timeout=60)
        sink.bad = {"e-5"}
        eventually(lambda: the(outbox, "e-3").published_at and the(outbox, "e-5").parked_at)
    assert Counter(sink.ids) == {f"e-{n}": 1 for n in range(1, 11) if n != 5}
    assert "refused" in the(outbox, "e-5").last_error
    inspection = Inspection(outbox, "outbox", max_attempts=3)
    assert inspection.figures().parked == 1
    sink.bad = set()
    assert inspection.retry() == ["e-5"]
    source = WalSource(outbox, poll=0.02)
    with running([Relay(source, sink)]):
        eventually(lambda: the(outbox, "e-5").published_at, timeout=60)
    assert sink.ids.count("e-5") == 1


def test_ordered_rows_wait_behind_one_of_their_key_that_failed(
    outbox: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.sql.claim._FIRST_DELAY_SECONDS", 0.05)
    source, sink = WalSource(outbox, ordered=True, poll=0.02), ListSink()
    relay = Relay(source, sink, batch_size=4, ordered=True)
    drain(relay)
    sink.bad = {"e-2"}
    for number in range(1, 21):
        store(outbox, row(number, key=f"k-{number % 2}"))
    with running([relay]):
        eventually(lambda: len(sink.sent) >= 10, timeout=60)
        assert [m.id for m in sink.sent if m.key == "k-0"] == []
        sink.bad = set()
        eventually(lambda: len(sink.sent) >= 20, timeout=60)
        store(outbox, row(21, key="k-0"))
        eventually(lambda: len(sink.sent) >= 21, timeout=60)
    for key in (0, 1):
        wanted = [f"e-{n}" for n in range(1, 22) if n % 2 == key or (n == 21 and key == 0)]
        wanted = [one for one in wanted if not (one == "e-21" and key == 1)]
        assert [m.id for m in sink.sent if m.key == f"k-{key}"] == wanted


def test_a_second_relay_waits_and_takes_over(outbox: Engine) -> None:
    sink = ListSink()
    first, second = WalSource(outbox), WalSource(outbox)
    drain(Relay(first, sink))
    fill(outbox, 5)
    assert list(second.read(10, 0.3)) == []
    drain(Relay(first, sink))
    first.close()
    fill(outbox, 5, first=6)
    drain(Relay(second, sink))
    second.close()
    assert Counter(sink.ids) == {f"e-{number}": 1 for number in range(1, 11)}


def test_a_cut_connection_is_an_outage_and_loses_nothing(outbox: Engine) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink, batch_size=10, longest_pause=0.2)
    cut = text(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        " WHERE database = current_database() AND active"
    )
    with running([relay]):
        for part in range(5):
            fill(outbox, 40, first=40 * part)
            with outbox.connect() as connection:
                connection.execute(cut)
        eventually(lambda: len(set(sink.ids)) == 200, timeout=60)


def test_cleanup_deletes_rows_behind_the_position_and_no_others(outbox: Engine) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    fill(outbox, 10)
    drain(relay)

    def horizon_passes() -> bool:
        """PostgreSQL notes which transactions run every 15 seconds, and with a checkpoint."""
        with outbox.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("CHECKPOINT"))
        drain(relay)
        slot = source.slot()
        assert slot is not None
        with outbox.connect() as connection:
            newest = connection.execute(text("SELECT max(xid::text::bigint) FROM outbox")).scalar()
        return slot.horizon > newest

    eventually(horizon_passes, timeout=60, interval=0.05)
    assert Inspection(outbox, "outbox").figures().pending == 0
    sink.out = True
    fill(outbox, 5, first=11)
    assert relay.run_once(10).outage is not None
    inspection = Inspection(outbox, "outbox")
    assert inspection.figures().pending == 5
    assert inspection.prunable(1e-6) == 10
    assert Cleanup(outbox, inbox=None, retention=1e-6).run_once().outbox == 10
    assert [one.event_id for one in rows(outbox)] == [f"e-{n}" for n in range(11, 16)]
    sink.out = False
    drain(relay)
    source.close()
    assert sink.ids[-5:] == [f"e-{n}" for n in range(11, 16)]


@pytest.mark.slow
def test_it_works_across_a_restart_of_postgresql(private_postgres) -> None:
    made = make_engine(private_postgres.url)
    schema.init(made)
    source, sink = WalSource(made), ListSink()
    relay = Relay(source, sink, longest_pause=0.2)
    with running([relay]):
        fill(made, 10)
        eventually(lambda: len(sink.sent) == 10, timeout=60)
        private_postgres.stop(keep=True)
        private_postgres.start()
        made.dispose()
        fill(made, 10, first=11)
        eventually(lambda: len(set(sink.ids)) == 20, timeout=60)
        private_postgres.stop(keep=True, mode="immediate")
        private_postgres.start()
        made.dispose()
        fill(made, 10, first=21)
        eventually(lambda: len(set(sink.ids)) == 30, timeout=60)
    made.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("relay_is", ["away", "reading, and its sink is away"])
def test_an_invalidated_slot_is_replaced_and_no_row_is_lost(
    private_postgres, relay_is: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By more log than `max_slot_wal_keep_size`; the slot is a failover slot from 17 on."""
    made = make_engine(private_postgres.url)
    schema.init(made)
    source, sink = WalSource(made), ListSink()
    relay = Relay(source, sink, longest_pause=0.2)
    drain(relay)
    fill(made, 10)
    drain(relay)
    sink.out = True
    fill(made, 10, first=11)
    if relay_is == "away":
        source.close()
    else:
        assert relay.run_once(10).outage is not None
    former = invalidate(source)
    fill(made, 10, first=21)
    sink.out = False
    with caplog.at_level("ERROR", "conquiet.relay"):
        again = source if relay_is != "away" else WalSource(made)
        with running([Relay(again, sink, longest_pause=0.2)]):
            eventually(lambda: len(set(sink.ids)) == 30, timeout=60)
            assert f"slot {former.name} is lost" in caplog.text
            assert "are claimed" in caplog.text
            slot = again.slot()
            assert slot is not None
            assert not slot.is_lost
            fill(made, 10, first=31)
            eventually(lambda: len(set(sink.ids)) == 40, timeout=60)
    assert set(sink.ids) == {f"e-{number}" for number in range(1, 41)}
    # What was published or received by then may come again, and nothing later.
    again_at_most = {f"e-{number}" for number in range(1, 21 if relay_is != "away" else 11)}
    assert {name for name, count in Counter(sink.ids).items() if count > 1} <= again_at_most
    made.dispose()


def invalidate(source: WalSource) -> Slot:
    """Let PostgreSQL give the slot up: too much log was written behind its position."""
    with source.engine.connect() as plain:
        connection = plain.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(text("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'"))
        connection.execute(text("SELECT pg_reload_conf()"))

        def is_lost() -> bool:
            connection.execute(text("SELECT pg_logical_emit_message(true, 'filler', 'x')"))
            connection.execute(text("SELECT pg_switch_wal()"))
            connection.execute(text("CHECKPOINT"))
            slot = source.slot()
            return slot is not None and slot.is_lost

        eventually(is_lost, timeout=60)
        if connection.dialect.server_version_info >= (17,):
            why = text("SELECT failover, invalidation_reason FROM pg_replication_slots")
            assert tuple(connection.execute(why).one()) == (True, "wal_removed")
    slot = source.slot()
    assert slot is not None
    return slot


def test_pgbouncer_is_named_as_what_does_not_pass_the_log(bounced_url: str) -> None:
    made = make_engine(bounced_url, connect_args={"prepare_threshold": None})
    schema.init(made)
    source = WalSource(made)
    with pytest.raises(ConfigError, match="PgBouncer"):
        source.read(1, 0)
    source.close()
    made.dispose()


def test_sqlite_has_no_such_log(sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match="--from claim"):
        WalSource(sqlite_url)


# --- events that are messages of the log, and no rows --------------------------------------------

EMITS = Outbox("orders", source="/shop", rows=False)


def event(number: int, **attributes: str) -> Message[bytes]:
    return Message(
        b'{"number": %d}' % number, {"id": f"e-{number}", "type": "order.placed", **attributes}
    )


def emit_events(engine: Engine, *numbers: int, **attributes: str) -> None:
    with engine.begin() as connection:
        EMITS.add(connection, [event(number, **attributes) for number in numbers])


def test_events_without_rows_come_in_the_order_of_commits_and_not_if_it_is_rolled_back(
    outbox: Engine,
) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    with outbox.connect() as early, outbox.connect() as late:
        EMITS.add(early, [event(3), event(4)])
        EMITS.add(late, [event(1)])
        fill(outbox, 1, first=2)
        late.commit()
        undone = early.begin_nested()
        EMITS.add(early, [event(90)])
        undone.rollback()
        early.commit()
        EMITS.add(late, [event(91)])
        late.rollback()
    drain(relay)
    source.close()
    assert sink.ids == ["e-2", "e-1", "e-3", "e-4"]
    assert [one.event_id for one in rows(outbox)] == ["e-2"]


def test_an_event_without_a_row_becomes_the_message_that_a_row_becomes(outbox: Engine) -> None:
    source = WalSource(outbox)
    source.read(1, 0)
    events = [
        Message(bytes(range(256)), {"id": "a", "type": "t", "source": "/ä", "number": 2**40}),
        Message(b"", {"id": "b", "type": "t", "subject": "k", "datacontenttype": "text/xml"}),
        Message({"a": "öde"}, {"id": "c", "type": "t", "partitionkey": "'\\"}, topic="öde"),
    ]
    for one in events:
        one.attributes["time"] = "2026-11-19T00:00:00Z"
    with outbox.begin() as connection:
        EMITS.add(connection, events)
    with outbox.begin() as connection:
        Outbox("orders", source="/shop").add(connection, events)
    found: list[Message[bytes]] = []
    eventually(lambda: len(found.extend(source.read(10, 0.1)) or found) == 6, timeout=30)
    source.close()
    assert [seen(one) for one in found[:3]] == [seen(one) for one in found[3:]]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "session"])
def test_handlers_and_every_driver_write_events_without_rows(outbox: Engine, driver: str) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    with Transaction(outbox).scope(()):
        EMITS.store([event(1, source="/shop")])
    url = outbox.url.set(drivername="postgresql").render_as_string(hide_password=False)
    if driver == "psycopg":
        with psycopg.connect(url) as connection:
            EMITS.add(connection, [event(2)])
    elif driver == "session":
        with Session(outbox) as session, session.begin():
            session.execute(EMITS.statement([event(2)]))
    else:

        async def write() -> None:
            connection = await asyncpg.connect(url)
            async with connection.transaction():
                await EMITS.add(connection, [event(2)])
            await connection.close()

        asyncio.run(write())
    drain(relay)
    source.close()
    assert sink.ids == ["e-1", "e-2"]


def test_an_event_without_a_row_that_fails_becomes_one_and_holds_up_no_other(
    outbox: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conquiet.sql.claim._FIRST_DELAY_SECONDS", 0.02)
    source, sink = WalSource(outbox, max_attempts=2, poll=0.02, ordered=True), ListSink()
    relay = Relay(source, sink, ordered=True)
    drain(relay)
    sink.bad = {"e-2"}
    inspection = Inspection(outbox, "outbox", max_attempts=2)
    with running([relay]):
        emit_events(outbox, 1, 2, 3, subject="k")
        emit_events(outbox, 4)
        eventually(lambda: inspection.figures().parked == 1, timeout=60)
        emit_events(outbox, 5, subject="k")
        emit_events(outbox, 6)
        eventually(lambda: {"e-1", "e-4", "e-6"} == set(sink.ids), timeout=60)
        assert (the(outbox, "e-2").attempts, the(outbox, "e-2").key) == (2, "k")
        sink.bad = set()
        inspection.retry()
        eventually(lambda: len(set(sink.ids)) == 6, timeout=60)
    assert Counter(sink.ids) == {f"e-{number}": 1 for number in range(1, 7)}
    assert [m.id for m in sink.sent if m.key == "k"] == ["e-1", "e-2", "e-3", "e-5"]


def test_an_event_without_a_row_comes_again_with_its_id_if_its_relay_died_before_it_confirmed(
    outbox: Engine,
) -> None:
    sink, handled = ListSink(), []
    source = WalSource(outbox)
    drain(Relay(source, sink))
    emit_events(outbox, 1, 2)
    assert Relay(source, sink).run_once(30).published == 2
    source._lose(source._stream)  # its connection, as when the process is killed
    source.close()
    again = WalSource(outbox)
    drain(Relay(again, sink))
    again.close()
    assert sink.ids == ["e-1", "e-2"] * 2
    inbox = Inbox("billing")
    for message in sink.sent:
        with Transaction(outbox).scope(()):
            handled += inbox.remember([(inbox.subscriber, message.id)])
    assert [id_ for _, id_ in handled] == ["e-1", "e-2"]


def test_a_relay_that_stops_amid_a_transaction_makes_rows_of_its_rest(outbox: Engine) -> None:
    source, sink = WalSource(outbox), ListSink()
    drain(Relay(source, sink))
    emit_events(outbox, *range(1, 8))
    assert Relay(source, sink, batch_size=3).run_once(30).published == 3
    source.close()
    again = WalSource(outbox)
    drain(Relay(again, sink))
    again.close()
    assert Counter(sink.ids) == {f"e-{number}": 1 for number in range(1, 8)}


@pytest.mark.parametrize("state", ["never followed", "changed back", "slot dropped"])
def test_without_a_slot_events_without_rows_are_refused_and_not_lost(
    outbox: Engine, state: str
) -> None:
    if state != "never followed":
        source = WalSource(outbox)
        source.read(1, 0)
        source.close()
    if state == "changed back":
        leave(outbox)
    elif state == "slot dropped":
        eventually(lambda: drop_free_slot(outbox), timeout=30)  # once its reader has left
    for write in (
        lambda: emit_events(outbox, 1),
        lambda: store_in_scope(outbox),
    ):
        with pytest.raises(StoreError, match=r"outbox is not published from.*--from wal"):
            write()


def drop_free_slot(engine: Engine) -> bool:
    """Drop the slot of this database, and return whether it could be."""
    drop = text(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE database = current_database() AND NOT active"
    )
    with engine.begin() as connection:
        return len(connection.execute(drop).all()) == 1


def store_in_scope(engine: Engine) -> None:
    with Transaction(engine).scope(()):
        EMITS.store([event(1, source="/shop")])


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_changing_back_makes_rows_of_events_that_wait_and_loses_none_of_writers_that_are_amid(
    outbox: Engine, level: str
) -> None:
    source, sink = WalSource(outbox), ListSink()
    drain(Relay(source, sink))
    source.close()
    emit_events(outbox, 1, subject="ü")
    with outbox.connect().execution_options(isolation_level=level) as late:
        late.execute(text("SELECT 1 FROM processed_messages"))  # its snapshot, if it keeps one
        with outbox.connect().execution_options(isolation_level=level) as amid:
            EMITS.add(amid, [event(2)])
            changing = threading.Thread(target=leave, args=[outbox])
            changing.start()
            eventually(lambda: is_waiting_for_writers(outbox), timeout=30)
            amid.commit()
            changing.join(30)
        with pytest.raises(StoreError, match="not published from"):
            EMITS.add(late, [event(3)])
    claims = OutboxSource(outbox)
    assert Relay(claims, sink).run_once(10).published == 2
    claims.close()
    assert sink.ids == ["e-1", "e-2"]
    assert sink.sent[0].attributes["subject"] == "ü"
    assert sink.sent[0].data == b'{"number": 1}'


def is_waiting_for_writers(engine: Engine) -> bool:
    waits = text(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with engine.connect() as connection:
        return bool(connection.execute(waits).scalar())


def test_two_outboxes_of_one_database_do_not_read_each_others_events(outbox: Engine) -> None:
    with outbox.begin() as connection:
        connection.execute(text("CREATE SCHEMA sales"))
    schema.init(outbox, inbox=None, outbox="sales.outbox", version_table="sales_version")
    sinks = [ListSink(), ListSink()]
    sources = [WalSource(outbox), WalSource(outbox, "sales.outbox")]
    relays = [Relay(source, sink) for source, sink in zip(sources, sinks, strict=True)]
    for relay in relays:
        relay.run_once(0.1)
    emit_events(outbox, 1)
    with outbox.begin() as connection:
        Outbox("orders", "sales.outbox", source="/shop", rows=False).add(connection, [event(2)])
        connection.execute(text("SELECT pg_logical_emit_message(true, 'another', 'x')"))
    eventually(lambda: [relay.run_once(0.1) for relay in relays] and all(s.sent for s in sinks))
    for source in sources:
        source.close()
    assert [sink.ids for sink in sinks] == [["e-1"], ["e-2"]]


def test_sqlite_refuses_events_without_rows(sqlite_url: str) -> None:
    made = make_engine(sqlite_url)
    with made.begin() as connection, pytest.raises(ConfigError, match="for PostgreSQL"):
        EMITS.add(connection, [event(1)])
    made.dispose()


def test_delayed_events_come_when_they_are_due(outbox: Engine) -> None:
    source, sink = WalSource(outbox), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    add = Outbox("orders").add
    with outbox.begin() as connection:
        for number, seconds in enumerate((0.3, 0.1, 3600)):
            event = Message(b"{}", {"id": f"later-{number}", "type": "t", "source": "/shop"})
            add(connection, [event], after=seconds)
    with running([relay]):
        eventually(lambda: len(sink.ids) == 2)
    assert sink.ids == ["later-1", "later-0"]
