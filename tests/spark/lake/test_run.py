"""A pipeline on Spark makes the tables that it makes in one process."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.unit.lake.payments import CATALOG, Captured, entries, pipeline
from tests.unit.lake.test_engine import contents

from conquiet.lake import Pipeline
from conquiet.lake import pipeline as engine
from conquiet.lake.pipeline import as_table
from conquiet.lake.source import plan_splits, read_files
from conquiet.spark.query import QueryFailed


@pytest.fixture
def lake(tmp_path):
    pipeline.lake = str(tmp_path / "lake")
    return pipeline


@pytest.fixture(autouse=True)
def by_executors(monkeypatch):
    """Judge and fold on executors, however few the rows are."""
    monkeypatch.setattr(engine, "_FEW_ROWS", 0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    pipeline.lake = str(tmp_path_factory.mktemp("expected") / "lake")
    pipeline.run(as_table(entries()))
    return contents(pipeline)


def write(folder: Path, log: list, parts: int) -> None:
    folder.mkdir(exist_ok=True)
    size = -(-len(log) // parts)
    for number, start in enumerate(range(0, len(log), size)):
        pq.write_table(as_table(log[start : start + size]), folder / f"part-{number}.parquet")


def test_a_batch_frame(spark, lake, tmp_path, expected):
    write(tmp_path / "log", entries(), 3)
    lake.run(spark.read.parquet(str(tmp_path / "log")))
    assert contents(lake) == expected


@pytest.mark.parametrize("per_batch", ["1", "2", "10"])
def test_a_stream_of_files_in_micro_batches(
    spark, lake, tmp_path, expected, per_batch, monkeypatch
):
    """Tasks read the files themselves: no row passes through the JVM."""
    write(tmp_path / "log", entries(), 5)
    steps = []
    monkeypatch.delattr(engine.Executors, "take")
    for _ in range(2):  # the second run finds nothing new
        lake.run(
            read_files(spark, str(tmp_path / "log"), maxFilesPerTrigger=per_batch),
            once=True,
            on_progress=lambda progress: steps.append(progress.step),
        )
    assert contents(lake) == expected
    assert steps.count("taken") == -(-5 // int(per_batch))
    assert steps.count("applied") == 1


def test_a_large_file_is_read_by_several_tasks(spark, lake, tmp_path, expected, monkeypatch):
    (tmp_path / "log").mkdir()
    file = tmp_path / "log" / "part é.parquet"
    pq.write_table(as_table(entries()), file, row_group_size=10)
    plans = []

    def plan(frame):
        plans.append(plan_splits(frame))
        return plans[-1]

    monkeypatch.setattr(engine, "plan_splits", plan)
    spark.conf.set("spark.sql.files.maxPartitionBytes", file.stat().st_size // 3)
    try:
        lake.run(read_files(spark, str(tmp_path / "log")), once=True)
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert contents(lake) == expected
    [splits] = plans
    assert len(splits) > 2
    assert {one.path for one in splits} == {str(file)}


def test_a_stream_that_passes_through_spark(spark, lake, tmp_path, expected):
    write(tmp_path / "log", entries(), 2)
    frame = read_files(spark, str(tmp_path / "log")).where("stream IS NOT NULL")
    lake.run(frame, once=True, refresh_seconds=0)
    assert contents(lake) == expected


def test_the_log_in_redis(spark, lake, redis_client, redis_url, expected):
    def publish(log: list) -> None:
        for one in log:
            attributes = {
                "id": one["event_id"],
                "type": one["type"],
                "source": one["source"],
                "subject": one["subject"],
                "time": one["time"].isoformat(),
                "datacontenttype": one["content_type"],
                "specversion": "1.0",
                "aggregatetype": "payment",
                "data": one["data"],
            }
            redis_client.xadd("payments", attributes)

    log = entries()
    options = {"url": redis_url, "streams": "payments", "startingOffsets": "earliest"}
    for part in (log[:50], log[50:]):
        publish(part)
        events = spark.readStream.format("conquiet").options(**options).load()
        lake.run(events, once=True)
    for name in ("payment", "shop_daily"):
        assert contents(lake)[name] == expected[name]
    assert len(lake.read("raw_events")) == len(log)


def test_an_error_of_a_fact_ends_the_run_in_its_own_words(spark, tmp_path, monkeypatch):
    from tests.unit.lake import payments

    write(tmp_path / "log", entries(2), 1)
    payments.pipeline.lake = str(tmp_path / "lake")

    def refuse(self, event):
        raise KeyError("oops")

    monkeypatch.setattr(payments.PaymentState, "apply", refuse)
    monkeypatch.setattr(engine, "_FEW_ROWS", 1000)  # in the driver, where it is patched
    events = read_files(spark, str(tmp_path / "log"))
    with pytest.raises(QueryFailed, match="fact payment_state"):
        payments.pipeline.run(events, once=True, refresh_seconds=0)


def test_an_error_of_a_task_ends_the_run_in_its_own_words(spark, tmp_path):
    write(tmp_path / "log", entries(5), 1)
    strict = Pipeline(CATALOG, lake=tmp_path / "lake", name="payments")

    @strict.expect("rich", on_fail="stop")
    def rich(data: Captured) -> bool:
        return data.cents > 10**9

    with pytest.raises(QueryFailed, match=r"^event \S+ breaks the rule rich, which stops"):
        strict.run(read_files(spark, str(tmp_path / "log")), once=True)


@pytest.mark.slow
def test_definitions_of_main_reach_executors(tmp_path, spark):
    """A script run as a program: its structs have no module that executors could import."""
    import subprocess
    import sys

    text = Path("tests/unit/lake/payments.py").read_text()
    write(tmp_path / "log", entries(5), 1)
    script = tmp_path / "app.py"
    script.write_text(
        text
        + textwrap.dedent(
            f"""
            if __name__ == "__main__":
                from conquiet.lake import pipeline as engine
                from conquiet.spark import session
                engine._FEW_ROWS = 0
                spark = session("main", master="local[1]", config={{"spark.ui.enabled": False}})
                pipeline.lake = {str(tmp_path / "lake")!r}
                pipeline.run(spark.read.parquet({str(tmp_path / "log")!r}))
                print(json.dumps(sorted(pipeline.read("payment")["payment_id"].to_pylist())))
                spark.stop()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["p0", "p1", "p2", "p3", "p4"]
