"""The statements of an ordered claim on PostgreSQL: keys that are free, and their rows."""

from __future__ import annotations

from sqlalchemy import Dialect

from conquiet.sql.layout import Layout

# From one key to the next by the index on (key, order): a key costs one step, however many rows of
# it wait. A key with a parked row, or one that another relay has, is passed over. CASE, since it
# alone promises an order of evaluation, and keeps the planner from joining instead of stepping.
# Keys travel as text, which every driver knows.
_LOCK_KEYS = """
WITH RECURSIVE waiting (key) AS (
    (SELECT {key} FROM {table}
      WHERE {keyed} AND {key} {beyond} CAST(CAST(:after AS text) AS {type})
      ORDER BY {key}, {order} LIMIT 1)
    UNION ALL
    SELECT following.key FROM waiting CROSS JOIN LATERAL (
        SELECT {key} AS key FROM {table}
         WHERE {keyed} AND {key} > waiting.key
         ORDER BY {key}, {order} LIMIT 1) AS following
)
SELECT CAST(key AS text) FROM waiting
WHERE CASE
    WHEN key = ANY(CAST(CAST(:held AS text[]) AS {type}[])) THEN false
    WHEN {stuck} THEN false
    ELSE pg_try_advisory_xact_lock(hashtextextended(CAST(key AS text), :seed)) END
LIMIT :count
"""

# A statement of its own, so that it sees what the last holder of the key has committed: marks, and
# perhaps a row that it parked, which the first statement could not see yet.
_OF_KEYS = (
    "SELECT o.* FROM (SELECT key FROM unnest(CAST(CAST({keys} AS text[]) AS {type}[]))"
    " AS given (key) WHERE CASE WHEN {stuck} THEN false ELSE true END) AS mine"
    " CROSS JOIN LATERAL (SELECT {columns} FROM {table}"
    " WHERE {keyed} AND {key} = mine.key ORDER BY {order} LIMIT {each} FOR UPDATE SKIP LOCKED) AS o"
)


def lock_keys(layout: Layout, table: str, dialect: Dialect, *, beyond: str) -> str:
    """Keys that are free, locked until the transaction ends; `beyond` is `>` or `>=`."""
    return _LOCK_KEYS.format(
        **_parts(layout, table, dialect), stuck=layout.stuck(table, "waiting.key"), beyond=beyond
    )


def of_keys(layout: Layout, table: str, dialect: Dialect, *, keys: str, each: str) -> str:
    """The rows of keys that are ours; `keys` and `each` are placeholders."""
    return _OF_KEYS.format(
        **_parts(layout, table, dialect),
        stuck=layout.stuck(table, "given.key"),
        columns=layout.selected(),
        keys=keys,
        each=each,
    )


def _parts(layout: Layout, table: str, dialect: Dialect) -> dict[str, str]:
    return {
        "table": table,
        "key": layout.key,
        "keyed": layout.keyed,
        "order": ", ".join(layout.order),
        "type": layout.type_of(layout.key, dialect),
    }
