"""A pattern that names ten thousand streams."""

from __future__ import annotations

import pytest
from tests.spark.log.conftest import Query

STREAMS = 10_000


@pytest.fixture
def many(redis_client):
    pipeline = redis_client.pipeline(transaction=False)
    for number in range(STREAMS):
        pipeline.xadd(f"shop:{number}", {"specversion": "1.0", "id": str(number), "data": "{}"})
    pipeline.execute()


def test_ten_thousand_streams_are_packed_into_few_tasks(plain_log, many) -> None:
    query = Query(plain_log, streams="shop:*", readerName="spark", maxOffsetsPerTrigger=9000)
    end = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
    tasks = query.reader.partitions(query.offset, end)
    assert len(tasks) == 1
    batches = list(query.reader.read(tasks[0]))
    assert sum(batch.num_rows for batch in batches) == 9000
    assert len(batches) < 10
    query.offset = end
    assert len(query.batch()) == STREAMS - 9000
    plain_log.add("shop:77", 1)
    assert query.batch() == [1]


@pytest.mark.slow
def test_spark_reads_ten_thousand_streams(log, many) -> None:
    assert log.run(streams="shop:*") == [STREAMS]
    log.add("shop:77", STREAMS)
    log.add("shop:new", STREAMS + 1)
    assert log.run(streams="shop:*") == [2]
    assert log.written() == list(range(STREAMS + 2))
