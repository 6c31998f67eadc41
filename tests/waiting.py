"""Wait for what a test is about: the same function that users' tests have."""

from __future__ import annotations

from conquiet.testing import eventually

__all__ = ["eventually"]
