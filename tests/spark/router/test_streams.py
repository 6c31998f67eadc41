"""The router on Spark over a log that grows: what fails is put aside, and the query lives."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.spark.router.shop import create_tables, sales, shop
from tests.waiting import eventually

from conquiet.spark.worker import SparkWorker


def publish(client, *numbers: int) -> None:
    for number in numbers:
        fields = {"id": f"e-{number}", "type": "sell", "source": "/web", "specversion": "1.0"}
        client.xadd("orders", {**fields, "data": f'{{"id": {number}}}'})


def log(spark, url: str):
    options = {"url": url, "streams": "orders", "startingOffsets": "earliest"}
    return spark.readStream.format("conquiet").options(**options).load()


def test_a_message_that_fails_goes_to_the_dead_letters_while_the_query_lives(
    spark, database_url, redis_client, redis_url, tmp_path: Path
) -> None:
    engine = create_tables(database_url)
    registry = CollectorRegistry()
    worker = SparkWorker(
        shop(database_url, redis_url=redis_url),
        log(spark, redis_url),
        checkpoint=str(tmp_path / "checkpoint"),
        registry=registry,
    )
    publish(redis_client, 1, -2, 3)
    redis_client.xadd("orders", {"what": "no event"})
    query = worker.start()
    try:
        eventually(lambda: sales(engine) == [1, 3], timeout=60)
        publish(redis_client, 4)
        eventually(lambda: sales(engine) == [1, 3, 4], timeout=60)
        assert query.isActive
        # Counts come with the end of a batch, which is a moment later than its effects.
        eventually(lambda: _counted(worker).get(("sell", "handled")) == 3, timeout=60)
    finally:
        query.stop()
        worker.close()
    assert _counted(worker) == {
        ("sell", "handled"): 3,
        ("sell", "dead"): 1,
        ("sell", "failed"): 2,
        ("(none)", "dead"): 1,
    }
    for (handler, outcome), count in _counted(worker).items():
        labels = {"handler": handler, "outcome": outcome}
        assert registry.get_sample_value("conquiet_spark_messages_total", labels) == count
    reasons = [fields[b"deadreason"] for _, fields in redis_client.xrange("dead-letters")]
    assert sum(b"-2 is less than nothing" in reason for reason in reasons) == 1
    assert len(reasons) == 2


def _counted(worker: SparkWorker) -> dict[tuple[str, str], int]:
    rows = worker.counts().collect()
    return {(row["handler"], row["outcome"]): row["count"] for row in rows}


@pytest.mark.slow
def test_without_dead_letters_a_failure_ends_the_query_and_a_restart_goes_on(
    spark, database_url, redis_client, redis_url, tmp_path: Path
) -> None:
    engine = create_tables(database_url)
    publish(redis_client, 1, -2, 3)

    def run(make, max_attempts):
        place, trigger = str(tmp_path / "checkpoint"), {"availableNow": True}
        events = log(spark, redis_url)
        return SparkWorker(
            make, events, max_attempts=max_attempts, checkpoint=place, trigger=trigger
        ).run()

    with pytest.raises(Exception, match=r"sell id=e--2 source=/web failed 2 times"):
        run(shop(database_url), 2)
    counted = run(shop(database_url, redis_url=redis_url), 5).collect()
    assert sum(row["count"] for row in counted if row["outcome"] != "failed") == 3
    assert sales(engine) == [1, 3]
