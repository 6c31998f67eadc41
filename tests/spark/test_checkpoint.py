"""A checkpoint belongs to one query, for as long as that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conquiet.errors import ConfigError
from conquiet.spark import start_query
from conquiet.spark.checkpoint import lock_checkpoint


def numbers(spark):
    """A stream that needs no server."""
    return spark.readStream.format("rate").load()


def test_a_query_holds_its_checkpoint_until_it_ends(spark, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    def write():
        writing = numbers(spark).writeStream.format("noop").trigger(processingTime="1 hour")
        return start_query(writing, place)

    query = write()
    try:
        with pytest.raises(ConfigError, match="is in use by process"):
            write()
    finally:
        query.stop()
    write().stop()  # at once: nobody has to wait for the lock
    with lock_checkpoint(str(place)):
        pass


@pytest.mark.slow
def test_a_query_that_fails_or_never_starts_lets_go_of_its_checkpoint(
    spark, tmp_path: Path
) -> None:
    place = str(tmp_path / "checkpoint")

    def fail(frame, batch) -> None:
        raise ValueError("as it may happen")

    query = start_query(numbers(spark).writeStream.foreachBatch(fail), place)
    with pytest.raises(Exception, match="as it may happen"):
        query.awaitTermination(60)
    with lock_checkpoint(place):
        pass
    with pytest.raises(Exception, match="nowhere"):
        start_query(numbers(spark).writeStream.format("nowhere"), place)
    with lock_checkpoint(place):
        pass
