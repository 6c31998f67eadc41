"""Kept: frames that are kept while they are used more than once."""

from __future__ import annotations

from pyspark.sql import DataFrame


class Kept:
    """Until the block ends."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._frames:
            frame.unpersist()

    def keep(self, frame: DataFrame) -> DataFrame:
        self._frames.append(frame.persist())
        return frame
