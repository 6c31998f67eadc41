"""The workers of a test, gone when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conquiet import Worker


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Workers that a test started; they are stopped after it, whatever happens."""
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.stop(grace=0)
