"""Reconcile: whether the outbox, the log, silver and the quarantine hold the same events, by hour.

Two tables of every pipeline, counted again for the hours that a batch touches, and by `reconcile`
for hours of which the outbox has more than was counted, or that were not complete:

    recon_completeness   counts from both ends, with the ids that are missing, foreign or lost
    outbox_delivery      events, duplicates, failed attempts, and the lag from outbox to log

An hour is that of the attribute `time`, which is the outbox row's `created_at`; of the entry's time
where an event has none. Types outside the catalog are in no outbox: their streams are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, timedelta
from fnmatch import translate
from functools import cache, partial
from typing import Any, Literal

from conquiet.errors import ConfigError
from conquiet.lake.definition import Definition
from conquiet.lake.query import Database, Query, quoted

COMPLETENESS, DELIVERY = "recon_completeness", "outbox_delivery"
MOST_NAMED = 100
_table_name = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


@dataclass(frozen=True)
class Outbox:
    """A table `outbox_events` in a database, read without Spark.

    `url` is that of the database, PostgreSQL or SQLite; `table` may have a schema before its name.
    """

    url: str
    table: str = "outbox_events"

    def count_hours(self, database: Database) -> None:
        """Make the table `outbox_hours`: rows and attempts of each hour, counted by the outbox's
        own database."""
        self._read(
            database,
            "{hour} AS hour, count(*) AS rows, sum(attempt_count) AS attempts",
            "GROUP BY 1",
        )
        database.run(
            "CREATE OR REPLACE TABLE main.outbox_hours AS SELECT (hour || ':00:00')::TIMESTAMPTZ"
            " AS hour, rows::BIGINT AS rows, attempts::BIGINT AS attempts FROM outbox_found"
        )

    def read_touched(self, database: Database) -> None:
        """Make the table `outbox_rows`: id, created_at and attempts in the hours of `touched`."""
        found = database.run("SELECT DISTINCT hour FROM touched WHERE hour IS NOT NULL").fetchall()
        hours = sorted(row[0].astimezone(UTC) for row in found)
        where = "WHERE false"
        if hours:
            listed = ", ".join(f"'{one:%Y-%m-%d %H}'" for one in hours)
            where = (
                f"WHERE {{hour}} IN ({listed}) AND {{time}} >= '{hours[0]:%Y-%m-%d %H}:00{{utc}}'"
            )
            where += f" AND {{time}} < '{hours[-1] + timedelta(hours=1):%Y-%m-%d %H}:00{{utc}}'"
        self._read(database, "{id} AS id, created_at, attempt_count", where)
        database.run(
            "CREATE OR REPLACE TABLE main.outbox_rows AS SELECT id::VARCHAR AS id,"
            " created_at::VARCHAR::TIMESTAMPTZ AS created_at, attempt_count::BIGINT AS attempts"
            " FROM outbox_found"
        )

    def _read(self, database: Database, columns: str, rest: str) -> None:
        from conquiet.spark.database import Database as Address
        from conquiet.spark.database import begin

        if not _table_name.fullmatch(self.table):
            raise ConfigError(f"{self.table!r:.60} is not the name of a table")
        address = Address.at(self.url)
        names = _POSTGRESQL if address.is_postgresql else _SQLITE
        sql = f"SELECT {columns} FROM {self.table} {rest}".format_map(names)
        with begin(address) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            database.connection.register("outbox_found", cursor.fetch_arrow_table())


_POSTGRESQL = {
    "id": "id::text",
    "hour": "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24')",
    "time": "created_at",
    "utc": "+00",
}
_SQLITE = {
    "id": "id",
    "hour": "strftime('%Y-%m-%d %H', created_at)",
    "time": "strftime('%Y-%m-%d %H:%M', created_at)",
    "utc": "",
}


Scope = Literal["batches", "outbox", "all"]


def reconciliation(
    database: Database,
    definition: Definition,
    outbox: Outbox | str | None = None,
    scope: Scope = "batches",
) -> list[Query]:
    """Return the two tables as queries over some hours: those that batches have changed; those that
    are not complete, or of which the outbox has more than was counted; or all."""
    outbox = Outbox(outbox) if isinstance(outbox, str) else outbox
    database.run(
        "CREATE OR REPLACE MACRO event_hour(moment, seen) AS date_trunc('hour', CASE WHEN"
        " moment >= TIMESTAMPTZ '1970-01-01 00:00:00+00'"
        " AND moment < TIMESTAMPTZ '9999-01-01 00:00:00+00' THEN moment ELSE seen END)"
    )
    # What the statistics of a file can answer: a file of other days is not read.
    database.run(
        "CREATE OR REPLACE MACRO may_be_touched(moment) AS moment IS NULL"
        " OR (moment >= getvariable('first_hour')::TIMESTAMPTZ"
        " AND moment < getvariable('last_hour')::TIMESTAMPTZ + INTERVAL 1 HOUR)"
        " OR moment < TIMESTAMPTZ '1970-01-01 00:00:00+00'"
        " OR moment >= TIMESTAMPTZ '9999-01-01 00:00:00+00'"
    )
    domain = _is_domain(set(definition.streams.values()))
    touched = f"SELECT event_hour(time, entry_time) FROM changed_raw_events WHERE {domain}"
    if scope == "batches":  # a replay or a retry moves events of entries that are not new
        for table in ("changed_events", "changed_events_quarantine"):
            touched += (
                f" UNION SELECT event_hour(created_at, first_seen_at) FROM {table} WHERE {domain}"
            )
    else:
        is_first = scope == "all" or not database.exists(DELIVERY)
        _find_hours(database, outbox, domain if is_first else None)
        touched = "SELECT hour FROM hours_to_count"
    how: dict[str, Any] = {"group": "hour", "key": "hour", "touched": touched}
    # Both have the same hours, so that one call serves both.
    how["prepare"] = cache(partial(_prepare, outbox))
    return [
        Query(COMPLETENESS, sql=_completeness(domain, outbox is not None), **how),
        Query(DELIVERY, sql=_delivery(domain, outbox is not None), **how),
    ]


def _prepare(outbox: Outbox | None, database: Database) -> None:
    """Note the first and the last of the touched hours, and read their rows of the outbox."""
    for name, value in (("first_hour", "min(hour)"), ("last_hour", "max(hour)")):
        database.run(f"SET VARIABLE {name} = (SELECT {value} FROM touched)")
    if outbox is not None:
        _read_outbox(outbox, database)


def _read_outbox(outbox: Outbox, database: Database) -> None:
    """Make `outbox_rows`, and `counted_before`: what an earlier count found in the same hours."""
    outbox.read_touched(database)
    database.run(
        "CREATE OR REPLACE TABLE main.counted_before"
        " (hour TIMESTAMPTZ, rows_before BIGINT, foreign_before VARCHAR[])"
    )
    if database.exists(COMPLETENESS):
        database.run(
            "INSERT INTO counted_before SELECT hour, outbox_count, foreign_ids"
            f" FROM {COMPLETENESS} WHERE hour IN (FROM touched)"
        )


def _find_hours(database: Database, outbox: Outbox | None, domain: str | None) -> None:
    """Make the table `hours_to_count`: all hours of events of a domain; without one, the hours
    that are not complete or of which the outbox has more than was counted."""
    if outbox is not None:
        outbox.count_hours(database)
    if domain is not None:
        found = f"SELECT event_hour(time, entry_time) AS hour FROM raw_events WHERE {domain}"
        counted = "SELECT hour FROM outbox_hours"
    else:
        found = f"SELECT hour FROM {COMPLETENESS} WHERE NOT complete"
        # Fewer rows than were counted are no news: published rows are removed after a while.
        counted = (
            f"SELECT hour FROM outbox_hours LEFT JOIN {COMPLETENESS} USING (hour)"
            f" LEFT JOIN {DELIVERY} USING (hour) WHERE outbox_count IS NULL"
            " OR rows > outbox_count OR attempts > coalesce(failed_attempts, 0)"
        )
    database.offer(f"raw_events {COMPLETENESS} {DELIVERY}")
    more = "" if outbox is None else f" UNION {counted}"
    database.run(f"CREATE OR REPLACE TABLE main.hours_to_count AS {found}{more}")


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
    """Return the rows of silver and quarantine in the touched hours."""
    return f"""
    SELECT {_ID} AS id, event_id, kind, event_hour(created_at, first_seen_at) AS hour,
           created_at, first_seen_at, delivery_count
    FROM (
        SELECT 'event' AS kind, event_id, stream, entry_id, created_at, first_seen_at,
               delivery_count FROM events
        UNION ALL
        SELECT 'refused', event_id, stream, entry_id, created_at, first_seen_at,
               delivery_count FROM events_quarantine
    ) WHERE {domain} AND may_be_touched(created_at) AND hour IN (FROM touched)
    """


def _named(condition: str) -> str:
    return f"coalesce(list_sort(list(id) FILTER ({condition}))[:{MOST_NAMED}], [])"


def _completeness(domain: str, has_outbox: bool) -> str:
    """Return the counts of the touched hours.

    Published rows are removed after a while: an hour of which the outbox has fewer rows than were
    counted before keeps that count and the foreign ids that were found with it.
    """
    strays = f"""
        SELECT hour, greatest(rows_now, rows_before) AS outbox_count, missing_ids,
               CASE WHEN rows_now < rows_before THEN foreign_before ELSE foreign_now END
               AS foreign_ids
        FROM (
            SELECT coalesce(row_hour, log.hour) AS hour, count(row_hour) AS rows_now,
                   {_named("log.hour IS NULL")} AS missing_ids,
                   {_named("row_hour IS NULL")} AS foreign_now
            FROM log FULL JOIN (
                SELECT id, date_trunc('hour', created_at) AS row_hour FROM outbox_rows
                WHERE row_hour IN (FROM touched)
            ) USING (id) GROUP BY 1
        ) LEFT JOIN counted_before USING (hour)
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
            WHERE {domain} AND may_be_touched(time)
                  AND (time IS NULL OR event_hour(time, entry_time) IN (FROM touched))
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
        for row in database.arrow(f"FROM {quoted(name)} {where} ORDER BY ALL").to_pylist():
            yield name, row
