"""How a SparkWorker's messages ended: totals on the driver, and the same for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

_METRIC = "conquiet_spark_messages"
_lock = threading.Lock()
_known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Counts:
    """Outcomes by handler; batches may end in other threads than the one that asks."""

    def __init__(self, registry: Any = None) -> None:
        self._totals: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._metric = _metric_of(registry)

    def add(self, rows: Iterable[tuple[str, str, int]]) -> None:
        with self._lock:
            for handler, outcome, count in rows:
                self._totals[handler, outcome] += count
                if self._metric is not None:
                    self._metric.labels(handler, outcome).inc(count)

    def rows(self) -> list[tuple[str, str, int]]:
        with self._lock:
            found = sorted(self._totals.items())
        return [(handler, outcome, count) for (handler, outcome), count in found]


def _metric_of(registry: Any) -> Any:
    """The counter of a registry; None without prometheus-client."""
    try:
        import prometheus_client
    except ImportError:
        return None
    registry = registry if registry is not None else prometheus_client.REGISTRY
    with _lock:
        if registry not in _known:
            _known[registry] = prometheus_client.Counter(
                _METRIC,
                "Messages that went through a router on Spark, by outcome.",
                ("handler", "outcome"),
                registry=registry,
            )
        return _known[registry]
