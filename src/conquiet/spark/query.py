"""A streaming query: alone at its checkpoint; and in the foreground, until a signal ends it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConquietError
from conquiet.shutdown import Signals
from conquiet.spark.checkpoint import lock_checkpoint

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

logger = logging.getLogger("conquiet.spark")

_LOOK_SECONDS = 0.25
"""How often a waiting driver looks for a signal and for the end of the query."""

_own = re.compile(r"^conquiet(?:\.\w+)+: (.+)$", re.MULTILINE)


class QueryFailed(ConquietError):
    """What an error of conquiet said that ended a query, without the pages that Spark adds."""


def start_query(writing: DataStreamWriter, checkpoint: str | os.PathLike[str]) -> StreamingQuery:
    """Start a query that holds the lock of its checkpoint until it ends.

        start_query(events.writeStream.format("parquet").option("path", "orders"), "checkpoint")

    `writing` is a `writeStream` with its options, not started. `checkpoint` is a directory of this
    query alone; a second query on it fails at once.

    Through Spark Connect there is no lock: the checkpoint is the server's.
    """
    from pyspark.sql.utils import is_remote

    place = os.fspath(checkpoint)
    writing = writing.option("checkpointLocation", place)
    if is_remote():
        return writing.start()
    with ExitStack() as lock:
        lock.enter_context(lock_checkpoint(place))
        query = writing.start()
        Thread(target=_let_go, args=(query, lock.pop_all()), daemon=True).start()
    return query


def _let_go(query: StreamingQuery, lock: ExitStack) -> None:
    with lock, suppress(Exception):  # the others that wait for it get its error
        query.awaitTermination()


def run_query(
    query: Any, *, grace: float = 60.0, on_look: Callable[[Any], object] = lambda query: None
) -> bool:
    """Wait for the query; True if a signal ended it. What it fails with is raised, and where
    that came from conquiet as a `QueryFailed`.

    SIGTERM and SIGINT let the batch under way finish, for `grace` seconds at most; a second one
    ends it at once. What was not finished is done again by the next start from the checkpoint.
    """
    with Signals() as signals:
        while not signals.count:
            if _has_ended(query):
                on_look(query)
                return False
            on_look(query)
        _stop(query, grace, lambda: signals.count > 1)
        on_look(query)
    return True


def _has_ended(query: Any) -> bool:
    try:
        return bool(query.awaitTermination(_LOOK_SECONDS))
    except Exception as error:
        found = own_words(error)
        if found is None:
            raise
        raise QueryFailed(found) from error


def own_words(error: Exception) -> str | None:
    """Return the text of an error of conquiet that Spark has wrapped; None for another error."""
    found = _own.findall(str(error))
    return found[-1] if found else None


def _stop(query: Any, grace: float, hurry: Callable[[], bool]) -> None:
    end = time.monotonic() + grace
    done = _batches(query)
    # Spark has no gentler stop. Under a backlog the next batch begins without a pause, so the end
    # of this one is found by its number.
    while query.isActive and query.status["isTriggerActive"] and _batches(query) == done:
        if time.monotonic() > end or hurry():
            logger.warning("the current batch was stopped; the next start repeats it")
            break
        time.sleep(0.01)
    query.stop()


def _batches(query: Any) -> int:
    """Return the number of the last batch that is done."""
    last = query.lastProgress
    return -1 if last is None else int(last.batchId)
