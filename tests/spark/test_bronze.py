"""The table raw_events: the log as it is, once, and how the command tells of it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from tests.waiting import eventually

from conquiet.cli.pipeline_run import Progress
from conquiet.errors import ConfigError
from conquiet.spark.bronze import Bronze, read_events, start_bronze
from conquiet.spark.query import QueryFailed, run_query


def publish(client, first: int, last: int) -> None:
    for number in range(first, last):
        fields = {"id": f"e-{number}", "type": "sold", "source": "/shop", "specversion": "1.0"}
        client.xadd("orders", {**fields, "data": "{}"})


def ids_in(lake: Path) -> list[str | None]:
    import duckdb

    rows = duckdb.sql(f"SELECT event_id FROM '{lake}/raw_events/*/*.parquet'").fetchall()
    return [row[0] for row in rows]


def test_runs_one_after_another_carry_each_event_once(
    spark, redis_client, redis_url, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"url": redis_url, "streams": "orders", "startingOffsets": "earliest"}
    redis_client.xadd("orders", {"what": "no event"})
    for last in (50, 80):
        publish(redis_client, 0 if last == 50 else 50, last)
        progress = Progress(as_json=True)
        events = read_events(spark, "log", source | {"maxOffsetsPerTrigger": "40"})
        query = start_bronze(events, Bronze(str(tmp_path), once=True))
        assert not run_query(query, on_look=progress.look)
        assert progress.events == (51 if last == 50 else 30)
        assert progress.lag == 0
    ids = ids_in(tmp_path)
    assert sorted(filter(None, ids)) == sorted(f"e-{number}" for number in range(80))
    assert ids.count(None) == 1  # what is no event is kept too
    assert '{"batch": 0, "events": 40, ' in capsys.readouterr().out


def test_a_signal_lets_the_batch_finish_and_stops_the_query(
    spark, redis_client, redis_url, tmp_path: Path
) -> None:
    """Although the next batch always waits: there is no pause between them."""
    publish(redis_client, 0, 200)
    source = {"url": redis_url, "streams": "orders", "startingOffsets": "earliest"}
    events = read_events(spark, "log", source | {"maxOffsetsPerTrigger": "2"})
    query = start_bronze(events, Bronze(str(tmp_path)))
    done: list[int] = []

    def ask() -> None:
        try:
            eventually(lambda: query.lastProgress is not None)
            done.append(query.lastProgress.batchId)
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert run_query(query)
    asking.join()
    assert not query.isActive
    assert query.exception() is None
    assert query.lastProgress.batchId - done[0] <= 3
    assert len(ids_in(tmp_path)) == 2 * (query.lastProgress.batchId + 1)


def test_what_ended_a_query_is_told_without_the_pages_of_spark(
    spark, redis_client, redis_url, tmp_path: Path
) -> None:
    redis_client.set("orders", "no stream")
    source = {"url": redis_url, "streams": "orders", "startingOffsets": "earliest"}
    query = start_bronze(read_events(spark, "log", source), Bronze(str(tmp_path), once=True))
    with pytest.raises(QueryFailed, match=r"^stream 'orders' cannot be read: WRONGTYPE"):
        run_query(query)


@pytest.mark.slow
def test_what_a_run_has_missed_is_told_and_not_what_was_missed_before(
    spark, redis_client, redis_url, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"url": redis_url, "streams": "orders", "startingOffsets": "earliest"}

    def run() -> tuple[Progress, str]:
        progress = Progress(as_json=False)
        events = read_events(spark, "log", source | {"failOnDataLoss": "false"})
        run_query(start_bronze(events, Bronze(str(tmp_path), once=True)), on_look=progress.look)
        progress.end("lake", stopped=False)
        return progress, capsys.readouterr().err

    publish(redis_client, 0, 10)
    assert "lost" not in run()[1]
    publish(redis_client, 10, 20)
    redis_client.xtrim("orders", maxlen=4, approximate=False)
    progress, said = run()
    assert progress.lost == (1, 6)
    assert "6 or more events lost" in said
    publish(redis_client, 20, 22)
    progress, said = run()
    assert progress.lost == (0, 0)
    assert "lost" not in said
    redis_client.delete("orders")  # nobody knows how many went
    progress, said = run()
    assert progress.lost == (1, 0)
    assert "0 or more events lost" in said
    assert "lost" not in run()[1]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        Bronze("lake", once=True, trigger_seconds=1)
    with pytest.raises(ConfigError, match="choose parquet or delta"):
        Bronze("lake", "csv")  # type: ignore[arg-type]
