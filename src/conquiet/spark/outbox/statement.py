"""Build the SQL that reads a range of an outbox, with the same columns for every table.

    entry_id, created_at, stream, key, event_id, type, source, subject, time, content_type,
    attributes (a JSON object of those that have no column), data

`outbox_events` has aggregate_type instead of attributes, unless `delivery` asks for more.

Every value is text, except data: ADBC guesses the types of SQLite from the rows it sees first, so
nothing may be NULL there. An empty text means that there is no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from conquiet.spark.outbox.options import OutboxOptions
from conquiet.sql.log import Position
from conquiet.sql.schema import split_name

DOMAIN_SOURCE = "/outbox_events"
"""The attribute `source` of domain events, as the relay sets it."""

_COLUMNED = ("id", "type", "source", "subject", "time", "datacontenttype")


@dataclass(frozen=True)
class RowRange:
    """A range of rows for one task, by positions of the log or by ids; bounds may be open."""

    after: Position | None = None
    upto: Position | None = None
    above: str | None = None
    """Only ids above this one."""
    to: str | None = None
    """Only ids up to this one."""
    rows: int | None = None
    """How many rows it must have, if that is known."""


def statement(options: OutboxOptions, row_range: RowRange, *, postgresql: bool) -> str:
    """Return the query for a range; only numbers, quoted texts and checked names go into it."""
    where = [*_bounds(options, row_range, postgresql), *_filters(options, postgresql)]
    columns = _columns(options, postgresql)
    # A range of ids must be read by the index on ids: the one on (xid, id) would be read from its
    # beginning for each of them.
    by_position = row_range.above is None and row_range.to is None and postgresql
    order = "xid, id" if by_position and not options.has_domain_events else "id"
    shown = ", ".join(f"{expression} AS {name}" for name, expression in columns.items())
    return (
        f"SELECT {shown} FROM {_table(options)} AS o"
        f"{' WHERE ' if where else ''}{' AND '.join(where)} ORDER BY {order}"
    )


def _table(options: OutboxOptions) -> str:
    schema, table = split_name(options.table)
    return f"{schema}.{table}" if schema else table


# --- columns --------------------------------------------------------------------------------
def _columns(options: OutboxOptions, postgresql: bool) -> dict[str, str]:
    if options.has_domain_events:
        return _domain_columns(options, postgresql)
    return _generic_columns(options, postgresql)


def _generic_columns(options: OutboxOptions, postgresql: bool) -> dict[str, str]:
    def attribute(name: str) -> str:
        if postgresql:
            return f"o.attributes->>'{name}'"
        return f"coalesce(json_extract(o.attributes, '$.{name}'), '')"

    names = ", ".join(f"'$.{name}'" for name in _COLUMNED)
    rest = (
        f"(o.attributes - '{{{','.join(_COLUMNED)}}}'::text[])"
        if postgresql
        else f"json_remove(o.attributes, {names})"
    )
    return {
        "entry_id": "o.xid::text || '-' || o.id" if postgresql else "'0-' || o.id",
        "created_at": "o.created_at",
        "stream": "o.topic",
        "key": "o.key" if postgresql else "coalesce(o.key, '')",
        "event_id": "o.event_id",
        "type": "o.event_type",
        **{name: attribute(name) for name in ("source", "subject", "time")},
        "content_type": attribute("datacontenttype"),
        "attributes": _with_delivery(rest, options, postgresql, "attempts"),
        "data": "o.data",
    }


def _domain_columns(options: OutboxOptions, postgresql: bool) -> dict[str, str]:
    text = "::text" if postgresql else ""
    rest = (
        "jsonb_build_object('specversion', '1.0', 'aggregatetype', o.aggregate_type)"
        if postgresql
        else "json_object('specversion', '1.0', 'aggregatetype', o.aggregate_type)"
    )
    columns = {
        "entry_id": f"o.id{text}",
        "created_at": "o.created_at",
        "key": f"o.aggregate_id{text}",
        "type": f"o.event_type{text}",
        "data": f"o.payload_json{text}",
    }
    if not options.delivery:  # an object per row would cost the database more than the rest
        return {**columns, "aggregate_type": f"o.aggregate_type{text}"}
    return {**columns, "attributes": _with_delivery(rest, options, postgresql, "attempt_count")}


def _with_delivery(rest: str, options: OutboxOptions, postgresql: bool, attempts: str) -> str:
    """Add what the relay wrote into a row as attributes; a NULL is no attribute."""
    if options.delivery and postgresql:
        moment = """to_char(o.published_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
        rest = (
            f"({rest} || jsonb_strip_nulls(jsonb_build_object('attempts', o.{attempts},"
            f" 'lasterror', o.last_error, 'publishedat', {moment})))"
        )
    elif options.delivery:
        moment = "strftime('%Y-%m-%dT%H:%M:%fZ', o.published_at)"
        rest = (
            f"json_patch({rest}, json_object('attempts', o.{attempts},"
            f" 'lasterror', o.last_error, 'publishedat', {moment}))"
        )
    return f"{rest}::text" if postgresql else rest


# --- conditions -----------------------------------------------------------------------------
def _bounds(options: OutboxOptions, row_range: RowRange, postgresql: bool) -> list[str]:
    where = []
    if row_range.after is not None:
        where.append(_beyond(row_range.after, ">", postgresql))
    if row_range.upto is not None:
        where.append(_beyond(row_range.upto, "<=", postgresql))
    if row_range.above is not None:
        where.append(f"o.id > {_id(row_range.above, options)}")
    if row_range.to is not None:
        where.append(f"o.id <= {_id(row_range.to, options)}")
    return where


def _beyond(position: Position, sign: str, postgresql: bool) -> str:
    if postgresql:  # row-wise, so that the index on (xid, id) is entered at the position
        return f"(o.xid, o.id) {sign} ('{position.xid:d}'::xid8, {position.id:d})"
    return f"o.id {sign} {position.id:d}"


def _id(value: str, options: OutboxOptions) -> str:
    return quote_text(value) if options.has_domain_events else f"{int(value):d}"


def _filters(options: OutboxOptions, postgresql: bool) -> list[str]:
    where = []
    if options.topic is not None and not options.has_domain_events:
        where.append(f"o.topic = {quote_text(options.topic)}")
    if options.types:
        kinds = ", ".join(map(quote_text, options.types))
        where.append(f"o.event_type{'::text' if postgresql else ''} IN ({kinds})")
    if options.since is not None:
        where.append(f"o.created_at >= {_moment(options.since, postgresql)}")
    if options.until is not None:
        where.append(f"o.created_at < {_moment(options.until, postgresql)}")
    return where


def _moment(moment: datetime, postgresql: bool) -> str:
    if postgresql:
        return f"timestamptz '{moment.isoformat()}'"
    # SQLite compares texts, and some of them end with the seconds: '…:00' < '…:00.000000'.
    seconds = moment.strftime("%Y-%m-%d %H:%M:%S")
    return f"'{seconds}.{moment.microsecond:06d}'" if moment.microsecond else f"'{seconds}'"


def quote_text(text: str) -> str:
    """Return a literal of SQL; COPY takes no parameters."""
    return "'" + text.replace("\0", "").replace("'", "''") + "'"
