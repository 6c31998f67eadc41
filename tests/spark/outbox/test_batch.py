"""A batch of an outbox: every row once, in the columns of the log."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from tests.spark.outbox.rows import fill, fill_at_once, ids, message, numbered, read

from conquiet import Message
from conquiet.errors import ConquietError
from conquiet.spark.outbox.options import OutboxOptions
from conquiet.spark.outbox.statement import RowRange, statement
from conquiet.sql import Outbox
from conquiet.sql.log import OutboxLog, Position


def test_spark_reads_an_outbox_in_parallel(on_spark, url, engine):
    fill_at_once(engine, range(400))
    frame = on_spark(url, minPartitions=4).load()
    rows = frame.selectExpr("event_id", "attributes['correlationid'] AS c", "time").collect()
    assert frame.rdd.getNumPartitions() == 4
    assert sorted(row.event_id for row in rows) == numbered(range(400))
    assert {row.c for row in rows} == {f"c-{number}" for number in range(400)}
    assert {str(row.time) for row in rows} == {"2026-01-31 12:00:00.000001"}


def test_a_row_comes_in_the_columns_of_the_log(url, engine):
    binary = bytes(range(256))
    awkward = Message(
        binary,
        {"id": "x'1", "type": "t", "source": "/s", "time": "soon", "answer": 42, "sure": True}
        | {"said": 'a"ü☃\\'},
        topic="files",
    )
    with engine.begin() as connection:
        Outbox("orders").add(connection, [message(1), awkward])
    plain, odd = read(url)
    assert abs(plain.pop("entry_time") - datetime.now(UTC)) < timedelta(hours=1)
    assert plain.pop("entry_id") == OutboxLog(engine).read()[0].locals["position"]
    assert plain == {
        "stream": "orders",
        "key": "k-1",
        "event_id": "e-1",
        "type": "placed",
        "source": "/shop",
        "subject": "k-1",
        "time": datetime(2026, 1, 31, 12, 0, 0, 1, UTC),
        "content_type": "application/json",
        "attributes": [("specversion", "1.0"), ("correlationid", "c-1")],
        "data": b'{"number": 1}',
        "_malformed": None,
    }
    assert (odd["stream"], odd["event_id"]) == ("files", "x'1")
    assert (odd["key"], odd["subject"], odd["time"]) == (None, None, None)
    assert odd["data"] == binary
    assert {("answer", "42"), ("sure", "true"), ("said", 'a"ü☃\\')} <= set(odd["attributes"])


def test_attributes_that_repeat_are_those_of_their_rows(url, engine):
    with engine.begin() as connection:
        repeated = [message(n, correlationid=f"c-{n % 2}") for n in range(10)]
        Outbox("orders").add(connection, repeated)
    found = [dict(row["attributes"])["correlationid"] for row in read(url)]
    assert found == ["c-0", "c-1"] * 5


def test_ranges_of_ids_hold_every_row_once(url, engine):
    fill_at_once(engine, range(400))
    for tasks in (1, 3, 7):
        assert sorted(ids(read(url, minPartitions=tasks))) == numbered(range(400))


def test_rows_are_chosen_by_topic_type_and_time(url, engine):
    fill(engine, range(1, 5))
    with engine.begin() as connection:
        Outbox("else'where").add(connection, [message(9)])
        moved = "UPDATE outbox SET created_at = '2020-02-03 04:05:06' WHERE event_id = 'e-3'"
        connection.execute(text(moved))
    assert ids(read(url, topic="else'where")) == ["e-9"]
    assert ids(read(url, types="placed, other", topic="orders")) == ["e-1", "e-3"]
    assert ids(read(url, until="2020-02-03T04:05:06Z")) == []
    assert ids(read(url, until="2020-02-03T05:05:06.5+01:00")) == ["e-3"]
    assert ids(read(url, since="2020-02-03T04:05:06.5Z")) == ["e-1", "e-2", "e-4", "e-9"]


def test_a_batch_can_begin_and_end_at_a_position(url, engine):
    fill(engine, range(1, 6))
    positions = [message.locals["position"] for message in OutboxLog(engine).read()]
    between = {"startingOffsets": positions[0], "endingOffsets": positions[2]}
    assert ids(read(url, **between)) == ["e-2", "e-3"]


def test_what_the_relay_did_is_told_when_asked(url, engine):
    fill(engine, [1, 2])
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outbox SET attempts = 3, last_error = 'full',"
                " published_at = '2026-02-03 04:05:06.5' WHERE event_id = 'e-1'"
            )
        )
    first, second = (dict(row["attributes"]) for row in read(url, delivery=True))
    assert (first["attempts"], first["lasterror"]) == ("3", "full")
    assert first["publishedat"].startswith("2026-02-03T04:05:06.5")
    assert second["attempts"] == "0"
    assert "publishedat" not in second
    assert "attempts" not in dict(read(url)[0]["attributes"])


def test_an_empty_outbox_is_an_empty_batch(url, engine):
    assert read(url) == []


def test_a_batch_ends_below_a_transaction_that_still_runs(postgres, database_url):
    with postgres.connect() as slow:
        Outbox("orders").add(slow, [message(1)])
        fill(postgres, [2])
        assert read(database_url) == []
        slow.commit()
    assert sorted(ids(read(database_url))) == ["e-1", "e-2"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"typs": "a"}, "has no option 'typs'"),
        ({"table": "drop table"}, "a-z, 0-9"),
        ({"table": "nowhere"}, "no table nowhere"),
        ({"since": "yesterday"}, "2026-01-31T00:00:00Z"),
        ({"since": "2026-01-31T00:00:00"}, "in which zone"),
        ({"startingOffsets": "first"}, "812-40017"),
        ({"startingOffsets": "latest"}, "is empty"),
        ({"minPartitions": "0"}, "whole number, 1 or more"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"urlEnv": "DATABASE"}, "one of the options"),
        ({"table": "outbox_events", "startingOffsets": "1-1"}, "since="),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_read(url, options, told):
    with pytest.raises(ConquietError, match=told):
        read(url, **options)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://root:hidden@host/x", "PostgreSQL and SQLite"),
        ("sqlite://", "share no memory"),
        ("nothing", "not the URL of a database"),
        ("postgresql://app:hidden@127.0.0.1:1/x", "refused"),
        ("postgresql://app@127.0.0.1:1/x?password=hidden", "refused"),
        ("postgresql://app:part@hidden@127.0.0.1:1/x", "@ .* as %40"),
    ],
)
def test_a_wrong_url_is_told_without_its_password(url, told):
    with pytest.raises(ConquietError, match=told) as error:
        read(url)
    assert "hidden" not in str(error.value)


def test_some_columns_are_enough(on_spark, database_url, postgres):
    fill(postgres, [1])
    narrow = on_spark(database_url).schema("type STRING, event_id STRING")
    assert [tuple(row) for row in narrow.load().collect()] == [("placed", "e-1")]
    with pytest.raises(Exception, match="has no column colour"):
        on_spark(database_url).schema("colour STRING").load().collect()


def test_spark_tells_what_is_wrong(on_spark, sqlite_url):
    with pytest.raises(Exception, match="no table nowhere"):
        on_spark(sqlite_url, table="nowhere").load().collect()


def test_the_url_may_stand_in_a_file_of_each_host(engine, url, tmp_path, monkeypatch):
    fill(engine, [1])
    (tmp_path / "url").write_text(f"{url}\n")
    assert ids(read("", urlFile=tmp_path / "url")) == ["e-1"]
    monkeypatch.setenv("SHOP_DATABASE", url)
    assert ids(read("", urlEnv="SHOP_DATABASE")) == ["e-1"]
    with pytest.raises(ConquietError, match="NOWHERE of this host"):
        read("", urlEnv="NOWHERE")


def test_more_tasks_than_rows_are_no_trouble(url, engine):
    fill(engine, range(3))
    assert sorted(ids(read(url, minPartitions=20))) == numbered(range(3))


def test_ranges_and_stretches_are_read_by_an_index_from_their_beginning(postgres):
    fill_at_once(postgres, range(50))
    options = OutboxOptions.of({"url": "postgresql://x/y"})
    end = Position(9_999_999, 1)
    ids = statement(options, RowRange(upto=end, above="10", to="20"), postgresql=True)
    positions = statement(options, RowRange(after=Position(1, 1), upto=end), postgresql=True)
    with postgres.begin() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        connection.execute(text("SET LOCAL enable_bitmapscan = off"))
        by_id = connection.exec_driver_sql(f"EXPLAIN {ids}").scalars().all()
        by_position = connection.exec_driver_sql(f"EXPLAIN {positions}").scalars().all()
    assert "outbox_pkey" in by_id[0]
    assert "outbox_log" in by_position[0]
    assert "Sort" not in "".join([*by_id, *by_position])
