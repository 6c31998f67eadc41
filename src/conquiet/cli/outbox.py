"""`conquiet outbox`: the tables of inbox and outbox, and the rows in them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from conquiet.cli import outbox_rows, outbox_tables
from conquiet.cli.servers import Reached, database_url
from conquiet.cli.terminal import FAILED, OK, green, print_json, red
from conquiet.cli.verbs import add_group

_SCHEMA_EPILOG = """\
examples:
  conquiet outbox schema --dialect postgresql
  conquiet outbox schema --dialect sqlite --table sales_outbox --no-inbox
  conquiet outbox schema --dialect postgresql --table outbox_events --catalog shop.events:CATALOG

exit codes: 0 printed, 2 wrong usage or settings
"""
_VERIFY_EPILOG = """\
example:
  conquiet outbox verify --url postgresql://app@localhost/shop && echo fits

exit codes: 0 the tables fit, 1 they differ or the database is out of reach, 2 wrong usage
"""
_MIGRATE_EPILOG = """\
examples:
  conquiet outbox migrate --url postgresql://app@localhost/shop
  conquiet outbox migrate --url sqlite:///shop.sqlite
  conquiet outbox migrate --table outbox_events --catalog shop.events:CATALOG

Safe to run again, and by several at once.

exit codes: 0 the tables are up to date, 1 it failed, 2 wrong usage or settings
"""


def register(commands: Any, common: ArgumentParser) -> None:
    verbs = add_group(
        commands,
        "outbox",
        "the tables of inbox and outbox, and what waits or is parked in them",
        "conquiet outbox status --url postgresql://app@localhost/shop",
    )
    schema = verbs.add_parser(
        "schema",
        help="print the statements that create the tables",
        description="Print the statements that create the tables, for migrations of your own.",
        epilog=_SCHEMA_EPILOG,
        parents=[common],
    )
    schema.add_argument(
        "--dialect", required=True, choices=["postgresql", "sqlite"], help="of which database"
    )
    schema.set_defaults(run=_schema)
    verify = verbs.add_parser(
        "verify",
        help="compare a database with what conquiet needs",
        description="Say what differs between the tables of a database and what conquiet needs.",
        epilog=_VERIFY_EPILOG,
        parents=[common],
    )
    verify.set_defaults(run=_verify)
    migrate = verbs.add_parser(
        "migrate",
        help="create the tables, or bring them up to date",
        description="Create the tables, or bring those of an older conquiet up to date.",
        epilog=_MIGRATE_EPILOG,
        parents=[common],
    )
    migrate.set_defaults(run=_migrate)
    for parser in (verify, migrate):
        parser.add_argument(
            "--url", help="the database, as SQLAlchemy names it; else CONQUIET_DATABASE_URL"
        )
    for parser in (schema, verify, migrate):
        outbox_tables.add_options(parser)
        parser.add_argument("--json", action="store_true", help="answer in JSON")
    outbox_rows.register(verbs, common)


def _schema(options: Namespace) -> int:
    text = outbox_tables.tables_of(options).ddl(options.dialect)
    if options.json:
        print_json({"dialect": options.dialect, "ddl": text})
    else:
        print(text, end="")
    return OK


def _verify(options: Namespace) -> int:
    tables = outbox_tables.tables_of(options)
    url = database_url(options.url, must_exist=True)
    with Reached(url):
        differences = tables.verify(url)
    if options.json:
        found = [
            {"table": item.table, "what": item.what, "expected": item.expected, "found": item.found}
            for item in differences
        ]
        print_json({"ok": not found, "differences": found})
    elif differences:
        for item in differences:
            print(red(str(item), sys.stdout))
        print("conquiet outbox migrate brings the tables up to date", file=sys.stderr)
    else:
        print(green("the tables are as conquiet needs them", sys.stdout))
    return FAILED if differences else OK


def _migrate(options: Namespace) -> int:
    tables = outbox_tables.tables_of(options)
    url = database_url(options.url)
    with Reached(url):
        tables.migrate(url)
    if options.json:
        print_json({"ok": True})
    else:
        print(green("the tables are up to date", sys.stdout))
    return OK
