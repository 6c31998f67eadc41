"""The options in the documentation are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet.spark.outbox.options import OPTIONS as OUTBOX
from conquiet.spark.upsert.options import OPTIONS as UPSERT

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "spark.md"


@pytest.mark.parametrize("options", [OUTBOX, UPSERT], ids=["outbox", "upsert"])
def test_every_option_is_documented_in_its_words(options):
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in options.items())
    assert f"| option | meaning |\n|---|---|\n{rows}\n" in DOCUMENT.read_text()
