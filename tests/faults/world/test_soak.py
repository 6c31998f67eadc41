"""The soak writes a report, and fails when something was lost."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "soak.py"


@pytest.fixture
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_a_report_says_what_was_violated(soak, tmp_path):
    found = soak.Soak(seed=7, minutes=1.0, messages=None, commands=10, seconds=5.0)
    found.memory = found.files = {role: [50.0] * 9 for role in soak.ROLES}
    found.recovery = {"worker-0": [0.5, 1.5]}
    found.faults = [soak.Injected(1.0, "a process is killed", "worker-0", 0.1)]
    sound = soak.write(found, tmp_path / "sound").read_text()
    assert "**no violation**" in sound
    assert "2 commands a second" in sound
    assert "| worker-0 | 2 | 1.00 s | 1.50 s |" in sound
    found.violations = ["effects_happen_once: command c-1 took effect 2 times"]
    broken = soak.write(found, tmp_path / "broken").read_text()
    assert "**1 violations**" in broken
    assert "- effects_happen_once: command c-1 took effect 2 times" in broken
    assert json.loads((tmp_path / "broken" / "soak.json").read_text())["seed"] == 7


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_half_a_minute_of_random_faults_violates_nothing(tmp_path, redis_server):
    command = [sys.executable, str(SCRIPT), "--minutes", "0.5", "--every", "1", "--seed", "11"]
    command += ["--folder", str(tmp_path / "report")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "no violation" in (tmp_path / "report" / "soak.md").read_text()
