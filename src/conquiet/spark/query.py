"""A streaming query in the foreground: until it ends, or a signal asks it to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from conquiet.stopping import Signals

logger = logging.getLogger("conquiet.spark")

_LOOK_SECONDS = 0.25
"""How often a waiting driver looks for a signal and for the end of the query."""


def run_query(
    query: Any, *, grace: float = 60.0, on_look: Callable[[Any], object] = lambda query: None
) -> bool:
    """Wait for the query; True if a signal ended it. What it fails with is raised.

    SIGTERM and SIGINT let the batch under way finish, for `grace` seconds at most; a second one
    ends it at once. What was not finished is done again by the next start from the checkpoint.
    """
    with Signals() as signals:
        while not signals.count:
            if query.awaitTermination(_LOOK_SECONDS):
                on_look(query)
                return False
            on_look(query)
        _stop(query, grace, lambda: signals.count > 1)
        on_look(query)
    return True


def _stop(query: Any, grace: float, hurry: Callable[[], bool]) -> None:
    end = time.monotonic() + grace
    # Between two batches the query is not active; Spark itself has no softer stop than this.
    while query.isActive and query.status["isTriggerActive"]:
        if time.monotonic() > end or hurry():
            logger.warning("the batch under way is given up; the next start does it again")
            break
        time.sleep(0.01)
    query.stop()
