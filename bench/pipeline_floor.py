"""What bench/pipeline.py measures against: DuckDB over the same files, in a process of its own.

It keeps the first delivery of each event, in files by day, and sums up one mart from the orders in
it: orders and created cents by day and vendor. It checks no payload and quarantines nothing, knows
no batches, commits nothing, corrects no day later, and makes none of the other tables.
"""

from __future__ import annotations

import sys
import time

_SILVER = """
COPY (
    SELECT arg_min(e, e.entry_time) AS row, count(*) AS delivery_count, day FROM (
        SELECT {{'event_id': event_id, 'type': type, 'time': time, 'entry_time': entry_time,
                 'subject': subject, 'data': data}} AS e, event_id, CAST(time AS DATE) AS day
        FROM read_parquet({files})
    ) GROUP BY event_id, day
) TO '{folder}/silver' (FORMAT parquet, PARTITION_BY (day), OVERWRITE_OR_IGNORE)
"""
_MART = """
COPY (
    SELECT CAST(row.time AT TIME ZONE 'America/Chicago' AS DATE) AS business_day,
           decode(row.data) ->> '$.data.vendor_store_id' AS vendor_store_id,
           count(*) AS orders,
           sum(CAST(decode(row.data) ->> '$.data.total_cents' AS BIGINT)) AS created_cents
    FROM read_parquet('{folder}/silver/*/*.parquet')
    WHERE row.type = 'order_created' AND json_valid(decode(row.data))
    GROUP BY ALL
) TO '{folder}/store_daily.parquet'
"""


def main() -> None:
    import duckdb

    folder, *files = sys.argv[1:]
    connection = duckdb.connect(f"{folder}/duck.db")  # where it may put what memory cannot hold
    connection.execute("SET threads = 2; SET memory_limit = '4GB'; SET TimeZone = 'UTC'")
    began = time.perf_counter()
    for statement in (_SILVER, _MART):
        connection.execute(statement.format(files=files, folder=folder))
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
