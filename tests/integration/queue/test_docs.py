"""docs/queue.md says what the seed says; its code is run by tests/unit/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "queue.md"


def test_9_the_page_has_the_guarantees_of_the_seed():
    rows = re.findall(r"^\| (\w+) \| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE)
    assert {
        "Delivery": "At-least-once",
        "Ordering": "Not guaranteed",
        "Ack": "Explicit",
        "Retry": "Via staleness",
        "Shutdown": "Best-effort",
        "Fairness": "Not guaranteed",
    }.items() <= dict(rows).items()
