"""Export metrics of a relay to Prometheus. The documentation lists `METRICS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from conquiet.relay.inspection import Figures

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ATTEMPT_BUCKETS = (1, 2, 3, 5, 10, 20, 50, 100)


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("conquiet_relay_pending", "gauge", (), "rows that wait to be published"),
    Metric("conquiet_relay_oldest_unpublished_seconds", "gauge", (), "age of the oldest of them"),
    Metric("conquiet_relay_parked", "gauge", (), "rows whose attempts are used up"),
    Metric(
        "conquiet_relay_slot_lag_bytes",
        "gauge",
        (),
        "log that the slot has still to confirm, where rows are published from the write-ahead log",
    ),
    Metric("conquiet_relay_published_total", "counter", (), "events that the sink confirmed"),
    Metric(
        "conquiet_relay_failed_total",
        "counter",
        ("reason",),
        "events that failed by themselves, each at the cost of an attempt, by kind of error",
    ),
    Metric(
        "conquiet_relay_outages_total",
        "counter",
        (),
        "batches given back whole, since database or sink was away; they cost no attempt",
    ),
    Metric(
        "conquiet_relay_duplicates_total",
        "counter",
        (),
        "events that this process published once more, since they could not be marked before",
    ),
    Metric(
        "conquiet_relay_publish_seconds",
        "histogram",
        (),
        "how long the sink took to answer a batch",
    ),
    Metric(
        "conquiet_relay_attempts",
        "histogram",
        (),
        "which attempt it was that the sink confirmed",
    ),
)
_by_name = {metric.name: metric for metric in METRICS}


class _Gauges(Collector):
    """Reads the table on a scrape, through a cache; exports no value if that fails."""

    def __init__(self, figures: Callable[[], Figures | None]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        found = self._figures()
        for name, attribute in (
            ("conquiet_relay_pending", "pending"),
            ("conquiet_relay_oldest_unpublished_seconds", "oldest_seconds"),
            ("conquiet_relay_parked", "parked"),
            ("conquiet_relay_slot_lag_bytes", "slot_lag_bytes"),
        ):
            value = None if found is None else getattr(found, attribute)
            family = GaugeMetricFamily(name, _by_name[name].meaning)
            if value is not None:
                family.add_metric([], float(value))
            yield family


class RelayMetrics:
    """Holds the metrics of one relay, on a registry of its own."""

    def __init__(self, figures: Callable[[], Figures | None] | None = None) -> None:
        self.registry = CollectorRegistry()
        if figures is not None:
            self.registry.register(_Gauges(figures))
        self.published = self._counter("conquiet_relay_published_total")
        self.failed = self._counter("conquiet_relay_failed_total")
        self.outages = self._counter("conquiet_relay_outages_total")
        self.duplicates = self._counter("conquiet_relay_duplicates_total")
        self.publish_seconds = self._histogram("conquiet_relay_publish_seconds", SECONDS_BUCKETS)
        self.attempts = self._histogram("conquiet_relay_attempts", ATTEMPT_BUCKETS)

    def exposition(self) -> bytes:
        """Return the body of `/metrics`."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        metric = _by_name[name]
        return Counter(name, metric.meaning, metric.labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        meaning = _by_name[name].meaning
        return Histogram(name, meaning, buckets=buckets, registry=self.registry)
