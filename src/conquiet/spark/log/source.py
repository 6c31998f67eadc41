"""LogSource: the format `conquiet`. Redis Streams, read and written, in batches and streams."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType


class LogSource(DataSource):
    """What Spark asks for a schema, a reader or a writer; lives in Spark's planner processes."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return "conquiet"

    def schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        from conquiet.spark.columns import ARROW_SCHEMA

        return from_arrow_schema(ARROW_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        raise NotImplementedError

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        raise NotImplementedError

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        made: DataSourceWriter = _writing().batch_writer(self.options, schema, overwrite)
        return made

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        made: DataSourceStreamWriter = _writing().stream_writer(self.options, schema, overwrite)
        return made


def _writing() -> Any:
    """Imported by whoever writes; readers have no use for it."""
    return import_module("conquiet.spark.log.writer")
