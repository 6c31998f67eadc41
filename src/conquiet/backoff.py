"""Backoff: how long to wait after the n-th failure in a row."""

from __future__ import annotations

import random


class Backoff:
    """Doubles from `first` to `cap` seconds, each wait shortened at random by up to half.

    The randomness keeps workers that failed together from coming back together.
    """

    def __init__(self, first: float, cap: float) -> None:
        self._first = first
        self._cap = cap
        self._failures = 0

    def next(self) -> float:
        """The seconds to wait now; one failure more than before."""
        wait = min(self._cap, self._first * float(2 ** min(self._failures, 60)))
        self._failures += 1
        return wait * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0
