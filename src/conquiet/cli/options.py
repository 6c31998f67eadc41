"""Options that commands share: one name for one thing, checked, with the same help.

--database URL   PostgreSQL or SQLite; else CONQUIET_DATABASE_URL
--broker URL     Redis, or a cluster; else CONQUIET_BROKER_URL
"""

from __future__ import annotations

import os
import re
import sys
from argparse import (
    SUPPRESS,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
)
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from textwrap import fill
from typing import Any, NamedTuple

from conquiet.cli.progress import Waiting
from conquiet.cli.terminal import OK, USAGE, print_json
from conquiet.config import (
    BROKER,
    BROKER_VARIABLE,
    CONFIG_VARIABLE,
    DATABASE,
    DATABASE_VARIABLE,
    Setting,
)
from conquiet.errors import ConfigError, StoreError

_ANSWER_SECONDS = 30


# --- commands -------------------------------------------------------------------------------


class Verb(NamedTuple):
    """One command of a group, with its help."""

    name: str
    what: str
    """The description; the list of commands shows it up to the first colon or semicolon."""
    examples: tuple[str, ...]
    codes: str
    run: Callable[[Namespace], int]
    more: str = ""
    """Further paragraphs of the help."""


def add_verb(verbs: Any, common: ArgumentParser, verb: Verb) -> ArgumentParser:
    title = "example" if len(verb.examples) == 1 else "examples"
    lines = "\n".join(f"  {example}" for example in verb.examples)
    more = f"\n{verb.more.strip()}\n" if verb.more else ""
    codes = fill(f"exit codes: {verb.codes}", 100, break_long_words=False, break_on_hyphens=False)
    parser: ArgumentParser = verbs.add_parser(
        verb.name,
        help=verb.what.partition(";")[0].partition(":")[0],
        description=f"{verb.what[0].upper()}{verb.what[1:]}.",
        epilog=f"{title}:\n{lines}\n{more}\n{codes}\n",
        parents=[common],
    )
    parser.set_defaults(run=verb.run)
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    return parser


def add_group(commands: Any, name: str, what: str, example: str) -> Any:
    """Add a group of commands, such as `conquiet streams`."""
    group = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example:\n  {example}\n\nexit codes: as each command says in its own --help\n",
    )
    group.set_defaults(run=partial(print_help, group))
    return group.add_subparsers(title="commands", metavar="COMMAND")


def print_help(parser: ArgumentParser, options: Namespace) -> int:
    """Print the help of a group that was named without a command."""
    parser.print_help()
    return USAGE


def add_setting(parser: ArgumentParser, setting: Setting, default: Any = None) -> None:
    """Add the flag of a setting; `default` is the value of the option if it is not given."""
    shown = f" ({setting.default})" if setting.default not in ("", "false") else ""
    text = f"{setting.meaning}{shown}; {setting.variable}".replace("%", "%%")
    if setting.is_switch:
        parser.add_argument(
            setting.flag, action=_Switch, dest=setting.name, default=default, help=text
        )
        return
    parser.add_argument(
        setting.flag, dest=setting.name, default=default, metavar="VALUE", help=text
    )


def add_settings(parser: ArgumentParser, table: Sequence[Setting]) -> None:
    """Add the flags of a table, and those that name its file and print it."""
    parser.add_argument("--config", metavar="FILE", help=f"a TOML file; else {CONFIG_VARIABLE}")
    for setting in table:
        add_setting(parser, setting, SUPPRESS)
    parser.add_argument(
        "--print-settings", action="store_true", help="print the settings it would run with"
    )


def flags_of(options: Namespace, table: Sequence[Setting]) -> dict[str, str]:
    """Return the flags of a table that were given."""
    names = [setting.name for setting in table]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def print_settings(
    table: Sequence[Setting], texts: Mapping[str, str], origins: Mapping[str, str], as_json: bool
) -> int:
    from conquiet.config import list_lines

    if as_json:
        print_json(dict(texts))
    else:
        print("\n".join(list_lines(table, texts, origins)))
    return OK


class _Switch(BooleanOptionalAction):
    """`--ordered` or `--no-ordered`, as the text that a setting reads."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        is_on = option_string is not None and not option_string.startswith("--no-")
        setattr(namespace, self.dest, str(is_on).lower())


def search_here() -> None:
    """Let MODULE:NAME name modules of the current directory."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


# --- values ---------------------------------------------------------------------------------


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def positive_seconds(text: str) -> float:
    value = seconds(text)
    if not value:
        raise ArgumentTypeError("must be more than 0 seconds")
    return value


