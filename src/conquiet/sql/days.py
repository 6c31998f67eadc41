"""Keep the rows of an outbox in one partition per day, on PostgreSQL, and drop whole days.

    outbox ──divide──▶ outbox_first   what was there, and what comes until midnight
                       outbox_d20261120, …   a day each, by `created_at` in UTC; a week ahead

    a day of which nothing is needed ──DETACH … CONCURRENTLY──▶ looked at again ──▶ DROP TABLE
                                                                   └ needed ──▶ ATTACH

There is no default partition: with one, PostgreSQL could not detach a day without locking the
outbox. So the days to come must be there when they come: `migrate` and each round of `Cleanup`
add them, and `verify` reports if they end soon. A row for which there is no day is refused; that
is an outage, as a missing table is.

Ids stay unique by their sequence; each day has a primary key of its own. The comment of a day is
the range that it has, so that one that was detached can be told from other tables, and attached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sqlalchemy import Connection, Engine

from conquiet.errors import ConfigError
from conquiet.sql import dialect

logger = logging.getLogger("conquiet.cleanup")

DAYS_AHEAD = 7
LEAST_AHEAD = 2
"""`verify` reports fewer."""
_SINCE = (14,)
"""The version of PostgreSQL that detaches without locking writers out."""
_LOCK_SECONDS = 10
"""How long the change waits for claims that are under way, while writers wait behind it."""


class Day(NamedTuple):
    """Is a partition of an outbox."""

    name: str
    is_pending: bool
    """Whether a DETACH of it was interrupted."""


def is_divided(connection: Connection, table: str) -> bool:
    """Return whether a table has a partition per day."""
    if not dialect.is_postgresql(connection.dialect):
        return False
    return bool(connection.exec_driver_sql(_IS_DIVIDED, (table,)).scalar())


def divide(connection: Connection, table: str) -> None:
    """Make the outbox the first partition of a new table of its name, unless it is divided.

    The rows stay where they are, but they are read once, while writers wait.
    """
    if not dialect.is_postgresql(connection.dialect):
        raise ConfigError("by_day is for PostgreSQL: SQLite has no partitions")
    if (connection.dialect.server_version_info or (0,)) < _SINCE:
        raise ConfigError("by_day needs PostgreSQL 14 or later, to detach a day beside writers")
    if is_divided(connection, table):
        return
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
    connection.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
    if obstacles := _column(connection, _OBSTACLES.format(table=table)):
        raise ConfigError(
            f"{table} cannot be divided by day while it has {', '.join(obstacles)}:"
            " it would stay with the rows of today; drop it, and create it again afterwards"
        )
    indexes = connection.exec_driver_sql(_INDEXES.format(table=table)).all()
    grants = _column(connection, _GRANTS.format(table=table))
    owner = connection.exec_driver_sql(_OWNER.format(table=table)).scalar_one()
    [(sequence, tomorrow)] = connection.exec_driver_sql(
        f"SELECT pg_get_serial_sequence('{table}', 'id'), {_TOMORROW}"
    ).all()
    first = f"{table}_first"
    place, dot, plain = table.rpartition(".")
    place += dot
    statements = [f"ALTER TABLE {table} RENAME TO {plain}_first"]
    statements += [
        f"ALTER INDEX {place}{name} RENAME TO {name[: 63 - len('_first')]}_first"
        for name, _, _ in indexes
    ]
    statements += [
        f"CREATE TABLE {table} (LIKE {first} INCLUDING ALL EXCLUDING INDEXES)"
        " PARTITION BY RANGE (created_at)",
        f"ALTER TABLE {table} OWNER TO {owner}",
    ]
    if sequence is not None:
        statements.append(f"ALTER SEQUENCE {sequence} OWNED BY {table}.id")
    statements += [
        f"CREATE INDEX {name} ON {table}{rest}" for name, rest, is_key in indexes if not is_key
    ]
    for statement in statements + grants:
        connection.exec_driver_sql(statement.replace("%", "%%"))
    _attach(connection, table, first, f"FOR VALUES FROM (MINVALUE) TO ('{tomorrow}')")


def add(connection: Connection, table: str) -> int:
    """Add the days that are missing ahead; return how many. The caller holds `lock_tables`."""
    missing = connection.exec_driver_sql(_MISSING.format(table=table, ahead=DAYS_AHEAD)).all()
    if not missing:
        return 0
    last = connection.exec_driver_sql(_LAST.format(table=table)).one()
    options = f" WITH ({last.options})" if last.options else ""
    for begins, ends, suffix in missing:
        day = f"{table}_d{suffix}"
        # By ATTACH, since PARTITION OF would wait for all who use the outbox.
        connection.exec_driver_sql(
            f"CREATE TABLE {day} (LIKE {table} INCLUDING ALL, PRIMARY KEY (id)){options}"
        )
        _attach(connection, table, day, f"FOR VALUES FROM ('{begins}') TO ('{ends}')")
    return len(missing)


def differences(connection: Connection, table: str) -> Iterator[tuple[str, str, str]]:
    """Yield what is wrong with the days of a table: what it is, how it should be, how it is."""
    name = table
    if defaults := _column(connection, _DEFAULT.format(table=name)):
        yield "default partition", "missing", defaults[0]
    for day in _column(connection, _WITHOUT_KEY.format(table=name)):
        yield f"primary key of {day}", "id", "missing"
    if not connection.exec_driver_sql(_HAS_TODAY.format(table=name)).scalar():
        yield "day of today", "there", "missing"
    last = connection.exec_driver_sql(_LAST.format(table=name)).one()
    if last.days < LEAST_AHEAD:
        yield "days", f"there for {DAYS_AHEAD} days ahead", f"there until {last.ends}"


def passed(connection: Connection, table: str, seconds: float) -> str | None:
    """Return the end of the last day that ended longer ago than `seconds`; None if none did."""
    query = f"SELECT max(ends)::text FROM ({_DAYS.format(table=table)}) AS d WHERE {_OLD}"
    found: str | None = connection.exec_driver_sql(query, (seconds,)).scalar()
    return found


def drop(
    engine: Engine,
    table: str,
    seconds: float,
    is_needed: Callable[[Connection, str], bool],
    may_go_on: Callable[[], bool] = lambda: True,
) -> int:
    """Drop the days that ended longer ago than `seconds`, unless a row of them is needed.

    Returns how many rows they had. Writers and readers of the outbox are not locked out; waits for
    transactions that are in it. One caller at a time; for another there is nothing to do.
    """
    removed = 0
    with engine.connect() as holder:
        lock = f"hashtextextended('conquiet days', '{table}'::regclass::bigint)"
        if not holder.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({lock})").scalar():
            return 0
        with engine.connect() as plain:
            connection = plain.execution_options(isolation_level="AUTOCOMMIT")
            query = f"SELECT name, pending FROM ({_DAYS.format(table=table)}) AS d"
            found = connection.exec_driver_sql(f"{query} WHERE {_OLD}", (seconds,)).all()
            for day in map(Day._make, found):
                if may_go_on() and (day.is_pending or not is_needed(connection, day.name)):
                    how = "FINALIZE" if day.is_pending else "CONCURRENTLY"
                    detach = f"ALTER TABLE {table} DETACH PARTITION {day.name} {how}"
                    connection.exec_driver_sql(detach)
            query = _DETACHED.format(table=table)
            detached = connection.exec_driver_sql(query).all()
        for name, bounds in detached:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
                if is_needed(connection, name):  # it was written to in the last moment
                    _attach(connection, table, name, bounds)
                    continue
                rows = connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one()
                connection.exec_driver_sql(f"DROP TABLE {name}")
            logger.info("dropped %s, with %d rows", name, rows)
            removed += int(rows)
    return removed


def _attach(connection: Connection, table: str, day: str, bounds: str) -> None:
    comment = bounds.replace("'", "''")
    connection.exec_driver_sql(f"COMMENT ON TABLE {day} IS '{comment}'")
    connection.exec_driver_sql(f"ALTER TABLE {table} ATTACH PARTITION {day} {bounds}")


def _column(connection: Connection, query: str) -> list[str]:
    return list(connection.exec_driver_sql(query).scalars())


_IS_DIVIDED = """
SELECT count(*) FROM pg_partitioned_table AS p
  JOIN pg_attribute AS a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
 WHERE p.partrelid = to_regclass(%s) AND p.partstrat = 'r' AND p.partnatts = 1
   AND a.attname = 'created_at'
