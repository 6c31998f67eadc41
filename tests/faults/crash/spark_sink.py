"""The Spark sink: what Spark calls in a task, in a plain process, with a task's context."""

from __future__ import annotations

from types import SimpleNamespace

import pandas  # noqa: F401 - the sink would import it in each child
import pyarrow as pa
from pyspark import TaskContext
from tests.faults import invariants
from tests.faults.crash.scenario import Place, Scenario
from tests.faults.invariants import Event, Facts
from tests.faults.seam import Seam

from conquiet.spark.log.writer import stream_writer

STREAM = "events"
ROWS = 5


class SparkSink(Scenario):
    """A task adds rows to a stream in slices of two; it is killed, and Spark runs it again."""

    name = "Spark sink, task retried"
    restarts = False

    def prepare(self, place: Place) -> None:
        with place.client() as client:  # what an earlier batch has added
            client.xadd(STREAM, {"id": "before", "data": '{"command": "before", "number": -1}'})

    def run(self, place: Place, seam: Seam, attempt: int) -> None:
        run = f"run-{attempt if self.restarts else 0}"
        query = {"sql.streaming.queryId": self.query(attempt), "streaming.sql.batchId": "7"}
        _pretend(attempt, query, run)
        options = {"url": place.redis, "topic": STREAM, "source": "/shop", "type": "placed"}
        options["sliceRows"] = "2"
        columns = {
            "event_id": [event.id for event in _expected()],
            "subject": [event.key for event in _expected()],
            "data": [
                f'{{"command": "{event.command}", "number": {event.number}}}'
                for event in _expected()
            ],
        }
        writer = stream_writer(options, SimpleNamespace(names=list(columns)), False)
        added = writer.write(iter([pa.record_batch(columns)]))
        assert added.rows == ROWS

    def query(self, attempt: int) -> str:
        return "q"

    def facts(self, place: Place) -> Facts:
        with place.client() as client:
            log = invariants.read_log(client, STREAM)[1:]
        facts = Facts(rows=_expected(), log=log, ordered=True)
        if len(log) != ROWS:
            facts.unsettled.append(f"{[event.id for event in log]}: not each row once, which")
        return facts


class RestartedQuery(SparkSink):
    name = "Spark sink, query restarted"
    restarts = True


class Careless(SparkSink):
    """Another query each time, which finds no fence. To be found out."""

    name = "Spark sink, that does not look"

    def query(self, attempt: int) -> str:
        return f"q-{attempt}"


def _expected() -> list[Event]:
    return [Event(f"e-{n}", f"c-{n}", "k", n, published=True) for n in range(ROWS)]


def _pretend(attempt: int, properties: dict[str, str], run: str) -> None:
    """Be in a task, as PySpark's worker process is when it calls a writer."""
    context = TaskContext._getOrCreate()
    context._partitionId = 0
    context._attemptNumber = attempt
    context._taskAttemptId = attempt
    context._localProperties = {**properties, "spark.jobGroup.id": run}
