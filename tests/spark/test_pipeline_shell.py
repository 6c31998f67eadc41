"""`conquiet pipeline run` as its user runs it: a process, and the table read back by others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from tests.integration.events.samples import one_of_each
from tests.spark.outbox.rows import fill, numbered
from tests.unit.lake.payments import entries
from tests.waiting import eventually

from conquiet.events import emit
from conquiet.events import schema as events_schema
from conquiet.lake.pipeline import as_table
from conquiet.sql import engine as make_engine
from conquiet.sql import schema
from marketplace.catalog import CATALOG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "conquiet", "pipeline", "run", "--json", "--master", "local[2]"]


class Run:
    """The command in a process of its own, in an environment that names no servers."""

    def __init__(self, lake: Path, *arguments: object) -> None:
        self._out, self._err = lake.with_suffix(".out"), lake.with_suffix(".err")
        kept = {key: one for key, one in os.environ.items() if not key.startswith("CONQUIET")}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*COMMAND, "--to", str(lake), *map(str, arguments)],
                env=kept | {"PYSPARK_PYTHON": sys.executable},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def told(self) -> list[dict[str, Any]]:
        """A line per batch."""
        assert self.process.poll() in (None, 0), self.said()
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    def said(self) -> str:
        return self._err.read_text()[-4000:]

    def end(self, code: int = 0) -> int:
        """Wait for its end; how many events it has told of."""
        try:
            assert self.process.wait(180) == code, self.said()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        return 0 if code else sum(line["events"] for line in self.told())


def publish(client: Any, first: int, last: int) -> None:
    for number in range(first, last):
        fields = {"id": f"e-{number}", "type": "sold", "source": "/shop", "specversion": "1.0"}
        client.xadd("orders", {**fields, "data": '{"n": 1}'})


def ids_in(rows: list[tuple[str]]) -> list[str]:
    return sorted(row[0] for row in rows)


def read_everywhere(spark: Any, table: Path) -> list[str]:
    """The ids of a Delta table, on which three programs must agree."""
    found = DeltaTable(table)
    by_deltalake = found.to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist()
    files = found.file_uris()
    by_duckdb = ids_in(duckdb.read_parquet(files).project("event_id").fetchall())
    by_spark = ids_in(spark.read.parquet(*files).select("event_id").collect())
    assert sorted(by_deltalake) == by_duckdb == by_spark
    return by_duckdb


def test_the_log_in_a_delta_table_is_read_by_three_programs(
    spark, redis_client, redis_url, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    arguments = ("--broker", redis_url, "--streams", "orders", "--once")
    publish(redis_client, 0, 50)
    assert Run(lake, *arguments, "--max-events", 20).end() == 50
    publish(redis_client, 50, 60)
    second = Run(lake, *arguments)
    assert second.end() == 10
    [line] = second.said().splitlines()  # no warning of Java, no traceback of Spark's Python
    assert line.startswith("done: 10 events")
    assert read_everywhere(spark, lake / "raw_events") == numbered(range(60))


def test_files_that_spark_does_not_read_itself_are_counted(tmp_path: Path) -> None:
    log = entries(5)
    (tmp_path / "log").mkdir()
    pq.write_table(as_table(log), tmp_path / "log" / "part.parquet")
    running = Run(tmp_path / "lake", "--from", "files", "--path", tmp_path / "log", "--once")
    assert running.end() == len(log)
    [line] = running.said().splitlines()
    assert line.startswith(f"done: {len(log)} events in 1 batches")


def test_an_outbox_is_carried_while_it_grows_until_a_signal_comes(
    spark, database_url, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    engine = make_engine(database_url)
    schema.init(engine)
    fill(engine, range(30))
    arguments = ("--from", "outbox", "--database", database_url)
    running = Run(lake, *arguments)
    try:
        eventually(lambda: sum(line["events"] for line in running.told()) == 30, timeout=120)
        fill(engine, range(30, 40))
        eventually(lambda: sum(line["events"] for line in running.told()) == 40, timeout=60)
    finally:
        running.process.send_signal(signal.SIGTERM)
    assert running.end() == 40
    assert "stopped: 40 events" in running.said()
    assert read_everywhere(spark, lake / "raw_events") == numbered(range(40))
    engine.dispose()


def test_outbox_events_are_taken_as_a_whole_and_each_row_once(
    spark, sqlite_url, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    engine = make_engine(sqlite_url)
    events_schema.init(engine, CATALOG)
    samples = one_of_each()
    arguments = ("--from", "outbox", "--database", sqlite_url, "--table", "outbox_events", "--once")
    for part in (samples[:3], samples[3:]):
        with engine.begin() as connection:
            emit(connection, *part)
        assert Run(lake, *arguments).end() == len(part)
    rows = read_everywhere(spark, lake / "raw_events")
    assert len(set(rows)) == len(rows) == len(samples)
    engine.dispose()


def test_what_ends_a_run_is_told_in_a_line(redis_client, redis_url, tmp_path: Path) -> None:
    redis_client.set("orders", "no stream")
    running = Run(tmp_path / "lake", "--broker", redis_url, "--streams", "orders", "--once")
    running.end(code=1)
    [line] = [line for line in running.said().splitlines() if "conquiet: error:" in line]
    assert "the run failed: stream 'orders' cannot be read: WRONGTYPE" in line
    assert running.said() == f"{line}\n"  # pages of Java are in the log
    log = Path(line.partition("(Spark's log: ")[2].removesuffix(")"))
    assert "\tat org.apache.spark" in log.read_text()
    log.unlink()
