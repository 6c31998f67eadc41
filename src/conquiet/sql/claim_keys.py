"""The statements of an ordered claim on PostgreSQL: keys that are free, and their rows."""

from __future__ import annotations

from conquiet.sql.claimed import COLUMNS

# From one key to the next by the index on (key, id): a key costs one step, however many rows of
# it wait. A key with a parked row, or one that another relay has, is passed over. CASE, since it
# alone promises an order of evaluation, and keeps the planner from joining instead of stepping.
LOCK_KEYS = """
WITH RECURSIVE waiting (key) AS (
    (SELECT key FROM {table}
      WHERE published_at IS NULL AND parked_at IS NULL AND key IS NOT NULL
        AND key {beyond} :after
      ORDER BY key, id LIMIT 1)
    UNION ALL
    SELECT following.key FROM waiting CROSS JOIN LATERAL (
        SELECT key FROM {table}
         WHERE published_at IS NULL AND parked_at IS NULL AND key IS NOT NULL
           AND key > waiting.key
         ORDER BY key, id LIMIT 1) AS following
)
SELECT key FROM waiting
WHERE CASE
    WHEN key = ANY(CAST(:held AS text[])) THEN false
    WHEN EXISTS (SELECT FROM {table} AS stuck
                  WHERE stuck.parked_at IS NOT NULL AND stuck.key = waiting.key) THEN false
    ELSE pg_try_advisory_xact_lock(hashtextextended(key, :seed)) END
LIMIT :count
"""

# A statement of its own, so that it sees what the last holder of the key has committed: marks, and
# perhaps a row that it parked, which the first statement could not see yet.
OF_KEYS = (
    "SELECT o.* FROM (SELECT key FROM unnest({keys}) AS given (key) WHERE CASE"
    " WHEN EXISTS (SELECT FROM {table} AS stuck"
    " WHERE stuck.parked_at IS NOT NULL AND stuck.key = given.key) THEN false"
    " ELSE true END) AS mine CROSS JOIN LATERAL (SELECT "
    + ", ".join("attributes::text" if name == "attributes" else name for name in COLUMNS)
    + " FROM {table} WHERE published_at IS NULL AND parked_at IS NULL AND key IS NOT NULL"
    " AND key = mine.key ORDER BY id LIMIT {each} FOR UPDATE SKIP LOCKED) AS o"
)
