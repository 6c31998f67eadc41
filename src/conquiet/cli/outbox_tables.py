"""Which tables `conquiet outbox schema|verify|migrate` are about: inbox and outbox, or events."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from conquiet.errors import ConfigError

CATALOG_VARIABLE = "CONQUIET_OUTBOX_CATALOG"


class Tables(NamedTuple):
    """What is done about them."""

    ddl: Callable[[str], str]
    """The statements, for a dialect."""
    verify: Callable[[Any], list[Any]]
    """What differs in the database of a URL."""
    migrate: Callable[[Any], None]


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--table", metavar="NAME", help="the outbox, or outbox_events (CONQUIET_OUTBOX_TABLE)"
    )
    parser.add_argument("--inbox-table", metavar="NAME", help="the inbox (processed_messages)")
    parser.add_argument("--no-inbox", action="store_true", help="leave the inbox out")
    parser.add_argument(
        "--catalog",
        metavar="MODULE:NAME",
        help=f"of outbox_events, whose enums it has ({CATALOG_VARIABLE})",
    )
    parser.add_argument(
        "--ordered",
        action="store_true",
        help="of outbox_events: with the index that relays need to keep an order",
    )
    parser.add_argument(
        "--no-trigger",
        action="store_true",
        help="of outbox_events: without the trigger that keeps events as they are",
    )


def tables_of(options: Namespace) -> Tables:
    """Those that the options name."""
    from conquiet.relay.opening import has_events_layout
    from conquiet.relay.settings import setting

    table = options.table or setting("table")
    try:
        if has_events_layout(table):
            return _events(table, options)
        return _generic(table, options)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install 'conquiet[postgres]'"
        ) from error


def _generic(table: str, options: Namespace) -> Tables:
    from conquiet.sql import schema

    if options.catalog:
        raise ConfigError(f"--catalog is for --table outbox_events; the table {table} has no enums")
    names: dict[str, Any] = {"outbox": table}
    if options.no_inbox:
        names["inbox"] = None
    elif options.inbox_table:
        names["inbox"] = options.inbox_table
    return Tables(
        partial(schema.ddl, **names),
        partial(schema.verify, **names),
        partial(schema.migrate, **names),
    )


def _events(table: str, options: Namespace) -> Tables:
    from conquiet.events import schema
    from conquiet.relay.settings import setting

    ordered = options.ordered or setting("ordered")
    named: dict[str, Any] = {"catalog": _catalog(options), "table": table, "ordered": ordered}
    guarded = {**named, "append_only": not options.no_trigger}
    return Tables(
        partial(schema.ddl, **guarded),
        partial(schema.verify, **named),
        partial(schema.migrate, **guarded),
    )


def _catalog(options: Namespace) -> Any:
    from conquiet.events import Catalog
    from conquiet.processes.target import resolve

    name = options.catalog or os.environ.get(CATALOG_VARIABLE)
    if not name:
        raise ConfigError(
            "the enums of outbox_events are those of a catalog: name yours with --catalog"
            f" module:NAME or {CATALOG_VARIABLE}, such as marketplace.catalog:CATALOG"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = resolve(name)
    if not isinstance(found, Catalog):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a conquiet.events.Catalog")
    return found