"""
_TOMORROW = "to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYY-MM-DD 00:00+00')"
_DAYS = """
SELECT c.oid::regclass::text AS name, i.inhdetachpending AS pending, c.reloptions,
       substring(bounds FROM 'FROM \\(''([^'']+)''\\)')::timestamptz AS begins,
       substring(bounds FROM 'TO \\(''([^'']+)''\\)')::timestamptz AS ends
  FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid,
       pg_get_expr(c.relpartbound, c.oid) AS bounds
 WHERE i.inhparent = to_regclass('{table}')
"""
_OLD = "ends <= now() - make_interval(secs => %s)"
# The settings of the last day are those of the next.
_LAST = f"""
SELECT coalesce(extract(epoch FROM d.ends - now()) / 86400, 0) AS days, d.ends::text AS ends,
       array_to_string(d.reloptions, ', ') AS options
  FROM (SELECT 1) AS one LEFT JOIN ({_DAYS}) AS d ON d.ends IS NOT NULL
 ORDER BY d.ends DESC NULLS LAST LIMIT 1
"""
_MISSING = f"""
SELECT to_char(n, 'YYYY-MM-DD 00:00+00'), to_char(n + interval '1 day', 'YYYY-MM-DD 00:00+00'),
       to_char(n, 'YYYYMMDD')
  FROM (SELECT date_trunc('day', now() AT TIME ZONE 'UTC') AS today) AS now,
       generate_series(today, today + interval '{{ahead}} days', '1 day') AS n
 WHERE NOT EXISTS (SELECT 1 FROM ({_DAYS}) AS d
                    WHERE d.ends > n AT TIME ZONE 'UTC'
                      AND coalesce(d.begins <= n AT TIME ZONE 'UTC', true))
