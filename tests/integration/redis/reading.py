"""Reading a source until what a test expects is there."""

from __future__ import annotations

from tests.waiting import eventually

SHORT = 0.1  # a lease that a test can wait for


def read(source, count, limit=100):
    """Exactly `count` messages, in as many reads as that takes."""
    got = []
    eventually(
        lambda: got.extend(source.read(min(limit, count - len(got)), 0.05)) or got[count - 1 :]
    )
    return got
