"""The router on Spark: same handlers, effects exactly once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from tests.spark.router.shop import create_tables, orders, outbox_size, sales, shop
from tests.waiting import eventually

from conquiet import Router
from conquiet.errors import ConfigError
from conquiet.spark.worker import SparkWorker

ROWS = 200


def counts_of(frame) -> dict[str, int]:
    return {row["outcome"]: row["count"] for row in frame.collect()}


def test_a_frame_takes_effect_once_however_often_it_is_run(spark, database_url) -> None:
    engine = create_tables(database_url)
    frame = orders(spark, 0, ROWS)
    registry = CollectorRegistry()
    first = SparkWorker(shop(database_url), frame, batch_size=30, registry=registry)
    assert counts_of(first.run()) == {"handled": ROWS}
    assert counts_of(SparkWorker(shop(database_url), frame).run()) == {"skipped": ROWS}
    assert sales(engine) == list(range(ROWS))
    assert outbox_size(engine) == ROWS
    labels = {"handler": "sell", "outcome": "handled"}
    assert registry.get_sample_value("conquiet_spark_messages_total", labels) == ROWS


def test_what_fails_goes_to_the_dead_letters_and_costs_its_neighbours_nothing(
    spark, database_url, redis_client, redis_url
) -> None:
    engine = create_tables(database_url)
    frame = orders(spark, -3, ROWS)
    broken = "CASE WHEN event_id = 'e-7' THEN 'no fields' END AS _malformed"
    frame = frame.selectExpr("*", broken)
    counted = SparkWorker(shop(database_url, redis_url=redis_url), frame).run().collect()
    assert {(row["handler"], row["outcome"]): row["count"] for row in counted} == {
        ("sell", "handled"): ROWS - 1,
        ("sell", "dead"): 3,
        ("sell", "failed"): 3 * 2,  # tries before the third, which went to the dead letters
        ("(none)", "dead"): 1,
    }
    letters = [fields for _, fields in redis_client.xrange("dead-letters")]
    reasons = sorted(letter[b"deadreason"].decode() for letter in letters)
    assert reasons == [
        "Malformed: entry 1-1007 of 'orders' is not an event: no fields",
        "ValueError: -1 is less than nothing",
        "ValueError: -2 is less than nothing",
        "ValueError: -3 is less than nothing",
    ]
    assert sales(engine) == [number for number in range(ROWS) if number != 7]


def test_without_dead_letters_a_failure_fails_the_job_and_nothing_is_lost(
    spark, database_url
) -> None:
    engine = create_tables(database_url)
    with pytest.raises(Exception, match=r"sell id=e--1 source=/web failed 2 times"):
        SparkWorker(shop(database_url), orders(spark, -1, 20, 1), max_attempts=2).run()
    SparkWorker(shop(database_url), orders(spark, 0, 20)).run()
    assert sales(engine) == list(range(20))


def test_a_store_that_is_away_fails_the_task_and_blames_nobody(spark, redis_url) -> None:
    away = "postgresql://nobody@127.0.0.1:1/none"
    worker = SparkWorker(shop(away, redis_url=redis_url), orders(spark, 0, 2, 1), patience=0.1)
    with pytest.raises(Exception, match=r"2 messages could not be handled within 0\.1 s"):
        worker.run()


@pytest.mark.slow
def test_a_database_that_dies_in_the_middle_is_waited_for(
    spark, private_postgres, redis_client, redis_url
) -> None:
    engine = create_tables(private_postgres.url)

    def die_and_return() -> None:
        eventually(lambda: len(sales(engine)) >= 20, timeout=60)
        private_postgres.kill()
        private_postgres.restart()

    dying = threading.Thread(target=die_and_return)
    dying.start()
    make = shop(private_postgres.url, redis_url=redis_url)
    counts = counts_of(SparkWorker(make, orders(spark, 0, 2000), batch_size=2).run())
    dying.join()
    assert sales(engine) == list(range(2000))
    assert outbox_size(engine) == 2000
    assert "dead" not in counts
    assert redis_client.xlen("dead-letters") == 0


@pytest.mark.parametrize("dies_after_commit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_stream_whose_python_worker_was_killed_goes_on_where_it_was(
    spark, database_url, tmp_path: Path, dies_after_commit: bool
) -> None:
    engine = create_tables(database_url)
    orders(spark, 0, ROWS).write.parquet(str(tmp_path / "orders"))
    frame = spark.readStream.schema(orders(spark, 0, 0).schema).parquet(str(tmp_path / "orders"))
    router = shop(database_url, notes=tmp_path, dies_at=70, dies_after_commit=dies_after_commit)

    def run() -> dict[str, int]:
        worker = SparkWorker(
            router,
            frame,
            batch_size=20,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger={"availableNow": True},
        )
        return counts_of(worker.run())

    with pytest.raises(Exception, match="Python worker exited unexpectedly"):
        run()
    assert 0 < len(sales(engine)) < ROWS
    ended = run()
    assert ended["skipped"] > 0
    assert ended["handled"] + ended["skipped"] == ROWS
    assert sales(engine) == list(range(ROWS))
    assert outbox_size(engine) == ROWS
    assert run() == {}


def test_order_holds_by_key(spark, database_url, tmp_path: Path) -> None:
    engine = create_tables(database_url)
    shuffled = orders(spark, 0, ROWS).orderBy("event_id")
    SparkWorker(shop(database_url), shuffled, by_key=True, batch_size=7).run()
    with engine.connect() as connected:
        rows = connected.execute(sa.text("SELECT key, id FROM sales ORDER BY place")).all()
    for key in range(5):
        assert [row.id for row in rows if row.key == str(key)] == list(range(key, ROWS, 5))


def test_a_python_worker_makes_its_router_once(spark, database_url, tmp_path: Path) -> None:
    create_tables(database_url)
    worker = SparkWorker(shop(database_url, notes=tmp_path), orders(spark, 0, ROWS, 6))
    worker.run()
    worker.run()
    makers = (tmp_path / "made").read_text().split()
    assert len(makers) == len(set(makers))


def test_what_cannot_work_is_refused_before_anything_runs(spark) -> None:
    frame = orders(spark, 0, 1)
    with pytest.raises(ConfigError, match="a function that makes a router"):
        SparkWorker(Router(), frame)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size=0"):
        SparkWorker(Router, frame, batch_size=0)
    with pytest.raises(ConfigError, match="patience='long'"):
        SparkWorker(Router, frame, patience="long")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="columns such as type and data"):
        SparkWorker(Router, spark.range(1))
    with pytest.raises(ConfigError, match=r"start\(\) is for streams"):
        SparkWorker(Router, frame).start()
    with pytest.raises(Exception, match="there is nothing to ack"):
        SparkWorker(lambda: Router(ack="forward"), frame).run()