"""
_HAS_TODAY = f"""
SELECT min(ends) <= {_TOMORROW}::timestamptz FROM ({_DAYS}) AS d WHERE ends > now()
"""
_DEFAULT = """
SELECT i.inhrelid::regclass::text FROM pg_inherits AS i JOIN pg_partitioned_table AS p
    ON p.partrelid = i.inhparent AND p.partdefid = i.inhrelid
 WHERE i.inhparent = to_regclass('{table}')
"""
_WITHOUT_KEY = f"""
SELECT d.name FROM ({_DAYS}) AS d WHERE NOT EXISTS (
    SELECT 1 FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid
       AND a.attnum = i.indkey[0]
     WHERE i.indrelid = to_regclass(d.name) AND i.indisprimary AND i.indnatts = 1
       AND a.attname = 'id')
"""
# A day that is a table by itself: its comment says where it belongs.
_DETACHED = """
SELECT c.oid::regclass::text, obj_description(c.oid, 'pg_class') FROM pg_class AS c
  JOIN pg_class AS p ON p.oid = to_regclass('{table}') AND p.relnamespace = c.relnamespace
 WHERE c.relkind = 'r' AND NOT c.relispartition
   AND c.relname ~ ('^' || p.relname || '_(first|d[0-9]{{8}})$')
   AND obj_description(c.oid, 'pg_class') LIKE 'FOR VALUES FROM (%%'
"""
_OBSTACLES = """
SELECT 'the trigger ' || tgname FROM pg_trigger
 WHERE tgrelid = to_regclass('{table}') AND NOT tgisinternal
UNION ALL
SELECT 'row level security' FROM pg_class WHERE oid = to_regclass('{table}') AND relrowsecurity
UNION ALL
SELECT DISTINCT 'the view ' || r.ev_class::regclass FROM pg_depend AS d
  JOIN pg_rewrite AS r ON r.oid = d.objid
 WHERE d.classid = 'pg_rewrite'::regclass AND d.refobjid = to_regclass('{table}')
   AND r.ev_class <> d.refobjid
UNION ALL
SELECT 'the foreign key ' || conname FROM pg_constraint
 WHERE contype = 'f' AND to_regclass('{table}') IN (conrelid, confrelid)
UNION ALL
SELECT 'the unique index ' || indexrelid::regclass FROM pg_index
 WHERE indrelid = to_regclass('{table}') AND indisunique AND NOT indisprimary
UNION ALL
SELECT 'the identity column ' || attname FROM pg_attribute
 WHERE attrelid = to_regclass('{table}') AND attidentity <> ''
UNION ALL
SELECT 'the publication ' || p.pubname || ' (of a relay: change back, relay run --from claim)'
  FROM pg_publication_rel AS r JOIN pg_publication AS p ON p.oid = r.prpubid
 WHERE r.prrelid = to_regclass('{table}')
"""
_INDEXES = """
SELECT c.relname, substring(pg_get_indexdef(i.indexrelid) FROM ' USING .*'), i.indisprimary
  FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
 WHERE i.indrelid = to_regclass('{table}') AND i.indisvalid
"""
_OWNER = "SELECT relowner::regrole::text FROM pg_class WHERE oid = to_regclass('{table}')"
_GRANTS = """
SELECT format('GRANT %%s%%s ON {table} TO %%s%%s', g.privilege_type, columns,
              CASE WHEN g.grantee = 0 THEN 'PUBLIC' ELSE g.grantee::regrole::text END,
              CASE WHEN g.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
  FROM (SELECT '' AS columns, relacl AS acl, relowner FROM pg_class
         WHERE oid = to_regclass('{table}')
        UNION ALL
        SELECT format(' (%%I)', attname), attacl, 0 FROM pg_attribute
         WHERE attrelid = to_regclass('{table}') AND NOT attisdropped) AS given,
       LATERAL aclexplode(acl) AS g
 WHERE g.grantee <> relowner
"""
