"""Rows for the tests: as handlers would leave them in an outbox."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from sqlalchemy import Engine

from conquiet import Message
from conquiet.spark.columns import ARROW_SCHEMA
from conquiet.spark.outbox.source import OutboxSource
from conquiet.sql import Outbox

NOON = "2026-01-31T12:00:00.000001Z"


def message(number: int, **attributes: Any) -> Message[bytes]:
    return Message(
        b'{"number": %d}' % number,
        {
            "specversion": "1.0",
            "id": f"e-{number}",
            "type": "placed" if number % 2 else "paid",
            "source": "/shop",
            "subject": f"k-{number % 3}",
            "time": NOON,
            "datacontenttype": "application/json",
            "correlationid": f"c-{number}",
            **attributes,
        },
    )


def fill(engine: Engine, numbers: Iterable[int]) -> None:
    """Each event in a transaction of its own."""
    outbox = Outbox("orders")
    for number in numbers:
        with engine.begin() as connection:
            outbox.add(connection, [message(number)])


def fill_at_once(engine: Engine, numbers: Iterable[int]) -> None:
    """All events in one transaction."""
    with engine.begin() as connection:
        Outbox("orders").add(connection, [message(number) for number in numbers])


def read(url: str, **options: object) -> list[dict[str, Any]]:
    """What a batch gives, task by task, without a Spark around it."""
    source = OutboxSource({"url": url, **{name: str(value) for name, value in options.items()}})
    reader = source.reader(source.schema())
    tables = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(tables, ARROW_SCHEMA).to_pylist()


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["event_id"] for row in rows]


def numbered(numbers: Iterable[int]) -> list[str]:
    return sorted(f"e-{number}" for number in numbers)
