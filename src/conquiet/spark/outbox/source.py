"""OutboxSource: the format `conquiet-outbox`."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType


class OutboxSource(DataSource):
    """What Spark asks for a schema or a reader; imports the rest when it is asked."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return "conquiet-outbox"

    def schema(self) -> StructType | str:
        from pyspark.sql.pandas.types import from_arrow_schema

        from conquiet.spark.columns import ARROW_SCHEMA
        from conquiet.spark.log.payload import columns_ddl, schema_of

        data = schema_of(self.options)
        return from_arrow_schema(ARROW_SCHEMA) if data == "BINARY" else columns_ddl(data)

    def reader(self, schema: StructType) -> DataSourceReader:
        from conquiet.spark.outbox.batch import OutboxReader
        from conquiet.spark.outbox.options import OutboxOptions

        return OutboxReader(OutboxOptions.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        from conquiet.spark.outbox.options import OutboxOptions
        from conquiet.spark.outbox.stream import OutboxStreamReader

        return OutboxStreamReader(OutboxOptions.of(self.options), schema)
