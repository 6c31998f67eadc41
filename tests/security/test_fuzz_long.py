"""The fuzz tests once more, with many examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = sorted({path.name for path in HERE.glob("test_fuzz_*.py")} - {Path(__file__).name})
EXAMPLES = os.environ.get("CONQUIET_FUZZ_EXAMPLES") or "1000"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_many_examples(name) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "not hostile and not hurts"]
    environment = {**os.environ, "CONQUIET_FUZZ_EXAMPLES": EXAMPLES}
    done = subprocess.run(
        [*command, str(HERE / name)],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
