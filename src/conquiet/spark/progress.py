"""Progress: how far behind the end of the log a streaming query is, and what it has missed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from conquiet.spark.log.offsets import NOTHING, Lost, Position, entries_between, read_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def lag(progress: Any) -> dict[str, int | None]:
    """How many entries of each stream wait behind a micro-batch, by its progress.

    None for a stream whose server does not count entries (Redis before 7).
    """
    waiting: dict[str, int | None] = {}
    for source in progress.sources:
        ends, newest = _offsets(source.endOffset), _offsets(source.latestOffset)
        for stream, last in newest.items():
            at = ends.get(stream)
            if at is not None:
                waiting[stream] = 0 if at.id == last.id else entries_between(at, last)
    return waiting


def lost(progress: Any) -> dict[str, Lost]:
    """What each stream has lost that the query was still to read, since its checkpoint began.

    Empty if nothing is missing, as it always is unless `failOnDataLoss=false`. The rows that an
    outbox has lost are under the name `outbox`.
    """
    return _lost(source.endOffset for source in progress.sources)


def lost_before(progress: Any) -> dict[str, Lost]:
    """The same, of what came before a micro-batch."""
    return _lost(source.startOffset for source in progress.sources)


def _lost(offsets: Iterable[str | None]) -> dict[str, Lost]:
    missed: dict[str, Lost] = {}
    for text in offsets:
        missed |= _lost_rows(text)
        missed |= {name: at.lost for name, at in _offsets(text).items() if at.lost != NOTHING}
    return missed


def _lost_rows(text: str | None) -> dict[str, Lost]:
    """What an offset of an outbox says."""
    try:
        return {"outbox": Lost(*json.loads(text or "{}")["lost"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _offsets(text: str | None) -> dict[str, Position]:
    """The offsets of a source of ours; those of others are none."""
    try:
        given = json.loads(text or "{}")
        return read_offsets(given)
    except (ValueError, AttributeError, TypeError):
        return {}


class LagListener(StreamingQueryListener):
    """Calls a function with the lag of each micro-batch: `spark.streams.addListener(…)`.

    The function gets the name or the id of the query, and what `lag` gives.
    """

    def __init__(self, tell: Callable[[str, dict[str, int | None]], None]) -> None:
        self._tell = tell

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - these names are Spark's
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        progress = event.progress
        self._tell(str(progress.name or progress.id), lag(progress))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass
