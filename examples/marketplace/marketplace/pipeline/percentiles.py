"""Percentiles by nearest rank: exact, and a value that is there, as `percentile_disc` has it."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as f


def nearest_rank(values: Column, percent: int) -> Column:
    """Of an array that is sorted and has no nulls, the ⌈n × percent ∕ 100⌉-th; null if empty."""
    count = f.size(values)
    rank = f.floor((count * percent + 99) / 100).cast("int")
    return f.when(count > 0, f.element_at(values, rank))
