"""Asking: questions to Redis that change nothing, or change it to the same, so asked again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from conquiet.errors import StoreError
from conquiet.redis.wire import TROUBLE, Command, Wire

logger = logging.getLogger("conquiet.spark")

PAUSES_SECONDS = (0.1, 0.5, 2.0)
"""Between attempts, while a server restarts or another takes its place."""


def ask(wire: Wire, commands: Sequence[tuple[bytes, Command]]) -> list[Any]:
    """A reply for each command; those that Redis refused are errors. Outlasts a short outage."""
    trouble: Any = None
    for pause in (*PAUSES_SECONDS, None):
        try:
            replies = wire.send(commands)
        except TROUBLE as error:
            trouble = error
        else:
            trouble = next((reply for reply in replies if isinstance(reply, TROUBLE)), None)
            if trouble is None:
                return replies
        if pause is not None:
            logger.warning("Redis is asked again in %g s: %s", pause, trouble)
            time.sleep(pause)
    raise StoreError(f"Redis cannot be reached: {trouble}") from trouble
