"""Lake: events of any producer in Delta tables: bronze, silver, quarantine, facts, marts."""

from conquiet.lake.definition import Event, ExpectationFailed
from conquiet.lake.pipeline import Pipeline
from conquiet.lake.reconcile import Outbox
from conquiet.lake.source import read_files

__all__ = ["Event", "ExpectationFailed", "Outbox", "Pipeline", "read_files"]
