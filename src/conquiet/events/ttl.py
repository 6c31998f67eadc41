"""Read how long consumers remember an event, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from conquiet.errors import ConfigError

TTL_VARIABLE = "CONQUIET_OUTBOX_IDEMPOTENCY_TTL_HOURS"
TTL_HOURS = 168
"""7 days: longer than any redelivery takes."""
MAX_TTL_HOURS = 8_760


def default_ttl(environ: Mapping[str, str] | None = None) -> float:
    """Return the TTL of the environment in seconds, or 7 days.

    >>> default_ttl({"CONQUIET_OUTBOX_IDEMPOTENCY_TTL_HOURS": "24"})
    86400.0
    """
    text = (os.environ if environ is None else environ).get(TTL_VARIABLE) or str(TTL_HOURS)
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MAX_TTL_HOURS:
        raise ConfigError(
            f"{TTL_VARIABLE}: {text!r:.100} is not a whole number from 1 to {MAX_TTL_HOURS}"
        )
    return int(text) * 3600.0


def as_seconds(name: str, given: float | timedelta) -> float:
    """Convert a positive duration to seconds."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigError(f"{name}={given!r:.60}: must be seconds, or a timedelta")
    if not 0.001 <= seconds < float("inf"):
        raise ConfigError(f"{name}={given!r}: must be more than 0 seconds")
    return float(seconds)
