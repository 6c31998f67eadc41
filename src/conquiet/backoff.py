"""Compute how long to wait after repeated failures."""

from __future__ import annotations

import random


class Backoff:
    """Doubles the wait from `first` to `cap` seconds, shortened at random by up to half.

    The randomness keeps workers that failed together from retrying together.
    """

    def __init__(self, first: float, cap: float) -> None:
        self._first = first
        self._cap = cap
        self._failures = 0

    def next(self) -> float:
        """Count a failure and return the seconds to wait."""
        wait = min(self._cap, self._first * float(2 ** min(self._failures, 60)))
        self._failures += 1
        return wait * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0
