"""OutboxSource: the format `conquiet-outbox`."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from conquiet.errors import ConfigError


class OutboxSource(DataSource):
    """What Spark asks for a schema or a reader; imports the rest when it is asked."""

    options: Any

    @classmethod
    def name(cls) -> str:
        return "conquiet-outbox"

    def schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        from conquiet.spark.columns import ARROW_SCHEMA

        return from_arrow_schema(ARROW_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        from conquiet.spark.outbox.batch import OutboxReader
        from conquiet.spark.outbox.options import OutboxOptions

        return OutboxReader(OutboxOptions.of(self.options), _columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        from conquiet.spark.outbox.options import OutboxOptions
        from conquiet.spark.outbox.stream import OutboxStreamReader

        return OutboxStreamReader(OutboxOptions.of(self.options), _columns(schema))


def _columns(schema: StructType) -> list[str]:
    """The columns that are asked for: all, or those of a schema of the query's own."""
    from conquiet.spark.columns import ARROW_SCHEMA

    unknown = [name for name in schema.names if name not in ARROW_SCHEMA.names]
    if unknown:
        raise ConfigError(
            f"an outbox has no column {', '.join(unknown)}; it has {', '.join(ARROW_SCHEMA.names)}"
        )
    return list(schema.names)
