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
from tests.spark.conftest import INSTALL_JAVA, java_version

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_sink_table_and_router_work_through_a_server(
    redis_client, redis_url, tmp_path: Path
) -> None:
    if java_version() < 17:
        needs.missing("Java 17 or newer for Spark", INSTALL_JAVA)
    if not all(find_spec(name) for name in ("grpc", "grpc_status", "zstandard")):
        needs.missing("the packages of Spark Connect", "pip install 'pyspark[connect]'")
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
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    carried, handled, refused = json.loads(done.stdout.splitlines()[-1])
    assert redis_client.xlen("orders") == 500
    assert carried == 500
    assert handled == [["see", "handled", 500]]
    assert "needs its driver on the cluster" in refused
