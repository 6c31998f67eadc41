"""The tables of options in the documentation are made of the code."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "spark_options.py"


def test_the_page_has_the_options_of_the_code() -> None:
    made = runpy.run_path(str(SCRIPT))
    page = made["PAGE"].read_text()
    assert made["written"](page) == page, f"run python {SCRIPT.relative_to(SCRIPT.parents[1])}"
    assert made["written"](page.replace("| `urlEnv` |", "| `urlVar` |")) == page
