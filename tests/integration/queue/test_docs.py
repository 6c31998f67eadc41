"""Every Python block of docs/queue.md runs, one after the other, as a reader would type it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "queue.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _sigterm_as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_code_of_the_page_runs(redis_url, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    page = PAGE.read_text()
    typed: dict[str, object] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) >= 5
    for block in blocks:
        line = page.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), typed)
    typed["client"].close()
    typed["db"].close()


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
