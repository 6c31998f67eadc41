"""Export metrics of a relay to Prometheus. The documentation lists `METRICS`.

Without the extra `metrics` a relay runs as well, and counts nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from conquiet.middleware.metrics import Metric
from conquiet.relay.inspection import Figures

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ATTEMPT_BUCKETS = (1, 2, 3, 5, 10, 20, 50, 100)


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


class _Gauges:
    """Reads the table on a scrape, through a cache; exports no value if that fails."""

    def __init__(self, figures: Callable[[], Figures | None]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

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


class _Attempts:
    """Counts which attempt each publication was, a batch at a time.

    A histogram of prometheus-client takes a value at a time, for as long as an entry takes to be
    encoded.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        counts = dict(self.counts)
        bounds = (*ATTEMPT_BUCKETS, math.inf)
        buckets = [
            (
                "+Inf" if bound == math.inf else str(float(bound)),
                sum(count for at, count in counts.items() if at <= bound),
            )
            for bound in bounds
        ]
        name = "conquiet_relay_attempts"
        family = HistogramMetricFamily(name, _by_name[name].meaning)
        family.add_metric([], buckets, sum(at * count for at, count in counts.items()))
        yield family


class _Uncounted:
    """Stands in for a counter or a histogram where prometheus-client is not installed."""

    def labels(self, *_: str) -> Self:
        return self

    def inc(self, _: float = 1) -> None: ...

    def observe(self, _: float) -> None: ...


class RelayMetrics:
    """Holds the metrics of one relay, on a registry of its own."""

    def __init__(self, figures: Callable[[], Figures | None] | None = None) -> None:
        self.figures = figures
        """Counts the rows that wait; None if they are not counted."""
        try:
            import prometheus_client
        except ImportError:
            self._library: Any = None
            self.registry: Any = None
        else:
            self._library = prometheus_client
            self.registry = prometheus_client.CollectorRegistry()
        if self._library and figures is not None:
            self.registry.register(_Gauges(figures))
        self.published = self._counter("conquiet_relay_published_total")
        self.failed = self._counter("conquiet_relay_failed_total")
        self.outages = self._counter("conquiet_relay_outages_total")
        self.duplicates = self._counter("conquiet_relay_duplicates_total")
        self.publish_seconds = self._histogram("conquiet_relay_publish_seconds", SECONDS_BUCKETS)
        self._attempts = _Attempts()
        if self._library:
            self.registry.register(self._attempts)

    def count_published(self, attempts: Sequence[int]) -> None:
        """Count publications, each by which attempt it was."""
        self.published.inc(len(attempts))
        self._attempts.counts.update(attempts)

    def exposition(self) -> bytes:
        """Return the body of `/metrics`."""
        if self._library is None:
            return b"# for metrics: pip install 'conquiet[metrics]'\n"
        text: bytes = self._library.generate_latest(self.registry)
        return text

    def _counter(self, name: str) -> Any:
        return self._make("Counter", name)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Any:
        return self._make("Histogram", name, buckets=buckets)

    def _make(self, kind: str, name: str, **options: Any) -> Any:
        if self._library is None:
            return _Uncounted()
        metric = _by_name[name]
        make = getattr(self._library, kind)
        return make(name, metric.meaning, metric.labels, registry=self.registry, **options)
