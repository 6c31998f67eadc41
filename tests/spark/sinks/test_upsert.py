"""conquiet-upsert: rows by key into PostgreSQL and SQLite, each batch once."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from tests.spark.sinks.upserting import Base, postgres_base, sqlite_base
from tests.waiting import eventually

from conquiet.errors import ConfigError
from conquiet.spark import register
from conquiet.spark.upsert.sink import UpsertSink
from conquiet.spark.upsert.target import UnfitRows, UpsertFailed

ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, state text, total bigint)"


@pytest.fixture(params=["sqlite", "postgres"])
def base(request: pytest.FixtureRequest) -> Base:
    """Each of the two databases in turn, with a table of orders."""
    if request.param == "sqlite":
        made = sqlite_base(request.getfixturevalue("sqlite_url"))
    else:
        made = postgres_base(request.getfixturevalue("database_url"))
    made.run(ORDERS)
    return made


def frame(*rows: tuple[int, str, int]) -> pa.RecordBatch:
    names = ("id", "state", "total")
    return pa.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows])


def writer(base: Base, like: pa.RecordBatch, **options: object):
    given = {"url": base.url, "table": "orders", "keys": "id"} | options
    sink = UpsertSink({name: str(value) for name, value in given.items()})
    return sink.writer(from_arrow_schema(like.schema), False)


def write(base: Base, *tasks: pa.RecordBatch, **options: object) -> None:
    """Write a frame whose tasks have these rows."""
    made = writer(base, tasks[0], **options)
    made.commit([made.write(iter([task])) for task in tasks])


def test_rows_are_inserted_and_replaced_by_key(base):
    write(base, frame((1, "new", 5), (2, "new", 6)), frame((3, "new", 7)))
    write(base, frame((2, "paid", 6)), frame((4, "new", 8)))
    assert base.rows("SELECT * FROM orders ORDER BY id") == [
        (1, "new", 5),
        (2, "paid", 6),
        (3, "new", 7),
        (4, "new", 8),
    ]
    assert base.staged() == []


def test_a_batch_of_a_query_is_written_once(base):
    write(base, frame((1, "new", 5)), query="q", batch=0)
    base.run("UPDATE orders SET total = 99")
    write(base, frame((1, "new", 5)), query="q", batch=0)  # a replay
    assert base.rows("SELECT total FROM orders") == [(99,)]
    write(base, frame((1, "paid", 5)), query="q", batch=1)
    write(base, frame((1, "new", 5)), query="q", batch=0)
    assert base.rows("SELECT state FROM orders") == [("paid",)]
    write(base, frame((1, "lost", 5)), query="another", batch=0)
    assert base.rows("SELECT state FROM orders") == [("lost",)]
    assert base.staged() == []


def test_the_highest_in_order_wins_within_a_batch_and_against_the_table(base):
    one, two = frame((1, "b", 2), (1, "a", 1), (2, "x", 1)), frame((1, "c", 3))
    write(base, one, two, orderBy="total")
    assert base.rows("SELECT * FROM orders ORDER BY id") == [(1, "c", 3), (2, "x", 1)]
    write(base, frame((1, "late", 2), (2, "same", 1)), orderBy="total")
    assert base.rows("SELECT * FROM orders ORDER BY id") == [(1, "c", 3), (2, "same", 1)]


def test_a_key_twice_in_a_batch_is_an_error_that_names_it(base):
    made = writer(base, frame((7, "a", 1)))
    messages = [made.write(iter([frame((7, "a", 1))])), made.write(iter([frame((7, "b", 2))]))]
    with pytest.raises(UnfitRows, match="id=7 is in the batch 2 times"):
        made.commit(messages)
    made.abort(messages)
    assert base.rows("SELECT * FROM orders") == []
    assert base.staged() == []


def test_a_row_without_a_key_is_an_error(base):
    row = pa.RecordBatch.from_pylist(
        [{"id": None, "state": "a", "total": 1}], schema=frame((1, "", 1)).schema
    )
    with pytest.raises(UnfitRows, match="1 rows have NULL in 'id'"):
        writer(base, row).write(iter([row]))
    assert base.staged() == []


def test_an_aborted_write_leaves_nothing(base):
    made = writer(base, frame((1, "a", 1)))
    message = made.write(iter([frame((1, "a", 1))]))
    assert len(base.staged()) == 1
    made.abort([message, None])
    assert base.staged() == []
    assert base.rows("SELECT * FROM orders") == []


def test_a_task_that_fails_leaves_nothing(base):
    def rows():
        yield frame((1, "a", 1))
        raise RuntimeError("the task dies here")

    with pytest.raises(RuntimeError, match="the task dies here"):
        writer(base, frame((1, "a", 1))).write(rows())
    assert base.staged() == []


def test_what_a_killed_driver_staged_is_swept_by_the_next(base):
    dead = writer(base, frame((1, "a", 1)), query="q", batch=0)
    dead.write(iter([frame((1, "a", 1))]))
    other = writer(base, frame((9, "b", 1)), query="other", batch=0)
    kept = other.write(iter([frame((9, "b", 1))]))
    write(base, frame((1, "a", 1)), query="q", batch=0)
    assert len(base.staged()) == 1  # another query's, which may be running
    other.commit([kept])
    assert base.staged() == []
    assert base.rows("SELECT id FROM orders ORDER BY id") == [(1,), (9,)]


def test_empty_tasks_and_empty_frames_write_nothing(base):
    made = writer(base, frame((1, "a", 1)), query="q", batch=3)
    made.commit([made.write(iter([])), None])
    assert base.rows("SELECT * FROM orders") == []
    assert base.staged() == []


def test_every_simple_type_arrives(base):
    moment = datetime(2026, 1, 31, 12, 0, 0, 5, UTC)
    row = {
        "id": 1,
        "flag": True,
        "small": 3,
        "ratio": 0.5,
        "name": "größer ☃ '\"\\",
        "raw": bytes(range(256)),
        "day": date(2026, 3, 8),
        "at": moment,
        "price": Decimal("12.30"),
        "none": None,
    }
    schema = pa.schema(
        {
            "id": pa.int64(),
            "flag": pa.bool_(),
            "small": pa.int16(),
            "ratio": pa.float64(),
            "name": pa.string(),
            "raw": pa.binary(),
            "day": pa.date32(),
            "at": pa.timestamp("us", "UTC"),
            "price": pa.decimal128(10, 2),
            "none": pa.string(),
        }
    )
    batch = pa.RecordBatch.from_pylist([row], schema)
    base.run(
        "CREATE TABLE kinds (id bigint PRIMARY KEY, flag boolean, small smallint, ratio"
        " double precision, name text, raw BINARY, day date, at timestamptz, price numeric, none"
        " text)".replace("BINARY", base.binary)
    )
    write(base, batch, table="kinds")
    [found] = base.rows("SELECT * FROM kinds")
    if base.is_sqlite:
        written = {**row, "day": "2026-03-08", "at": "2026-01-31 12:00:00.000005", "price": 12.3}
    else:
        written = row
    assert found == tuple(written.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keys": "number"}, "no such column; it has id, state, total"),
        ({"keys": ""}, "needs the option keys"),
        ({"orderBy": "when"}, "orderBy=when"),
        ({"table": "nowhere"}, r"CREATE TABLE nowhere \(id (bigint|INTEGER)"),
        ({"keys": "state"}, "CREATE UNIQUE INDEX"),
        ({"key": "id"}, "has no option 'key'"),
        ({"query": "q"}, "Give the option batch"),
        ({"batch": "1"}, "give the option query"),
        ({"table": "orders; drop"}, "a-z, 0-9"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_written(base, options, told):
    with pytest.raises(ConfigError, match=told):
        writer(base, frame((1, "a", 1)), **options)


def test_columns_that_do_not_fit_are_told_before_anything_is_written(base):
    extra = pa.RecordBatch.from_pylist([{"id": 1, "colour": "red"}])
    with pytest.raises(ConfigError, match='ADD COLUMN "colour" '):
        writer(base, extra)
    nested = pa.RecordBatch.from_pylist([{"id": 1, "state": {"a": 1}}])
    with pytest.raises(ConfigError, match="to_json"):
        writer(base, nested)


def test_a_stream_goes_by_its_checkpoint_and_by_no_name_that_outlives_it(base):
    """Under a name, a new checkpoint would begin with batches that count as written."""
    options = {"url": base.url, "table": "orders", "keys": "id", "query": "q"}
    schema = from_arrow_schema(frame((1, "a", 1)).schema)
    for given in (options, options | {"batch": "0"}):
        with pytest.raises(ConfigError, match="a stream is identified by its checkpoint"):
            UpsertSink(given).streamWriter(schema, False)


def test_a_table_is_never_overwritten(base):
    batch = frame((1, "a", 1))
    sink = UpsertSink({"url": base.url, "table": "orders", "keys": "id"})
    with pytest.raises(ConfigError, match="never a table"):
        sink.writer(from_arrow_schema(batch.schema), True)


def test_a_type_that_cannot_be_cast_is_told_before_anything_is_written(database_url):
    base = postgres_base(database_url)
    base.run("CREATE TABLE orders (id bigint PRIMARY KEY, state timestamptz, total bigint)")
    flags = pa.RecordBatch.from_pylist([{"id": 1, "state": True}])
    with pytest.raises(ConfigError, match="cannot cast type boolean to timestamp"):
        writer(base, flags)


def test_a_text_that_is_too_long_is_refused_and_not_cut(database_url):
    base = postgres_base(database_url)
    base.run("CREATE TABLE orders (id bigint PRIMARY KEY, state varchar(3), total bigint)")
    with pytest.raises(UpsertFailed, match="too long"):
        write(base, frame((1, "shipped", 1)), query="q", batch=0)
    write(base, frame((1, "new", 1)), query="q", batch=0)  # the fence did not move
    assert base.rows("SELECT state FROM orders") == [("new",)]


def test_text_becomes_json_uuid_and_numbers_in_postgresql(database_url):
    base = postgres_base(database_url)
    base.run("CREATE TABLE orders (id uuid PRIMARY KEY, state jsonb, total int)")
    id_ = "01900000-0000-7000-8000-000000000001"
    write(base, pa.RecordBatch.from_pylist([{"id": id_, "state": '{"a": 1}', "total": "7"}]))
    assert base.rows("SELECT id::text, state->>'a', total FROM orders") == [(id_, "1", 7)]
    with pytest.raises(UpsertFailed, match="invalid input syntax"):
        write(base, pa.RecordBatch.from_pylist([{"id": id_, "state": "{", "total": "7"}]))


def test_two_drivers_of_one_query_write_a_batch_once(database_url):
    base = postgres_base(database_url)
    base.run(ORDERS)
    first = writer(base, frame((1, "a", 1)), query="q", batch=0)
    second = writer(base, frame((1, "a", 1)), query="q", batch=0)
    messages = [made.write(iter([frame((1, "a", 1))])) for made in (first, second)]
    first.commit([messages[0]])
    base.run("DELETE FROM orders")
    second.commit([messages[1]])
    assert base.rows("SELECT * FROM orders") == []


def test_a_key_that_another_writer_brings_into_an_empty_table_is_replaced(database_url):
    base = postgres_base(database_url)
    base.run(ORDERS)
    made = writer(base, frame((1, "ours", 1), (2, "ours", 2)))
    message = made.write(iter([frame((1, "ours", 1), (2, "ours", 2))]))
    with psycopg.connect(base.url) as other, ThreadPoolExecutor(1) as beside:
        other.execute("INSERT INTO orders VALUES (2, 'theirs', 9), (3, 'theirs', 9)")
        committed = beside.submit(made.commit, [message])
        waiting = "SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
        eventually(lambda: len(base.rows(waiting)) == 1)
        other.commit()
        committed.result()
    assert base.rows("SELECT * FROM orders ORDER BY id") == [
        (1, "ours", 1),
        (2, "ours", 2),
        (3, "theirs", 9),
    ]


def test_sqlite_waits_for_the_application(sqlite_url, tmp_path):
    base = sqlite_base(sqlite_url)
    base.run(ORDERS)
    made = writer(base, frame((1, "a", 1)))
    busy = sqlite3.connect(base.file, isolation_level=None)
    busy.execute("BEGIN IMMEDIATE")
    message = made.write(iter([frame((1, "a", 1))]))  # staging takes no lock
    busy.execute("COMMIT")
    busy.close()
    made.commit([message])
    assert base.rows("SELECT id FROM orders") == [(1,)]


# --- on Spark ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frame_and_a_stream_on_spark(spark, database_url, tmp_path: Path):
    """A stream with a replayed batch: its commit in the checkpoint is lost, as by a crash."""
    from conquiet.spark import upsert_into

    register(spark)
    base = postgres_base(database_url)
    base.run(ORDERS)
    rows = spark.range(100).selectExpr("id", "'new' AS state", "id * 2 AS total").repartition(3)
    upsert_into(rows, "orders", ["id"], url=database_url)
    assert base.rows("SELECT count(*), sum(total) FROM orders") == [(100, 9900)]

    rows.selectExpr("id", "'paid' AS state", "total").write.parquet(str(tmp_path / "in"))

    def run() -> None:
        query = (
            spark.readStream.schema(rows.schema)
            .parquet(str(tmp_path / "in"))
            .writeStream.format("conquiet-upsert")
            .options(url=database_url, table="orders", keys="id")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(100)

    run()
    assert base.rows("SELECT DISTINCT state FROM orders") == [("paid",)]
    base.run("UPDATE orders SET state = 'touched'")
    for lost in (tmp_path / "checkpoint" / "commits").iterdir():
        lost.unlink()
    run()
    assert base.rows("SELECT DISTINCT state FROM orders") == [("touched",)]
    assert base.staged() == []
    with pytest.raises(Exception, match="no such column; it has id, state, total"):
        upsert_into(rows, "orders", ["number"], url=database_url)


def test_foreach_batch_writes_each_batch_once(spark, sqlite_url, tmp_path: Path):
    from conquiet.spark import upsert_batches_into

    base = sqlite_base(sqlite_url)
    base.run(ORDERS)
    rows = spark.range(20).selectExpr("id", "'new' AS state", "id AS total")
    rows.write.parquet(str(tmp_path / "in"))

    def run() -> None:
        query = (
            spark.readStream.schema(rows.schema)
            .parquet(str(tmp_path / "in"))
            .writeStream.foreachBatch(upsert_batches_into("orders", ["id"], url=sqlite_url))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(100)

    run()
    assert base.rows("SELECT count(*), sum(total) FROM orders") == [(20, 190)]
    base.run("UPDATE orders SET state = 'touched'")
    for lost in (tmp_path / "checkpoint" / "commits").iterdir():
        lost.unlink()
    run()
    assert base.rows("SELECT DISTINCT state FROM orders") == [("touched",)]
