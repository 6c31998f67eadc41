"""The tour that `make run` shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import found

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.py"


@pytest.fixture(autouse=True)
def servers_are_there() -> None:
    from conquiet import embedded

    found("PostgreSQL", lambda: embedded.postgres(private=True))
    found("Redis", lambda: embedded.redis(private=True))


def test_the_tour_ends_with_the_right_verdict_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOUR), "--orders", "600"],
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: every order took effect once" in done.stdout
    assert "killed" in done.stdout
    assert "WRONG" not in done.stdout
    assert list(tmp_path.iterdir()) == []
