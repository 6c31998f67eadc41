"""Python workers of a real Spark are killed at each slice that they send."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import needs
from tests.faults.crash.spark_job import ROWS, SLICE, TASKS

ROOT = Path(__file__).resolve().parents[3]
JOB = Path(__file__).with_name("spark_job.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_workers_of_spark_killed_at_each_slice_add_each_row_once(
    redis_url, redis_client, tmp_path
):
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        needs.missing("Java 17 or newer for Spark", "apt-get install openjdk-17-jre-headless")
    slices = ROWS // TASKS // SLICE
    sides = ("before", "half", "after")
    fates = [f"{number}/{side}" for number in range(1, slices + 1) for side in sides]
    command = [sys.executable, str(JOB), redis_url, str(tmp_path), *fates]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("killed-*"))) == len(fates)
    expected = sorted(f"e-{number}" for number in range(ROWS))
    for number in range(len(fates)):
        entries = redis_client.xrange(f"events-{number}")
        assert sorted(fields[b"id"].decode() for _, fields in entries) == expected
