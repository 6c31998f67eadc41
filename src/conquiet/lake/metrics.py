"""Metrics: what the tables of a lake say about its events, for Prometheus.

A scrape reads the tables. So the values are those of the report, a restart loses none, and any
process that sees the lake can export them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from conquiet.errors import ConfigError
from conquiet.lake.definition import ROWS_QUARANTINE
from conquiet.lake.reconcile import DELIVERY

try:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "metrics of a lake need prometheus-client: pip install 'conquiet[metrics]'"
    ) from error

if TYPE_CHECKING:
    from conquiet.lake.pipeline import Pipeline

logger = logging.getLogger("conquiet.lake")


class Metric(NamedTuple):
    name: str
    label: str
    meaning: str
    table: str
    sql: str


METRICS = (
    Metric(
        "conquiet_lake_checked",
        "rule",
        "events or rows that a rule was checked on",
        "expectations",
        "SELECT rule, sum(checked) FROM expectations GROUP BY 1",
    ),
    Metric(
        "conquiet_lake_broken",
        "rule",
        "events or rows that break a rule",
        "expectations",
        "SELECT rule, sum(failed) FROM expectations GROUP BY 1",
    ),
    Metric(
        "conquiet_lake_quarantined_events",
        "reason",
        "events in quarantine",
        "events_quarantine",
        "SELECT reason, count(*) FROM events_quarantine GROUP BY 1",
    ),
    Metric(
        "conquiet_lake_quarantined_rows",
        "rule",
        "rows of facts in quarantine",
        ROWS_QUARANTINE,
        f"SELECT rule, count(*) FROM {ROWS_QUARANTINE} GROUP BY 1",
    ),
    Metric(
        "conquiet_lake_delivery_lag_seconds",
        "quantile",
        "from an event's row in the outbox to its first entry in the log, in the newest hour",
        DELIVERY,
        "SELECT unnest(['0.5', '0.95', '0.99']),"
        " unnest([lag_p50_ms, lag_p95_ms, lag_p99_ms]) / 1000"
        f" FROM (FROM {DELIVERY} ORDER BY hour DESC LIMIT 1)",
    ),
)


class LakeMetrics(Collector):
    """Reads gauges from the lake of a pipeline; exports no value if that fails."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Name the gauges when they are registered, without a look at the lake."""
        yield from self._families().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = self._families()
        try:
            with self._pipeline.database() as database:
                for one in METRICS:
                    if database.exists(one.table):
                        database.offer(one.sql)
                        for label, value in database.run(one.sql).fetchall():
                            labels = [self._pipeline.name, label]
                            families[one.name].add_metric(labels, float(value))
        except Exception as error:  # noqa: BLE001 - a scrape must not fail with the lake
            logger.warning("could not read the metrics of %s: %s", self._pipeline.lake, error)
            families = self._families()
        yield from families.values()

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {
            one.name: GaugeMetricFamily(one.name, one.meaning, labels=["pipeline", one.label])
            for one in METRICS
        }
