"""Section 7 of the seed: metrics never raise, whatever is wrong with them."""

from __future__ import annotations

import importlib.util
import sys

import prometheus_client
import pytest

from conquiet.queue import metrics

READ = "conquiet_queue_messages_read_total"
ACKED = "conquiet_queue_messages_ack_total"
CLAIMED = "conquiet_queue_messages_claimed_total"
LATENCY = "conquiet_queue_read_latency_seconds"


@pytest.fixture
def registry(monkeypatch):
    """A registry of its own in the place of prometheus-client's global one."""
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    for kind in ("Counter", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, _registering(kind, registry))
    return registry


def _registering(kind, registry):
    made = getattr(prometheus_client, kind)
    return lambda *args, **options: made(*args, registry=registry, **options)


def loaded_again():
    """The module once more, as by another import path or a reload."""
    spec = importlib.util.spec_from_file_location("metrics_again", metrics.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def emit_everything(stream_metrics):
    stream_metrics.count_read(2, 0.1)
    stream_metrics.count_acked(1)
    stream_metrics.count_claimed(1)


def test_7_names_and_labels_are_those_of_the_seed(registry):
    emit_everything(loaded_again().StreamMetrics("orders"))
    label = {"stream": "orders"}
    assert registry.get_sample_value(READ, label) == 2
    assert registry.get_sample_value(ACKED, label) == 1
    assert registry.get_sample_value(CLAIMED, label) == 1
    assert registry.get_sample_value(f"{LATENCY}_count", label) == 1
    names = {sample.name for metric in registry.collect() for sample in metric.samples}
    assert {name for name in names if not name.endswith("_created")} == {
        "conquiet_queue_messages_read_total",
        "conquiet_queue_messages_ack_total",
        "conquiet_queue_messages_claimed_total",
        "conquiet_queue_read_latency_seconds_bucket",
        "conquiet_queue_read_latency_seconds_count",
        "conquiet_queue_read_latency_seconds_sum",
    }


def test_7_a_second_copy_of_the_module_counts_into_the_same_metrics(registry):
    first, second = loaded_again(), loaded_again()
    emit_everything(first.StreamMetrics("orders"))
    emit_everything(second.StreamMetrics("orders"))
    expected = {READ: 4, ACKED: 2, CLAIMED: 2, f"{LATENCY}_count": 2}
    label = {"stream": "orders"}
    assert {name: registry.get_sample_value(name, label) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "labels"),
    [(prometheus_client.Gauge, ["stream"]), (prometheus_client.Counter, ["queue"])],
)
def test_7_a_name_that_somebody_else_took_is_left_alone(registry, kind, labels):
    kind(READ, "theirs", labels, registry=registry)
    emit_everything(loaded_again().StreamMetrics("orders"))
    assert registry.get_sample_value(READ, {"stream": "orders"}) is None
    assert registry.get_sample_value(ACKED, {"stream": "orders"}) == 1


def test_7_without_prometheus_client_nothing_is_counted(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    emit_everything(loaded_again().StreamMetrics("orders"))


def test_7_a_broken_prometheus_client_is_logged_and_nothing_is_counted(
    monkeypatch, tmp_path, caplog
):
    (tmp_path / "prometheus_client.py").write_text("raise OSError('disk full')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "prometheus_client")
    emit_everything(loaded_again().StreamMetrics("orders"))
    assert f"metric {READ} is not available: disk full" in caplog.text


def test_7_a_metric_that_breaks_costs_nothing(monkeypatch):
    class Broken:
        def __getattr__(self, name):
            raise OSError("disk full")

    monkeypatch.setattr(metrics, "_READ", Broken())
    emit_everything(metrics.StreamMetrics("orders"))
    stream_metrics = metrics.StreamMetrics("orders")
    for name in ("_acked", "_claimed", "_latency"):
        monkeypatch.setattr(stream_metrics, name, Broken())
    emit_everything(stream_metrics)
