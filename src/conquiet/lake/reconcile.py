"""Reconcile: whether the outbox, the log, silver and the quarantine hold the same events, by hour.

Two tables of every pipeline, counted again for the hours that a batch touches:

    recon_completeness   counts from both ends, with the ids that are missing, foreign or lost
    outbox_delivery      events, duplicates, failed attempts, and the lag from outbox to log

An hour is that of the attribute `time`, which is the outbox row's `created_at`; of the entry's time
where an event has none. Types outside the catalog are in no outbox: their streams are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

import pyarrow as pa

from conquiet.errors import ConfigError
from conquiet.lake.definition import Definition
from conquiet.lake.query import Database, Query

COMPLETENESS, DELIVERY = "recon_completeness", "outbox_delivery"
MOST_NAMED = 100
_table_name = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


@dataclass(frozen=True)
class Outbox:
    """A table `outbox_events` in a database, read without Spark."""

    url: str
    table: str = "outbox_events"

    def rows(self) -> pa.Table:
        """Read id, created_at and attempts of every row."""
        from conquiet.spark.database import Database as Address
        from conquiet.spark.database import connected

        if not _table_name.fullmatch(self.table):
            raise ConfigError(f"{self.table!r:.60} is no name of a table")
        address = Address.at(self.url)
        id_ = "id::text" if address.is_postgresql else "id"
        with connected(address) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT {id_} AS id, created_at, attempt_count FROM {self.table}")
            return cursor.fetch_arrow_table()


def reconciliation(
    database: Database, definition: Definition, outbox: Outbox | None = None, *, all: bool = False
) -> list[Query]:
    """Return the two tables as queries, over the hours of changed events, or over all hours.

    With an outbox, its rows become a table of the database.
    """
    if outbox is not None:
        database.connection.register("outbox_found", outbox.rows())
        database.run(
            "CREATE OR REPLACE TABLE main.outbox_rows AS SELECT id::VARCHAR AS id,"
            " created_at::TIMESTAMPTZ AS created_at, attempt_count::BIGINT AS attempts"
            " FROM outbox_found"
        )
    database.run(
        "CREATE OR REPLACE MACRO event_hour(moment, seen) AS date_trunc('hour', CASE WHEN"
        " moment >= TIMESTAMPTZ '1970-01-01 00:00:00+00'"
        " AND moment < TIMESTAMPTZ '9999-01-01 00:00:00+00' THEN moment ELSE seen END)"
    )
    domain = _is_domain(set(definition.streams.values()))
    raw = "raw_events" if all else "changed_raw_events"
    touched = f"SELECT event_hour(time, entry_time) FROM {raw} WHERE {domain}"
    if not all:  # a replay or a retry moves events of entries that are not new
        for table in ("changed_events", "changed_events_quarantine"):
            touched += (
                f" UNION SELECT event_hour(created_at, first_seen_at) FROM {table} WHERE {domain}"
            )
    if outbox is not None and all:
        touched += " UNION SELECT date_trunc('hour', created_at) FROM outbox_rows"
    how: dict[str, Any] = {"group": "hour", "key": "hour", "touched": touched}
    return [
        Query(COMPLETENESS, sql=_completeness(domain, outbox is not None), **how),
        Query(DELIVERY, sql=_delivery(domain, outbox is not None), **how),
    ]


def _is_domain(patterns: set[str]) -> str:
    if not patterns:
        return "true"
    # DuckDB's regular expressions know no \Z and no (?s:…); the match is a full one anyway.
    found = "|".join(_pattern(one) for one in sorted(patterns))
    return f"NOT regexp_full_match(stream, '{found}')"


def _pattern(text: str) -> str:
    plain = re.sub(r"^\(\?s:(.*)\)(\\Z|\\z)$", r"\1", translate(text))
    return plain.replace("'", "''")


_ID = "coalesce(nullif(event_id, ''), stream || '/' || entry_id)"


def _kept(domain: str) -> str:
    """Rows of silver and quarantine in the touched hours."""
    return f"""
    SELECT {_ID} AS id, event_id, kind, event_hour(created_at, first_seen_at) AS hour,
           created_at, first_seen_at, delivery_count
    FROM (
        SELECT 'event' AS kind, event_id, stream, entry_id, created_at, first_seen_at,
               delivery_count FROM events
        UNION ALL
        SELECT 'refused', event_id, stream, entry_id, created_at, first_seen_at,
               delivery_count FROM events_quarantine
    ) WHERE {domain} AND hour IN (FROM touched)
    """


def _named(condition: str) -> str:
    return f"coalesce(list_sort(list(id) FILTER ({condition}))[:{MOST_NAMED}], [])"


def _completeness(domain: str, has_outbox: bool) -> str:
    strays = f"""
        SELECT coalesce(row_hour, log.hour) AS hour, count(row_hour) AS outbox_count,
               {_named("log.hour IS NULL")} AS missing_ids,
               {_named("row_hour IS NULL")} AS foreign_ids
        FROM log FULL JOIN (
            SELECT id, date_trunc('hour', created_at) AS row_hour FROM outbox_rows
            WHERE row_hour IN (FROM touched)
        ) USING (id) GROUP BY 1
    """
    nothing = """
        SELECT hour, NULL::BIGINT AS outbox_count, []::VARCHAR[] AS missing_ids,
               []::VARCHAR[] AS foreign_ids FROM touched
    """
    return f"""
    WITH log AS (
        SELECT id, hour, entries FROM (
            SELECT {_ID} AS id, count(*) AS entries, arg_min(event_hour(time, entry_time),
                   {{'at': entry_time, 'entry': entry_id}}) AS hour
            FROM raw_events
            WHERE {domain} AND (time IS NULL OR event_hour(time, entry_time) IN (FROM touched))
            GROUP BY 1
        ) WHERE hour IN (FROM touched)
    ), kept AS ({_kept(domain)}), strays AS ({strays if has_outbox else nothing}), counted AS (
        SELECT coalesce(log.hour, kept.hour) AS hour, count(log.hour) AS log_count,
               coalesce(sum(entries), 0)::BIGINT AS entry_count,
               count(*) FILTER (kind = 'event') AS silver_count,
               count(*) FILTER (kind = 'refused') AS quarantine_count,
               {_named("log.hour IS NULL OR kind IS NULL")} AS lost_ids
        FROM log FULL JOIN kept USING (id) GROUP BY 1
    )
    SELECT hour, {"coalesce(outbox_count, 0)" if has_outbox else "outbox_count"} AS outbox_count,
           coalesce(log_count, 0) AS log_count, coalesce(entry_count, 0) AS entry_count,
           coalesce(silver_count, 0) AS silver_count,
           coalesce(quarantine_count, 0) AS quarantine_count,
           coalesce(missing_ids, []) AS missing_ids, coalesce(foreign_ids, []) AS foreign_ids,
           coalesce(lost_ids, []) AS lost_ids,
           coalesce(log_count, 0) = coalesce(silver_count, 0) + coalesce(quarantine_count, 0)
           AND len(missing_ids) = 0 AND len(foreign_ids) = 0 AND len(lost_ids) = 0 AS complete
    FROM counted FULL JOIN strays USING (hour)
    WHERE log_count > 0 OR silver_count > 0 OR quarantine_count > 0 OR outbox_count > 0
    """


def _delivery(domain: str, has_outbox: bool) -> str:
    lag = "(epoch_us(seen_at) - epoch_us(coalesce(created_at, seen_at))) // 1000"
    parts = ", ".join(f"quantile_disc({lag}, 0.{part}) AS lag_p{part}_ms" for part in (50, 95, 99))
    tried = "coalesce(any_value(attempts), 0)" if has_outbox else "NULL::BIGINT"
    rows = """
        SELECT date_trunc('hour', created_at) AS hour, sum(attempts)::BIGINT AS attempts
        FROM outbox_rows WHERE hour IN (FROM touched) GROUP BY 1
    """
    return f"""
    WITH kept AS ({_kept(domain)}), again AS (
        SELECT event_id, sum(entries) AS more, min(first_seen_at) AS earliest FROM redeliveries
        WHERE event_id IN (SELECT event_id FROM kept) GROUP BY 1
    ), seen AS (
        SELECT hour, created_at, delivery_count + coalesce(more, 0) AS entries,
               least(first_seen_at, earliest) AS seen_at
        FROM kept LEFT JOIN again USING (event_id)
    ), tried AS ({rows if has_outbox else "SELECT hour, 0 AS attempts FROM touched"})
    SELECT hour, count(*) AS events, sum(seen.entries)::BIGINT AS entries,
           (sum(seen.entries) - count(*))::BIGINT AS duplicates, {tried} AS failed_attempts,
           {parts}, max({lag}) AS lag_max_ms
    FROM seen LEFT JOIN tried USING (hour) GROUP BY hour
    """


def mismatches(names: Iterable[str]) -> list[str]:
    """Name the tables whose every row is a mismatch: `recon_…` of the pipeline's own.

    >>> mismatches(["fact_order", "recon_completeness", "recon_money"])
    ['recon_money']
    """
    return sorted(one for one in names if one.startswith("recon_") and one != COMPLETENESS)


def disagreements(database: Database) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the hours that are not complete, then the rows of every table of mismatches."""
    for name in (COMPLETENESS, *mismatches(database.names)):
        database.offer(name)
        where = "WHERE NOT complete" if name == COMPLETENESS else ""
        for row in database.arrow(f"FROM {name} {where} ORDER BY ALL").to_pylist():
            yield name, row
