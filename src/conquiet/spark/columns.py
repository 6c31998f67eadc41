"""Columns that all sources of events share, so that a pipeline can read from any of them.

| column | of the log | of an outbox |
|---|---|---|
| stream | the stream's name | the topic |
| entry_id | the entry's id | the position, as `xid-id` |
| entry_time | the milliseconds of the entry's id | created_at |
"""

from __future__ import annotations

import pyarrow as pa

CORES_VARIABLE = "CONQUIET_SPARK_CORES"
"""Environment variable that passes the cores of the executors to planner processes."""

MALFORMED = "_malformed"
"""The reason why an entry is not an event, or null. Its fields are then in `data`, as JSON."""

_TIME = pa.timestamp("us", tz="UTC")

ARROW_SCHEMA = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("entry_id", pa.string(), nullable=False),
        pa.field("entry_time", _TIME),
        pa.field("key", pa.string()),
        pa.field("event_id", pa.string()),
        pa.field("type", pa.string()),
        pa.field("source", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("time", _TIME),
        pa.field("content_type", pa.string()),
        pa.field("attributes", pa.map_(pa.string(), pa.string())),
        pa.field("data", pa.binary()),
        pa.field(MALFORMED, pa.string()),
    ]
)
"""`attributes` holds all attributes that have no column of their own, as text."""
