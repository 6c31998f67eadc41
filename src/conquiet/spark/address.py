"""Address: where a database is, as an option of a query says it.

What travels to the executors is the address and never a connection; with `urlFile` or `urlEnv` it
holds no secret either. Spark itself hides an option named `url` in its plans and pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from conquiet.errors import ConfigError
from conquiet.sql import dialect
from conquiet.sql.tls import verified_text

_WANTED = "postgresql://USER@HOST/NAME or sqlite:////PATH/FILE"


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a database, or the file or variable of each host that holds it."""

    url: str | None = field(default=None, repr=False)
    url_file: str | None = None
    url_env: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Address:
        """From the options `url`, `urlFile` and `urlEnv`, of which one is needed."""
        known = {str(name).lower(): value for name, value in options.items()}
        given = cls(known.get("url"), known.get("urlfile"), known.get("urlenv"))
        if sum(bool(item) for item in (given.url, given.url_file, given.url_env)) != 1:
            raise ConfigError(
                f"say where the database is, by one of the options url ({_WANTED}),"
                " urlFile (a file that holds it) and urlEnv (a variable that holds it)"
            )
        return given

    def resolve(self) -> Database:
        """The database itself; file and variable are those of this host."""
        if self.url:
            return Database.at(self.url)
        if self.url_env:
            found = os.environ.get(self.url_env, "")
            where = f"the environment variable {self.url_env} of this host"
        else:
            found, where = self._from_file(), f"the file {self.url_file} of this host"
        if not found.strip():
            raise ConfigError(f"{where} should hold the URL of a database, and is missing or empty")
        return Database.at(found.strip())

    def _from_file(self) -> str:
        try:
            return Path(str(self.url_file)).read_text()
        except OSError as error:
            raise ConfigError(f"urlFile cannot be read on this host: {error}") from error


@dataclass(frozen=True, slots=True)
class Database:
    """A PostgreSQL, by the URL that libpq takes, or the file of a SQLite."""

    url: str = field(repr=False)
    """For SQLAlchemy and psycopg."""
    file: str | None
    """Of a SQLite database, absolute."""
    shown: str
    """The URL without its password, and without a query that may hold one."""

    @classmethod
    def at(cls, url: str) -> Database:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):  # a port that is no number, which may be a password
            raise ConfigError(f"the option url is no URL of a database; write {_WANTED}") from None
        if "@" in (parsed.host or ""):  # the end of a password, which no message may show
            raise ConfigError("the option url is no URL: write @ in a user or password as %40")
        kind = parsed.get_backend_name()
        shown = dialect.shown(parsed)
        if kind in ("postgresql", "postgres"):
            _, _, rest = url.partition("://")  # as written: libpq decodes by its own rules
            return cls(verified_text(f"postgresql://{rest}"), None, shown)
        if kind != "sqlite":
            raise ConfigError(f"{shown}: this works on PostgreSQL and SQLite; write {_WANTED}")
        file = (parsed.database or "").removeprefix("file:").partition("?")[0]
        if not file or file == ":memory:" or "mode=memory" in url:
            raise ConfigError(f"{shown}: Spark's processes share no memory; name a SQLite file")
        path = os.path.abspath(unquote(urlsplit(file).path) if parsed.query.get("uri") else file)
        return cls(f"sqlite:///{path}", path, shown)

    @property
    def is_postgresql(self) -> bool:
        return self.file is None
