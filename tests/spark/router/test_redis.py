"""A router whose effects, inbox and outbox are in Redis, on Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.router.redis_shop import OUTBOX, SALES, redis_shop
from tests.spark.router.shop import orders

from conquiet.spark import SparkWorker

ROWS = 100


@pytest.mark.slow
def test_effects_in_redis_happen_once_though_a_task_dies_after_the_commit(
    spark, redis_client, redis_url, tmp_path: Path
) -> None:
    # Messages that the dying task had in its hands are leased for as long as this.
    make = redis_shop(redis_url, notes=tmp_path, dies_at=30, lease=1.0)

    def run() -> dict[str, int]:
        counted = SparkWorker(make, orders(spark, 0, ROWS), batch_size=10).run().collect()
        return {row["outcome"]: row["count"] for row in counted}

    with pytest.raises(Exception, match="Python worker exited unexpectedly"):
        run()
    assert redis_client.llen(SALES) >= 10
    ended = run()
    assert ended["skipped"] >= 10
    assert ended["handled"] + ended["skipped"] == ROWS
    assert run() == {"skipped": ROWS}
    assert sorted(map(int, redis_client.lrange(SALES, 0, -1))) == list(range(ROWS))
    assert redis_client.xlen(OUTBOX) == ROWS
