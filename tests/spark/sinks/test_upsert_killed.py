"""kill −9 of the driver, in the middle of batches: a keyed table ends with each event once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from tests.spark.conftest import java_version
from tests.spark.outbox.rows import fill_at_once, numbered
from tests.waiting import eventually

from conquiet.sql import engine as make_engine
from conquiet.sql import schema

DRIVER = Path(__file__).with_name("killed_driver.py")
EVENTS = 2_000


def start(url: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(DRIVER), url, str(folder)],
        start_new_session=True,  # so that the JVM and its workers die with it
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def batches(folder: Path) -> int:
    """Count the batches that the checkpoint has as finished."""
    done = folder / "checkpoint" / "commits"
    return sum(one.name.isdecimal() for one in done.iterdir()) if done.is_dir() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_keyed_table_has_each_event_once_though_drivers_are_killed(database_url, tmp_path):
    if java_version() < 17:
        pytest.skip("needs Java 17 or newer for Spark")
    engine = make_engine(database_url)
    schema.init(engine)
    fill_at_once(engine, range(EVENTS))
    engine.dispose()
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE events (event_id text PRIMARY KEY, type text, data text)")
    for _ in range(3):
        before = batches(tmp_path)
        driver = start(database_url, tmp_path)
        eventually(lambda seen=before: batches(tmp_path) > seen + 1, timeout=200)
        time.sleep(random.random())  # anywhere in a batch
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
    last = start(database_url, tmp_path)
    _, told = last.communicate(timeout=400)
    assert last.returncode == 0, told.decode(errors="replace")[-3000:]

    expected = numbered(range(EVENTS))
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT event_id FROM events").fetchall()
        staged = connection.execute(
            "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'conquiet_stage%'"
        ).fetchone()
    assert sorted(id_ for (id_,) in rows) == expected
    assert staged == (0,)
