"""The pipeline: from the log to the tables of the contract (docs/marketplace.md), by Spark.

refusal, silver ─▶ facts, ads, attribution ─▶ marts, weekly ─▶ recon, ops   frames in, a frame out
reading, lake, state, taking, refresh, jobs                                 what is run, and when
"""

from marketplace.pipeline.jobs import Job, replay
from marketplace.pipeline.lake import Lake
from marketplace.pipeline.reading import read_files

__all__ = ["Job", "Lake", "read_files", "replay"]
