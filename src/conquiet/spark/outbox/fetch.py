"""Fetch: runs in Spark's tasks and asks a database for a stretch of an outbox, by ADBC."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.types import StructType

from conquiet.errors import StoreError
from conquiet.spark.adbc import connected, one_line
from conquiet.spark.address import Database
from conquiet.spark.log.payload import finisher
from conquiet.spark.outbox.columns import events
from conquiet.spark.outbox.loss import lost
from conquiet.spark.outbox.options import OutboxOptions
from conquiet.spark.outbox.select import Stretch, statement

BATCH_ROWS = 10_000
"""How many rows of SQLite make a record batch; PostgreSQL's driver counts bytes."""


def fetched(
    options: OutboxOptions, stretch: Stretch, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The events of a stretch, as asked for; says so when it has fewer than were counted."""
    finish = finisher(schema)
    database = options.address.resolve()
    query = statement(options, stretch, postgresql=database.is_postgresql)
    rows = 0
    for answer in _answers(database, query):
        rows += answer.num_rows
        if answer.num_rows:
            found = events(answer, options)
            yield finish(dict(zip(found.schema.names, found.columns, strict=True)))
    if stretch.rows is not None and not options.filters and rows < stretch.rows:
        lost(options, stretch.after, stretch.upto, stretch.rows - rows)


def _answers(database: Database, query: str) -> Iterator[pa.RecordBatch]:
    with connected(database) as connection, connection.cursor() as cursor:
        if not database.is_postgresql:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
        cursor.execute(query)
        with cursor.fetch_record_batch() as reader:
            yield from _read(reader, database)


def _read(reader: pa.RecordBatchReader, database: Database) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            answer = reader.read_next_batch()
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as error:  # the server failed half-way
            raise StoreError(f"{database.shown}: {one_line(error):.500}") from error
        yield answer
