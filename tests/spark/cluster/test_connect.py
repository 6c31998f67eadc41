"""Spark Connect: what works through it, and what says that it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import needs
from tests.spark.cluster.standalone import JOB_SECONDS, ConnectServer
from tests.spark.conftest import INSTALL_JAVA, java_version
from tests.spark.lake.test_kills import publish
from tests.unit.lake.payments import entries, pipeline
from tests.unit.lake.test_engine import contents

from conquiet.lake.pipeline import as_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def requirements() -> None:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    if not all(find_spec(name) for name in ("grpc", "grpc_status", "zstandard")):
        needs.missing("the packages of Spark Connect", "pip install 'pyspark[connect]'")


def test_sink_table_and_router_work_through_a_server(
    redis_client, redis_url, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.spark.cluster.connect_job",
            redis_url,
            str(tmp_path / "lake"),
        ],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    carried, handled, refused = json.loads(done.stdout.splitlines()[-1])
    assert redis_client.xlen("orders") == 500
    assert carried == 500
    assert handled == [["see", "handled", 500]]
    assert "needs its driver on the cluster" in refused


def conquiet(*arguments: str) -> str:
    """Run the command, as a user of a server does; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "conquiet", "pipeline", *arguments],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_lake_is_made_and_shown_through_a_server(redis_client, redis_url, tmp_path: Path) -> None:
    """Each run reads the whole log, and takes in what the lake does not have."""
    log = entries()
    lake = str(tmp_path / "lake")
    server = ConnectServer(tmp_path / "server")
    try:
        for part in (log[:50], log[50:]):
            publish(redis_client, part)
            conquiet(
                "run", "tests.unit.lake.payments:pipeline", "--remote", server.url, "--once",
                "--broker", redis_url, "--streams", "payments:*", "--to", lake,
            )  # fmt: skip
    finally:
        server.stop()
    shown = conquiet("show", "tests.unit.lake.payments:pipeline", "shop_daily", "--to", lake)
    assert "shop-0" in shown
    pipeline.lake = lake
    found = contents(pipeline)
    pipeline.lake = str(tmp_path / "expected")
    pipeline.run(as_table(log))
    expected = contents(pipeline)
    assert {name: found[name] for name in ("payment", "shop_daily")} == {
        name: expected[name] for name in ("payment", "shop_daily")
    }
    assert found["payment"]
