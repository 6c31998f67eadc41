"""A watched relay: what its metrics and logs tell about each event."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading

import pytest

from conquiet.acking import Acking
from conquiet.cli.logs import ConsoleFormatter, JsonFormatter
from conquiet.errors import SinkUnavailable, StoreError
from conquiet.message import Message
from conquiet.relay.inspection import Figures
from conquiet.relay.metrics import METRICS, RelayMetrics
from conquiet.relay.process import WatchedRelay
from conquiet.relay.relay import log_fields


class Rows:
    """A source of three rows, which may fail to mark them."""

    def __init__(self) -> None:
        self.waiting = ["1", "2", "3"]
        self.settled: list = []
        self.away = False

    def read(self, limit, timeout):
        found = [
            Message(
                b"{}",
                {"id": id_, "type": "sold", "aggregatetype": "order", "aggregateid": f"o-{id_}"},
                acking=Acking(self, id_),
                deliveries=2,
            )
            for id_ in self.waiting
        ]
        return found[:limit]

    def settle(self, acked, nacked):
        if self.away:
            raise StoreError("the database is away")
        self.waiting = [id_ for id_ in self.waiting if id_ not in acked]
        self.settled.append((list(acked), [error for _, error in nacked]))

    def close(self): ...


class Answers:
    def __init__(self, answers=None) -> None:
        self.answers = answers

    def publish_each(self, messages):
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers or [None] * len(messages)

    def close(self): ...


def value(metrics: RelayMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def metrics() -> RelayMetrics:
    return RelayMetrics(lambda: Figures(7, 2, 1.5))


def test_what_waits_at_no_cost_while_others_go_out_is_told_once(metrics, caplog) -> None:
    away = SinkUnavailable("no right to write there")
    WatchedRelay(Rows(), Answers([away, None, away]), metrics).run_once()
    [told] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.getMessage() == ("2 of 3 not published, retried later: no right to write there")


def test_published_and_failed_are_counted_by_reason(metrics) -> None:
    relay = WatchedRelay(Rows(), Answers([None, ValueError("no"), None]), metrics)
    assert relay.run_once().failed == 1
    assert value(metrics, "conquiet_relay_published_total") == 2
    assert value(metrics, "conquiet_relay_failed_total", reason="ValueError") == 1
    assert value(metrics, "conquiet_relay_attempts_sum") == 4
    assert value(metrics, "conquiet_relay_publish_seconds_count") == 1


def test_an_outage_is_one_outage_and_no_failure(metrics) -> None:
    relay = WatchedRelay(Rows(), Answers(SinkUnavailable("away")), metrics)
    relay.run_once()
    assert relay.in_outage
    assert value(metrics, "conquiet_relay_outages_total") == 1
    assert value(metrics, "conquiet_relay_failed_total", reason="SinkUnavailable") is None


def test_gauges_come_from_the_table_and_are_left_out_when_it_is_away(metrics) -> None:
    assert value(metrics, "conquiet_relay_pending") == 7
    assert value(metrics, "conquiet_relay_parked") == 2
    assert value(metrics, "conquiet_relay_oldest_unpublished_seconds") == 1.5
    assert b"conquiet_relay_pending 7.0" in metrics.exposition()
    assert value(RelayMetrics(lambda: None), "conquiet_relay_pending") is None


def test_every_metric_of_the_table_is_exposed(metrics) -> None:
    text = metrics.exposition().decode()
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.kind}" in text


def test_a_duplicate_publish_is_told_and_counted(metrics, caplog) -> None:
    rows = Rows()
    relay = WatchedRelay(rows, Answers(), metrics)
    rows.away = True
    caplog.set_level(logging.INFO, "conquiet.relay")
    assert isinstance(relay.run_once().outage, StoreError)
    assert "will be published again" in caplog.text
    rows.away = False
    caplog.clear()
    relay.run_once()
    again = [record for record in caplog.records if getattr(record, "duplicate", False)]
    assert sorted(record.event_id for record in again) == ["1", "2", "3"]
    assert value(metrics, "conquiet_relay_duplicates_total") == 3


def test_a_log_line_names_event_aggregate_and_attempt() -> None:
    message = Rows().read(1, 0)[0]
    record = logging.makeLogRecord({"msg": "published", "levelname": "INFO"})
    record.__dict__.update(log_fields(message))
    line = json.loads(JsonFormatter().format(record))
    expected = {
        "event_id": "1",
        "event_type": "sold",
        "aggregate_type": "order",
        "aggregate_id": "o-1",
        "attempt": 2,
    }
    assert {name: line[name] for name in expected} == expected
    assert "event_id=1 event_type=sold" in ConsoleFormatter().format(record)


def test_a_traceback_stays_within_its_line_of_json() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed")
    [line] = stream.getvalue().splitlines()
    assert "ValueError: no" in json.loads(line)["traceback"]


def test_nothing_to_do_makes_it_patient_and_work_makes_it_quick_again(metrics) -> None:
    rows = Rows()
    relay = WatchedRelay(rows, Answers(), metrics, poll=0.5)
    rows.waiting = []
    for _ in range(10):
        relay.run_once()
    assert 1.0 <= relay.read_seconds <= 2.0
    rows.waiting = ["1"]
    relay.run_once()
    relay.run_once()
    assert 0.25 <= relay.read_seconds <= 0.5


class Patient:
    """A source that waits for as long as it may, and until it is stopped."""

    poll = 0.0

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.stopped = threading.Event()

    def read(self, limit, timeout):
        self.waits.set()
        self.stopped.wait(timeout)
        return []

    def stop(self):
        self.stopped.set()

    def close(self): ...


def test_waiting_for_rows_is_not_being_busy_and_ends_when_told(metrics) -> None:
    source = Patient()
    relay = WatchedRelay(source, Answers(), metrics, poll=60.0)
    thread = threading.Thread(target=relay.run)
    thread.start()
    assert source.waits.wait(10)
    assert relay.busy_seconds == 0.0
    relay.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_relay_without_prometheus_client_counts_nothing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = RelayMetrics(lambda: None)
    metrics.published.inc()
    metrics.failed.labels("Refused").inc()
    metrics.publish_seconds.observe(0.1)
    assert metrics.exposition() == b"# for metrics: pip install 'conquiet[metrics]'\n"
