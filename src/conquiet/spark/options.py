"""Parse the options of the formats: unknown names, numbers, flags, times, and where a server is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from conquiet.errors import ConfigError

SET_BY_SPARK = frozenset(("path", "checkpointlocation", "queryname"))
"""Options that Spark itself adds to those of a query."""


class Option(NamedTuple):
    """An option as the documentation lists it."""

    default: str
    meaning: str


DATABASE = "the database", "postgresql://USER@HOST/NAME or sqlite:////PATH/FILE"
"""How messages call the server of an option `url`, and what the URL may be."""

URL_FILE = Option("", "a file, on driver and executors, that holds the URL")
URL_ENV = Option("", "an environment variable, on driver and executors, that holds the URL")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: a URL, or the file or variable of each host that holds it.

    The executors get this and never a connection; with `url_file` or `url_env` they get no secret
    either. Spark itself hides an option named `url` in its plans and pages.
    """

    url: str | None = field(default=None, repr=False)
    url_file: str | None = None
    url_env: str | None = None
    server: str = "the database"

    def resolve(self) -> str:
        """Return the URL; a file or variable is that of the host on which this runs."""
        if self.url:
            return self.url
        if self.url_env:
            found = os.environ.get(self.url_env, "")
            where = f"the environment variable {self.url_env} of this host"
        else:
            found, where = self._read_file(), f"the file {self.url_file} of this host"
        if not found.strip():
            raise ConfigError(
                f"{where} should hold the URL of {self.server}, and is missing or empty"
            )
        return found.strip()

    def _read_file(self) -> str:
        try:
            return Path(str(self.url_file)).read_text()
        except OSError as error:
            raise ConfigError(f"urlFile cannot be read on this host: {error}") from error


class Options:
    """Read the options of one format; an option that the format does not have is an error.

    >>> options = Options({"minpartitions": "4"}, {"minPartitions": Option("1", "")}, "conquiet")
    >>> options.whole("minPartitions")
    4
    """

    def __init__(
        self,
        given: Mapping[str, str],
        known: Mapping[str, Option],
        format: str,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self._given = {str(name).lower(): str(value) for name, value in given.items()}
        spelled = {name.lower(): name for name in known}
        for name in self._given:
            if name in spelled or name in ignored:
                continue
            near = get_close_matches(name, spelled, 1)
            advice = f"did you mean {spelled[near[0]]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"{format} has no option {name!r:.60}; {advice}")

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._given.get(name.lower(), default)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the items of a list with commas, without empty ones."""
        items = self._given.get(name.lower(), "").split(",")
        return tuple(item.strip() for item in items if item.strip())

    def whole(self, name: str, least: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ConfigError(f"{name}={text!r:.60}: must be a whole number, {least} or more")
        return number

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        try:
            seconds = default if text is None else float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise ConfigError(f"{name}={text!r:.60}: must be a number of seconds")
        return seconds

    def flag(self, name: str, default: bool) -> bool:
        text = self._given.get(name.lower(), str(default)).lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={text!r:.60}: must be true or false")
        return text == "true"

    def moment(self, name: str) -> datetime | None:
        """Return a time in UTC; a time without a zone is an error."""
        text = self.text(name)
        if text is None:
            return None
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"{name}={text!r:.60}: write a time as 2026-01-31T00:00:00Z"
            ) from None
        if moment.tzinfo is None:
            raise ConfigError(f"{name}={text!r:.60}: say in which zone, as 2026-01-31T00:00:00Z")
        return moment.astimezone(UTC)

    def address(self, server: str, example: str) -> Address:
        """Return where the server is, by the options `url`, `urlFile` and `urlEnv`."""
        found = (self.text("url"), self.text("urlFile"), self.text("urlEnv"))
        if sum(map(bool, found)) != 1:
            raise ConfigError(
                f"say where {server} is, by one of the options url ({example}),"
                " urlFile (a file that holds it) and urlEnv (a variable that holds it)"
            )
        return Address(*found, server=server)
