"""An outbox that is divided by day: what was there, what comes, and what goes as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import Engine, MetaData, Table, inspect, text
from sqlalchemy.exc import OperationalError
from tests.integration.sql.claiming import ListSink, fill, rows, running
from tests.integration.sql.test_explain import FILL, kinds, plan
from tests.integration.sql.test_wal_source import drain
from tests.waiting import eventually

from conquiet.cli import main
from conquiet.errors import ConfigError, StoreError
from conquiet.relay import Relay
from conquiet.relay.inspection import Inspection
from conquiet.sql import (
    Cleanup,
    LogSource,
    Outbox,
    OutboxSource,
    Transaction,
    WalSource,
    claim,
    days,
    log,
    schema,
)
from conquiet.sql import engine as make_engine
from conquiet.sql.claim import PsycopgClaimer
from conquiet.sql.cleanup import Removed
from conquiet.sql.outbox_source import outbox_layout
from conquiet.testing import message

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.fixture
def divided(database_url: str) -> Iterator[Engine]:
    made = make_engine(database_url)
    schema.migrate(made, by_day=True)
    yield made
    made.dispose()


def names(engine: Engine) -> list[str]:
    return sorted(
        name
        for name in inspect(engine).get_table_names()
        if name.startswith(("outbox_first", "outbox_d2"))
    )


def age(engine: Engine, ago: int) -> str:
    """Add a day of the past, as if time had gone by; return its name."""
    begins = TODAY - timedelta(days=ago)
    ends = begins + timedelta(days=1)
    name = f"outbox_d{begins:%Y%m%d}"
    with engine.begin() as connection:
        first = connection.execute(text("SELECT to_regclass('outbox_first')")).scalar()
        if first is not None:  # it reaches back without an end
            connection.execute(text("ALTER TABLE outbox DETACH PARTITION outbox_first"))
            connection.execute(text("DROP TABLE outbox_first"))
            today = f"outbox_d{TODAY:%Y%m%d}"
            add_day(connection, today, TODAY, TODAY + timedelta(days=1))
        add_day(connection, name, begins, ends)
    return name


def add_day(connection, name: str, begins: datetime, ends: datetime) -> None:
    bounds = f"FOR VALUES FROM ('{begins:%Y-%m-%d 00:00+00}') TO ('{ends:%Y-%m-%d 00:00+00}')"
    quoted = bounds.replace("'", "''")
    for statement in (
        f"CREATE TABLE {name} (LIKE outbox INCLUDING ALL, PRIMARY KEY (id))",
        f"COMMENT ON TABLE {name} IS '{quoted}'",
        f"ALTER TABLE outbox ATTACH PARTITION {name} {bounds}",
    ):
        connection.exec_driver_sql(statement)


def noon(ago: int) -> datetime:
    return TODAY - timedelta(days=ago) + timedelta(hours=12)


def test_a_new_outbox_has_a_week_of_days_ahead(database_url: str) -> None:
    made = make_engine(database_url)
    schema.init(made, by_day=True)
    ahead = [TODAY + timedelta(days=n) for n in range(1, days.DAYS_AHEAD + 1)]
    assert names(made) == [f"outbox_d{day:%Y%m%d}" for day in ahead] + ["outbox_first"]
    assert schema.verify(made) == []
    schema.migrate(made, by_day=True)  # again: there is nothing to do
    assert schema.verify(made) == []
    made.dispose()


def test_rows_that_are_there_stay_and_ids_go_on(postgres: Engine) -> None:
    fill(postgres, 3)
    schema.migrate(postgres, by_day=True)
    fill(postgres, 3, 4)
    found = rows(postgres)
    assert [row.event_id for row in found] == [f"e-{n}" for n in range(1, 7)]
    ids = [row.id for row in found]
    assert ids == sorted(set(ids))
    with postgres.begin() as connection:  # ids go on when the table that numbered them is gone
        connection.execute(text("DELETE FROM outbox"))
        connection.execute(text("ALTER TABLE outbox DETACH PARTITION outbox_first"))
        connection.execute(text("DROP TABLE outbox_first"))
        add_day(connection, f"outbox_d{TODAY:%Y%m%d}", TODAY, TODAY + timedelta(days=1))
    fill(postgres, 1, 7)
    assert rows(postgres)[0].id > max(ids)


def test_services_write_and_relays_publish_while_the_outbox_is_divided(postgres: Engine) -> None:
    source, sink = OutboxSource(postgres, poll=0.01), ListSink()
    outbox, written, stopping = Outbox("orders"), [0], threading.Event()

    def write() -> None:
        while not stopping.is_set():
            batch = [message(id=f"w-{written[0]}")]
            with Transaction(postgres).scope(batch):
                outbox.store(batch)
            written[0] += 1

    thread = threading.Thread(target=write)
    with running([Relay(source, sink)]):
        thread.start()
        try:
            eventually(lambda: len(sink.sent) > 10)
            schema.migrate(postgres, by_day=True)
            then = written[0]
            eventually(lambda: written[0] > then + 10 or not thread.is_alive())
        finally:
            stopping.set()
            thread.join()
        eventually(lambda: len(sink.sent) >= written[0])
    source.close()
    assert written[0] > then
    assert sorted(sink.ids) == sorted(f"w-{n}" for n in range(written[0]))


@pytest.mark.parametrize("ordered", [False, True])
def test_relays_claim_mark_and_park_rows_of_any_day(divided: Engine, ordered: bool) -> None:
    age(divided, 1)
    for number in range(1, 7):
        fill(divided, 1, number, created_at=noon(int(number < 4)), key=f"k-{number}")
    source = OutboxSource(divided, ordered=ordered, max_attempts=1, wakeup=False)
    first, *others = source.read(10, 1)
    assert [first.id, *(one.id for one in others)] == [f"e-{n}" for n in range(1, 7)]
    first.nack(ValueError("no"))
    for one in others:
        one.ack()
    source.close()
    found = rows(divided)
    assert [row.published_at is None for row in found] == [True] + [False] * 5
    assert found[0].parked_at is not None


def test_a_worker_reads_the_days_as_one_log(divided: Engine) -> None:
    age(divided, 1)
    fill(divided, 3, 1, created_at=noon(1))
    fill(divided, 3, 4)
    source = LogSource(divided, "orders", "billing", partitions=1)
    seen: list[str] = []

    def read() -> bool:
        for one in source.read(10, 1):
            seen.append(one.id)
            one.ack()
        return len(seen) == 6

    eventually(read)
    source.close()
    assert seen == [f"e-{n}" for n in range(1, 7)]


@pytest.mark.parametrize("what", ["claim", "keys", "rows of a key", "mark", "log"])
def test_no_statement_that_runs_all_the_time_reads_a_whole_day(divided: Engine, what: str) -> None:
    full = age(divided, 1)
    filled = FILL.replace("published_at)", "published_at, created_at)").replace(
        "FROM generate", f", '{noon(1)}'::timestamptz FROM generate"
    )
    url = divided.url.set(drivername="postgresql").render_as_string(False)
    with psycopg.connect(url) as direct:
        direct.execute(filled, (19_990, 20_000))
        direct.execute("ANALYZE outbox")
    free, ordered = (PsycopgClaimer(divided, outbox_layout(), ordered=by) for by in (False, True))
    keys = claim.lock_keys(outbox_layout(), "outbox", divided.dialect, beyond=">=")
    reader = log._POSTGRESQL.format(table="outbox")
    for name, value in (
        *((":after", "''"), (":held", "'{}'"), (":name", "'outbox'"), (":count", "100")),
        *((":xid", "'5'"), (":id", "5000"), (":limit", "100")),
    ):
        keys, reader = keys.replace(name, value), reader.replace(name, value)
    statement, given = {
        "claim": (free._queries[False, False], (7, 100)),
        "keys": (keys, ()),
        "rows of a key": (ordered._of_keys_sql, (50, ["k1", "k2"], 50)),
        "mark": (free._publish_sql, ([1, 2, 3],)),
        "log": (reader, ()),
    }[what]
    options = "-c enable_sort=off"  # as in each claim
    made = make_engine(divided.url, connect_args={} if what == "log" else {"options": options})
    steps = plan(made, statement, given)
    made.dispose()
    of_the_day = [step for step in steps if step.get("Relation Name") == full]
    assert of_the_day
    assert kinds(of_the_day) <= {"Index Scan", "Index Only Scan", "LockRows", "ModifyTable"}
    assert "Sort" not in kinds(steps)


# --- days that are done -----------------------------------------------------------------------


def test_a_day_goes_as_a_whole_when_it_is_published_and_old_enough(divided: Engine) -> None:
    old, kept = age(divided, 9), age(divided, 7)
    fill(divided, 5, 1, created_at=noon(9), published_at=noon(9))
    fill(divided, 5, 6, created_at=noon(7), published_at=noon(7))
    fill(divided, 5, 11, published_at=noon(0) - timedelta(days=20))
    inspection = Inspection(divided, "outbox")
    assert inspection.prunable(7 * 86_400) == 5
    assert Cleanup(divided).run_once() == Removed(outbox=5)
    assert old not in names(divided)
    assert kept in names(divided)
    assert len(rows(divided)) == 10  # one by one, no row goes
    assert inspection.prunable(7 * 86_400) == 0


@pytest.mark.parametrize(
    "held",
    [
        "UPDATE outbox SET published_at = NULL, parked_at = now() WHERE event_id = 'e-1'",
        "UPDATE outbox SET published_at = NULL WHERE event_id = 'e-1'",
        "UPDATE outbox SET published_at = now() WHERE event_id = 'e-1'",
        "INSERT INTO outbox_retries (id, consumer_group, topic, partition, xid, attempts, next_try)"
        " SELECT id, 'billing', topic, 0, 0, 1, 0 FROM outbox WHERE event_id = 'e-1'",
        "INSERT INTO outbox_positions (consumer_group, topic, partition, xid, id)"
        " SELECT 'billing', topic, 0, xid::text::bigint, id - 1 FROM outbox WHERE event_id = 'e-5'",
    ],
    ids=["parked", "waits", "published late", "to be retried", "not read"],
)
def test_a_day_stays_for_a_row_that_is_needed_and_its_others_go(divided: Engine, held: str) -> None:
    name = age(divided, 9)
    for number in range(1, 6):
        fill(divided, 1, number, created_at=noon(9), published_at=noon(8))
    with divided.begin() as connection:
        connection.execute(text(held))
    assert Cleanup(divided).run_once() == Removed(outbox=4)
    assert name in names(divided)
    [found] = rows(divided)
    assert found.event_id == ("e-5" if "positions" in held else "e-1")
    with divided.begin() as connection:
        connection.execute(text("UPDATE outbox SET published_at = created_at, parked_at = NULL"))
        connection.execute(text("DELETE FROM outbox_retries"))
        connection.execute(text("DELETE FROM outbox_positions"))
    assert Cleanup(divided).run_once() == Removed(outbox=1)
    assert name not in names(divided)


def test_an_outbox_without_relay_loses_days_that_all_groups_have_read(divided: Engine) -> None:
    name = age(divided, 9)
    fill(divided, 5, 1, created_at=noon(9))
    cleanup = Cleanup(divided, relayed=False)
    assert cleanup.run_once() == Removed()  # a topic without a group stays
    source = LogSource(divided, "orders", "billing", partitions=1)
    for one in source.read(10, 5):
        one.ack()
    source.close()
    assert cleanup.run_once() == Removed(outbox=5)
    assert name not in names(divided)


def test_a_day_waits_for_a_claim_in_it_and_locks_no_writer_out(divided: Engine) -> None:
    name = age(divided, 9)
    fill(divided, 1, 1, created_at=noon(9), published_at=noon(9))
    fill(divided, 1, 2)
    source = OutboxSource(divided, wakeup=False)
    [claimed] = source.read(10, 1)
    thread = threading.Thread(target=Cleanup(divided).run_once)
    thread.start()
    waits = text("SELECT count(*) FROM pg_inherits WHERE inhdetachpending")
    with divided.connect() as connection:
        plain = connection.execution_options(isolation_level="AUTOCOMMIT")
        eventually(lambda: plain.execute(waits).scalar() == 1)
        fill(divided, 1, 3)  # beside the DETACH that waits
        other = OutboxSource(divided, wakeup=False)
        assert [one.id for one in other.read(10, 1)] == ["e-3"]
        other.close()
        assert thread.is_alive()
        claimed.ack()
        thread.join(30)
    source.close()
    assert name not in names(divided)


def test_a_day_that_is_needed_after_all_is_attached_again(
    divided: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = age(divided, 9)
    fill(divided, 2, 1, created_at=noon(9), published_at=noon(9))
    attach = days._attach
    attached = []

    def note(connection, table, day, bounds) -> None:
        attached.append(day)
        attach(connection, table, day, bounds)

    monkeypatch.setattr(days, "_attach", note)
    answers = iter([False, True])  # an operator unmarked a row in between
    assert days.drop(divided, "outbox", 86_400, lambda *_: next(answers)) == 0
    assert attached == [name]
    assert len(rows(divided)) == 2
    assert schema.verify(divided) == []
    assert Cleanup(divided).run_once() == Removed(outbox=2)


@pytest.mark.parametrize("where", ["before the table is gone", "while the day is detached"])
def test_a_cleanup_that_was_interrupted_is_finished_by_the_next(
    divided: Engine, where: str
) -> None:
    name = age(divided, 9)
    fill(divided, 2, 1, created_at=noon(9), published_at=noon(9))
    with divided.connect() as plain, divided.connect() as reader:
        connection = plain.execution_options(isolation_level="AUTOCOMMIT")
        if where == "while the day is detached":
            reader.execute(text("SELECT count(*) FROM outbox"))
            connection.exec_driver_sql("SET statement_timeout = '200ms'")
            with pytest.raises(OperationalError, match="statement timeout"):
                connection.exec_driver_sql(
                    f"ALTER TABLE outbox DETACH PARTITION {name} CONCURRENTLY"
                )
            connection.exec_driver_sql("RESET statement_timeout")
            reader.rollback()
        else:
            connection.exec_driver_sql(f"ALTER TABLE outbox DETACH PARTITION {name} CONCURRENTLY")
    assert Cleanup(divided).run_once() == Removed(outbox=2)
    assert name not in names(divided)


def test_a_role_that_does_not_own_the_outbox_is_told_so_and_cleans_the_inbox(
    divided: Engine,
) -> None:
    role = "cleans_" + (divided.url.database or "")
    with divided.begin() as connection:
        for statement in (
            f'CREATE ROLE "{role}" NOLOGIN',
            f'GRANT SELECT, DELETE, UPDATE ON ALL TABLES IN SCHEMA public TO "{role}"',
            f"DROP TABLE {names(divided)[0]}",
            "INSERT INTO processed_messages VALUES ('billing', 'm-1', now() - interval '8 days')",
        ):
            connection.execute(text(statement))
    limited = make_engine(divided.url, connect_args={"options": f"-c role={role}"})
    with pytest.raises(StoreError, match=r"owner of table outbox|permission denied for schema"):
        Cleanup(limited).run_once()
    limited.dispose()
    with divided.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM processed_messages")).scalar() == 0
        connection.execute(text(f'DROP OWNED BY "{role}"'))
        connection.execute(text(f'DROP ROLE "{role}"'))


def test_a_table_of_somebody_else_is_never_dropped(divided: Engine) -> None:
    with divided.begin() as connection:
        connection.execute(text("CREATE TABLE outbox_d20200101 (id bigint)"))
    assert Cleanup(divided).run_once() == Removed()
    assert "outbox_d20200101" in names(divided)


# --- days to come -----------------------------------------------------------------------------


def test_cleanup_adds_the_days_to_come_with_the_settings_of_the_last(divided: Engine) -> None:
    *_, before, last, _first = names(divided)
    with divided.begin() as connection:
        connection.execute(text(f"DROP TABLE {last}"))
        connection.execute(text(f"ALTER TABLE {before} SET (autovacuum_vacuum_scale_factor = 0.3)"))
    Cleanup(divided).run_once()
    assert last in names(divided)
    query = text("SELECT reloptions FROM pg_class WHERE relname = :name")
    with divided.connect() as connection:
        options = connection.execute(query, {"name": last}).scalar()
    assert "autovacuum_vacuum_scale_factor=0.3" in options
    assert schema.verify(divided) == []


def test_without_a_day_messages_wait_and_are_not_to_blame(divided: Engine) -> None:
    with divided.begin() as connection:
        connection.execute(text("ALTER TABLE outbox DETACH PARTITION outbox_first"))
    [difference] = schema.verify(divided)
    assert str(difference) == "outbox: day of today should be there, is missing"
    batch = [message(id="m-1")]
    with pytest.raises(StoreError, match="no partition"), Transaction(divided).scope(batch):
        Outbox("orders").store(batch)
    schema.migrate(divided)
    assert schema.verify(divided) == []
    with Transaction(divided).scope(batch):
        Outbox("orders").store(batch)


def test_verify_says_what_is_wrong_with_the_days(divided: Engine) -> None:
    name = names(divided)[0]
    with divided.begin() as connection:
        for statement in (
            f"ALTER TABLE {name} DROP CONSTRAINT {name}_pkey",
            "CREATE TABLE rest PARTITION OF outbox (PRIMARY KEY (id)) DEFAULT",
        ):
            connection.execute(text(statement))
        for day in names(divided)[1:-1]:
            connection.execute(text(f"DROP TABLE {day}"))
    ends = TODAY + timedelta(days=2)
    found = [str(one) for one in schema.verify(divided)]
    assert f"outbox: primary key of {name} should be id, is missing" in found
    assert "outbox: default partition should be missing, is rest" in found
    [one] = [one for one in found if one.startswith("outbox: days")]
    assert f"until {ends:%Y-%m-%d}" in one


# --- the change ---------------------------------------------------------------------------------


def test_sqlite_is_refused(sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match="by_day is for PostgreSQL"):
        schema.migrate(sqlite_url, by_day=True)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("CREATE VIEW mine AS SELECT id FROM outbox", "the view mine"),
        ("CREATE UNIQUE INDEX mine ON outbox (event_id)", "the unique index mine"),
        ("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY", "row level security"),
        ("CREATE PUBLICATION conquiet_mine FOR TABLE outbox", "the publication conquiet_mine"),
        (
            "CREATE TABLE mine (id bigint REFERENCES outbox (id))",
            "the foreign key mine_id_fkey",
        ),
    ],
)
def test_what_would_stay_behind_is_named_and_nothing_is_changed(
    postgres: Engine, statement: str, what: str
) -> None:
    with postgres.begin() as connection:
        connection.execute(text(statement))
    with pytest.raises(ConfigError, match=what):
        schema.migrate(postgres, by_day=True)
    assert names(postgres) == []
    assert schema.verify(postgres) == []


def test_rights_and_own_indexes_are_kept(postgres: Engine) -> None:
    role = "days_" + (postgres.url.database or "")
    with postgres.begin() as connection:
        for statement in (
            f'CREATE ROLE "{role}" NOLOGIN',
            f'GRANT INSERT ON outbox TO "{role}" WITH GRANT OPTION',
            f'GRANT SELECT, UPDATE (published_at, attempts) ON outbox TO "{role}"',
            "CREATE INDEX mine ON outbox (event_id) WHERE topic <> '100%'",
        ):
            connection.exec_driver_sql(statement.replace("%", "%%"))
    query = text(
        "SELECT pg_get_indexdef('mine'::regclass), relacl::text,"
        " (SELECT array_agg(attname || attacl::text) FROM pg_attribute"
        " WHERE attrelid = c.oid AND attacl IS NOT NULL)"
        " FROM pg_class AS c WHERE relname = 'outbox'"
    )
    with postgres.connect() as connection:
        before = connection.execute(query).one()
    schema.migrate(postgres, by_day=True)
    with postgres.connect() as connection:
        after = connection.execute(query).one()
    with postgres.begin() as connection:
        connection.execute(text(f'DROP OWNED BY "{role}"'))
        connection.execute(text(f'DROP ROLE "{role}"'))
    assert after[1:] == before[1:]
    assert after[0].replace(" ON ONLY ", " ON ") == before[0]


def test_autogenerate_leaves_the_days_alone(divided: Engine) -> None:
    for name in names(divided):
        item = Table(name, MetaData(), schema=None)
        assert not schema.include_object(item, name, "table", True, None)
    item = Table("orders_d20261120", MetaData())
    assert schema.include_object(item, "orders_d20261120", "table", True, None)


def test_a_relay_follows_the_log_of_a_divided_outbox(divided: Engine) -> None:
    age(divided, 9)
    source, sink = WalSource(divided), ListSink()
    relay = Relay(source, sink)
    drain(relay)
    fill(divided, 5, 1, created_at=noon(9))
    fill(divided, 5, 6)
    drain(relay)
    assert sink.ids == [f"e-{n}" for n in range(1, 11)]

    def is_dropped() -> bool:
        with divided.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("CHECKPOINT"))
        drain(relay)
        return Cleanup(divided).run_once().outbox == 5

    eventually(is_dropped, timeout=60, interval=0.05)
    fill(divided, 5, 11)
    drain(relay)
    source.close()
    assert sink.ids == [f"e-{n}" for n in range(1, 16)]
    source.outbox.leave(lambda seconds: True)
    assert len(rows(divided)) == 10
    assert all(row.published_at for row in rows(divided))


def test_the_command_divides_an_outbox(postgres: Engine, capsys: pytest.CaptureFixture) -> None:
    url = postgres.url.render_as_string(hide_password=False)
    assert main(["outbox", "migrate", "--by-day", "--database", url]) == 0
    assert "divided by day" in capsys.readouterr().out
    assert main(["outbox", "verify", "--database", url]) == 0
    assert "outbox_first" in names(postgres)
