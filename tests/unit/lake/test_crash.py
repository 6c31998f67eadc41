"""A kill after any step of the protocol: the next run makes every table as if nothing had been."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from tests import zygote
from tests.unit.lake.crash_child import run
from tests.unit.lake.payments import pipeline
from tests.unit.lake.test_engine import contents

ROOT = Path(__file__).resolve().parents[3]
STEPS = (
    # batch 1: silver, then facts and SQL tables
    *("taken", "judged files written", "judged"),
    *(f"{name} committed" for name in ("events", "events_quarantine", "expectations")),
    *(f"{name} committed" for name in ("payment_authorized", "payment_captured", "raw_events")),
    *("states and changes written", "folded", "expectations of rows committed"),
    *(f"{name} committed" for name in ("payment", "shop_daily")),
    *(f"{name} committed" for name in ("recon_completeness", "outbox_delivery")),
    "applied",
    # batch 2: silver alone
    *("taken", "judged files written", "judged"),
    *(f"{name} committed" for name in ("events", "events_quarantine", "expectations")),
    *(f"{name} committed" for name in ("payment_authorized", "payment_captured", "raw_events")),
    # batch 3: redeliveries and corrections; the refresh applies two batches
    *("taken", "judged files written", "judged"),
    *(f"{name} committed" for name in ("events", "payment_corrected", "raw_events")),
    "redeliveries committed",
    *("states and changes written", "folded", "expectations of rows committed"),
    *(f"{name} committed" for name in ("payment", "shop_daily")),
    *(f"{name} committed" for name in ("recon_completeness", "outbox_delivery")),
    "applied",
)
"""The crash points: after each of these a process dies."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    lake = str(tmp_path_factory.mktemp("undisturbed") / "lake")
    assert tuple(run(lake)) == STEPS
    return contents(pipeline)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step % 6 == 0 else pytest.mark.slow)  # a few seconds each
        for step in range(len(STEPS))
    ],
)
def test_a_kill_after_a_step_changes_no_table(undisturbed, tmp_path, step):
    lake = str(tmp_path / "lake")
    child = zygote.run(
        [sys.executable, "-m", "tests.unit.lake.crash_child", lake, str(step)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    run(lake)
    assert contents(pipeline) == undisturbed


def test_two_kills_in_a_row(undisturbed, tmp_path):
    lake = str(tmp_path / "lake")
    for step in (16, 3, 5, 9, 12):
        zygote.run(
            [sys.executable, "-m", "tests.unit.lake.crash_child", lake, str(step)],
            cwd=ROOT,
            check=False,
            capture_output=True,
        )
    run(lake)
    assert contents(pipeline) == undisturbed
