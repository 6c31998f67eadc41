"""Batches: what was read, as Arrow record batches with the columns that Spark asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from conquiet.spark.columns import MALFORMED
from conquiet.spark.log.arrays import columns_of
from conquiet.spark.log.payload import RAW, check_columns, finisher, has_struct, has_text
from conquiet.spark.log.ranges import Found
from conquiet.spark.log.resp import Table
from conquiet.spark.log.rows import RowBuilder

_ROWS = 10_000


class Batches:
    """Makes record batches for one schema; can be pickled."""

    def __init__(self, schema: StructType, types: tuple[str, ...] = ()) -> None:
        check_columns(schema, "the log")
        self._schema = schema
        self._types = types
        self._wanted = frozenset(schema.names) - {RAW}
        if has_struct(schema) or has_text(schema):
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

    def _finisher(self) -> Callable[[dict[str, pa.Array]], pa.RecordBatch]:
        finish = finisher(self._schema)
        if not self._types:
            return finish
        types = pa.array(self._types, pa.string())
        return lambda columns: finish(_only(types, columns))


def _only(types: pa.Array, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """The events of these types; and what is no event, since nobody knows what it should be."""
    kept = pc.or_(pc.is_in(columns["type"], types), pc.is_valid(columns[MALFORMED]))
    return {name: column.filter(kept) for name, column in columns.items()}
