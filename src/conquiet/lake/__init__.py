"""Lake: anyone's events to Delta tables: bronze, typed silver, quarantine, facts, marts."""

from conquiet.lake.definition import Event, ExpectationFailed
from conquiet.lake.pipeline import Pipeline

__all__ = ["Event", "ExpectationFailed", "Pipeline"]
