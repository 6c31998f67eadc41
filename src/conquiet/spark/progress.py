"""Progress of a streaming query: its lag behind the end of the log, and the entries it lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from conquiet.errors import ConquietError
from conquiet.spark.log.offsets import NOTHING, Lost, Position, entries_between, read_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class DataLoss(ConquietError):
    """Entries or rows that a query was still to read are gone from their stream or table."""


def lag(progress: Any) -> dict[str, int | None]:
    """Return the backlog of each stream after a micro-batch, in entries.

    `progress` is Spark's, as `query.lastProgress`. It is None for a stream whose server does not
    count entries (Redis before 7).
    """
    backlog: dict[str, int | None] = {}
    for source in progress.sources:
        ends, newest = _offsets(source.endOffset), _offsets(source.latestOffset)
        for stream, last in newest.items():
            at = ends.get(stream)
            if at is not None:
                backlog[stream] = 0 if at.id == last.id else entries_between(at, last)
    return backlog


def losses(progress: Any) -> dict[str, Lost]:
    """Return the losses of each stream since the checkpoint began, from a `progress` of Spark.

    There are none unless `failOnDataLoss=false`. Rows lost by an outbox are under `outbox`.
    """
    return _losses(source.endOffset for source in progress.sources)


def losses_before(progress: Any) -> dict[str, Lost]:
    """Return the losses up to the start of a micro-batch."""
    return _losses(source.startOffset for source in progress.sources)


def _losses(offsets: Iterable[str | None]) -> dict[str, Lost]:
    found: dict[str, Lost] = {}
    for text in offsets:
        found |= _read_lost_rows(text)
        found |= {name: at.lost for name, at in _offsets(text).items() if at.lost != NOTHING}
    return found


def _read_lost_rows(text: str | None) -> dict[str, Lost]:
    """Read the losses in an offset of an outbox."""
    try:
        return {"outbox": Lost(*json.loads(text or "{}")["lost"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _offsets(text: str | None) -> dict[str, Position]:
    """Read the offsets of a source of conquiet; those of other sources count as none."""
    try:
        given = json.loads(text or "{}")
        return read_offsets(given)
    except (ValueError, AttributeError, TypeError):
        return {}


class LagListener(StreamingQueryListener):
    """Calls a function with the lag of each micro-batch: `spark.streams.addListener(…)`.

    `report` gets the name or the id of the query, and the result of `lag`.
    """

    def __init__(self, report: Callable[[str, dict[str, int | None]], None]) -> None:
        self._report = report

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - these names are Spark's
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        progress = event.progress
        self._report(str(progress.name or progress.id), lag(progress))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass
