"""Batches: what was read, as Arrow record batches with the columns that Spark asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType

from conquiet.errors import ConfigError
from conquiet.spark.columns import ARROW_SCHEMA, MALFORMED
from conquiet.spark.log.arrays import columns_of
from conquiet.spark.log.payload import RAW, Payload, as_text
from conquiet.spark.log.ranges import Found
from conquiet.spark.log.resp import Table
from conquiet.spark.log.rows import RowBuilder

_ROWS = 10_000


class Batches:
    """Makes record batches for one schema; can be pickled."""

    def __init__(self, schema: StructType, types: tuple[str, ...] = ()) -> None:
        for field in schema:
            if field.name not in {*ARROW_SCHEMA.names, RAW}:
                known = ", ".join([*ARROW_SCHEMA.names, RAW])
                raise ConfigError(f"the log has no column {field.name!r}; it has {known}")
        self._schema = schema
        self._types = types
        self._wanted = frozenset(schema.names) - {RAW}
        data = schema["data"].dataType if "data" in schema.names else BinaryType()
        self._is_text = isinstance(data, StringType)
        self._typed = data if isinstance(data, StructType) else None
        if self._is_text or self._typed is not None:
            self._wanted |= {MALFORMED, "data"}
        if types:
            self._wanted |= {MALFORMED, "type"}

    def of(self, found: Iterable[Found]) -> Iterator[pa.RecordBatch]:
        finish = self._finisher()
        rows = RowBuilder()
        for stream, entries in found:
            if isinstance(entries, Table):
                if len(rows):
                    yield finish(rows.take())
                yield finish(columns_of(entries, stream, self._wanted))
                continue
            for entry_id, fields in entries:
                rows.add(stream, entry_id, fields)
            if len(rows) >= _ROWS:
                yield finish(rows.take())
        if len(rows):
            yield finish(rows.take())

    def _finisher(self) -> Any:
        target = to_arrow_schema(self._schema, timezone="UTC")
        payload = None
        if self._typed is not None:
            place = target.get_field_index("data")
            payload = Payload(self._typed, target.field(place).type)

        types = pa.array(self._types, pa.string()) if self._types else None

        def finish(columns: dict[str, pa.Array]) -> pa.RecordBatch:
            if types is not None:
                columns = _only(types, columns)
            if payload is not None:
                columns = payload.parse(columns)
            elif self._is_text:
                columns = as_text(columns)
            arrays = [columns[name] for name in target.names]
            return pa.RecordBatch.from_arrays(arrays, schema=target)

        return finish


def _only(types: pa.Array, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """The events of these types; and what is no event, since nobody knows what it should be."""
    kept = pc.or_(pc.is_in(columns["type"], types), pc.is_valid(columns[MALFORMED]))
    return {name: column.filter(kept) for name, column in columns.items()}