_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def age(text: str) -> timedelta:
    """Read `90m`, `12h`, `7d`; zero is refused."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None or int(found[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not an age such as 90m, 12h or 7d")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def span(text: str) -> timedelta:
    """Read an age, or 0."""
    return timedelta(0) if text in ("0", "0s") else age(text)


def moment(text: str) -> datetime:
    """Read an age, counted back from now, or a date with or without time, in UTC by default."""
    try:
        return datetime.now(UTC) - age(text)
    except ArgumentTypeError:
        pass
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is neither an age such as 2h nor a time such as 2026-01-31T12:00"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


# --- the database ---------------------------------------------------------------------------


def add_database(
    parser: ArgumentParser, what: str = f"PostgreSQL or SQLite; else {DATABASE_VARIABLE}"
) -> None:
    parser.add_argument("--database", metavar="URL", help=what)


def database_url(given: str | None, *, must_exist: bool = False) -> Any:
    """Return the URL of the database as SQLAlchemy has it; raise if none is given."""
    return _database(given, must_exist)[0]


def _database(given: str | None, must_exist: bool) -> tuple[Any, str]:
    """Return the URL, and the flag or variable that named it."""
    from conquiet import registry

    text, origin = _find(DATABASE, given)
    if not text:
        raise ConfigError(f"no database given: use --database, or set {DATABASE_VARIABLE}")
    url = registry.parse_database(text, origin)
    if must_exist:
        registry.refuse_missing_file(url, origin)
    return url, origin


def is_database_given(given: str | None) -> bool:
    return bool(_find(DATABASE, given)[0])


def _find(setting: Setting, given: str | None) -> tuple[str, str]:
    """Return a setting as it was given, and the flag, variable or file that it came from."""
    from conquiet import config

    found = config.load([setting], {setting.name: given or None}, section="")
    return found.values[setting.name], found.origins[setting.name]


@contextmanager
def database_at(given: str | None) -> Iterator[Any]:
    """Open an engine, and dispose of it at the end."""
    from conquiet.registry import open_database

    url, origin = _database(given, must_exist=True)
    with Reached(url), Waiting(f"asking {url.set(query={}).render_as_string()}"):
        engine = open_database(url, origin)
        try:
            yield engine
        finally:
            engine.dispose()


class Reached:
    """Reports a database that is out of reach in one line, where SQLAlchemy takes five."""

    def __init__(self, url: Any) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        from sqlalchemy.exc import DBAPIError, NoSuchModuleError

        where = self._url.set(query={}).render_as_string()  # a query may hold a password too
        if isinstance(error, DBAPIError):
            raise StoreError(f"{where}: {error.orig}") from error
        if isinstance(error, (NoSuchModuleError, ModuleNotFoundError)):
            raise ConfigError(
                f"{where}: its driver is not installed: pip install 'conquiet[postgres]'"
            ) from error


# --- the broker -----------------------------------------------------------------------------


def add_broker(
    parser: ArgumentParser, what: str = f"Redis, or a cluster; else {BROKER_VARIABLE}"
) -> None:
    parser.add_argument("--broker", metavar="URL", help=what)


def is_broker_given(given: str | None) -> bool:
    return _find(BROKER, given)[1] != "default"


def _broker(given: str | None) -> tuple[str, str]:
    """Return the URL of the broker, and the flag or variable that named it; raise if none did."""
    url, origin = _find(BROKER, given)
    if origin == "default":
        raise ConfigError(f"no broker given: use --broker, or set {BROKER_VARIABLE}")
    return url, origin


@contextmanager
def redis_at(given: str | None) -> Iterator[Any]:
    """Open a client of the server, or of the cluster that it belongs to; close it at the end."""
    from conquiet.config import require
    from conquiet.registry import CONNECT_SECONDS, join_cluster, open_redis
    from conquiet.secret import mask

    redis = require("redis", "redis")
    url, origin = _broker(given)
    waits: Any = {"connect_seconds": CONNECT_SECONDS, "answer_seconds": _ANSWER_SECONDS}
    client = open_redis(url, origin, **waits)
    where = mask(url)
    try:
        with Waiting(f"asking {where}"), client, join_cluster(client, url, **waits) as whole:
            yield whole
    except redis.AuthenticationError as error:
        raise StoreError(f"{where}: {error}; correct user and password in {origin}") from error
    except redis.exceptions.NoPermissionError as error:
        raise StoreError(f"{where}: {error}; its ACL must allow this") from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise StoreError(f"{where}: {error}; is it running, and is {origin} right?") from error
    except redis.RedisError as error:
        raise StoreError(f"{where}: {error}") from error
