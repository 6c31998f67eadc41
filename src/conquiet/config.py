"""Settings from flags, environment and a TOML file; URLs of sinks; missing extras.

    flag  >  variable of the environment  >  line of the file that CONQUIET_CONFIG names  >  default

A table of `Setting` rows is read by `load`, printed by `--print-settings` and shown in the docs.
This module needs nothing but the standard library; `conquiet.registry` opens what a URL names.
"""

from __future__ import annotations

import importlib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from conquiet.errors import ConfigError
from conquiet.secret import mask

CONFIG_VARIABLE = "CONQUIET_CONFIG"
DATABASE_VARIABLE = "CONQUIET_DATABASE_URL"
BROKER_VARIABLE = "CONQUIET_BROKER_URL"
LOCAL_BROKER = "redis://localhost:6379/0"
DATABASES = ("postgresql", "postgres", "sqlite")
EVENTS_TABLE = "outbox_events"
"""The name, in any schema, of a table with the locked layout of domain events."""
TABLE_NAME = re.compile(r"(?:[a-z_][a-z0-9_]{0,47}\.)?[a-z_][a-z0-9_]{0,47}")
"""A table, with its schema if it has one; a name that needs no quotes."""

_LONGEST_TIMEOUT_SECONDS = 3600


# --- packages -------------------------------------------------------------------------------


def require(module: str, extra: str) -> Any:
    """Import an optional module; if it is missing, name the command that installs it.

    >>> require("json", "redis").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(error, extra) from error


class MissingExtra(ConfigError, ModuleNotFoundError):
    """A package is not installed; names the command that installs it."""


def missing_extra(error: ImportError, extra: str | None) -> MissingExtra:
    """Return the error for an import that failed because an extra, or a package, is missing."""
    name = error.name or str(error)
    package = name if extra is None else f"'conquiet[{extra}]'"
    made = MissingExtra(f"{name} is not installed: pip install {package}")
    made.name = error.name
    return made


# --- URLs -----------------------------------------------------------------------------------


def explain(error: BaseException, url: str) -> str:
    """Say why a URL was refused; a library's own message may quote a part of the password."""
    if "@" in url and isinstance(error, ValueError):
        return (
            "it cannot be parsed; percent-encode special characters in the password: / # ? as %2F"
            " %23 %3F"
        )
    return str(error)


class Url:
    """The URL of a sink or source, such as `kafka://host:9092/orders?timeout=5`.

    Each method removes its setting from the query; `end` refuses what is left, and names those that
    were asked for.
    """

    def __init__(self, text: str, origin: str = "the URL of the sink") -> None:
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise ConfigError(f"{origin}: {explain(error, text)}") from None
        self._origin = f"{origin} {parts.scheme}:{'//' if '://' in text else ''}…"
        self.place = parts.netloc
        self.path = unquote(parts.path.strip("/"))
        self._base = text.partition("?")[0]
        self._query: dict[str, str] = {}
        self._known: list[str] = []
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in self._query:
                raise ConfigError(f"{self._origin} has {name!r:.60} twice; give it once")
            self._query[name] = value

    @property
    def rest(self) -> str:
        """The URL without the settings that were removed."""
        return f"{self._base}?{urlencode(self._query)}" if self._query else self._base

    def seconds(self, default: float, name: str = "timeout") -> float:
        text = self._take(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name}={text!r:.40}: must be a number of seconds") from None

    def count(self, name: str, default: int) -> int:
        text = self._take(name, str(default))
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r:.40}: must be a whole number")
        return int(text)

    def text(self, name: str) -> str | None:
        return self._take(name) or None

    def flag(self, name: str, default: bool) -> bool:
        text = self._take(name, "true" if default else "false")
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={text!r:.40}: choose true or false")
        return text == "true"

    def names(self, name: str) -> list[str]:
        return [each for each in self._take(name).split(",") if each]

    def _take(self, name: str, default: str = "") -> str:
        self._known.append(name)
        return self._query.pop(name, default)

    def others(self) -> dict[str, str]:
        taken, self._query = self._query, {}
        return taken

    def end(self) -> None:
        for name in self._query:
            raise ConfigError(
                f"{self._origin} has an unknown setting {name!r:.60}; choose from"
                f" {', '.join(self._known)}"
            )


def check_timeout(timeout: float) -> float:
    """Return a timeout in seconds, or raise if it is none."""
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST_TIMEOUT_SECONDS:
        raise ConfigError(
            f"timeout={timeout!r}: must be a number of seconds above 0,"
            f" {_LONGEST_TIMEOUT_SECONDS} at most"
        )
    return float(timeout)


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# --- settings -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its names, its default, the values it allows, its meaning."""

    name: str
    variable: str
    default: str
    read: Callable[[str], Any]
    """Converts a text; raises ValueError."""
    allowed: str
    meaning: str
    is_url: bool = False
    section: str = "relay"
    """The table of the TOML file that holds it."""
    empty: Any = ""
    """The value if neither a text nor a default is given."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.read is read_boolean

    def show(self, text: str) -> str:
        return mask(text) if self.is_url else text


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings of a table: values, the texts they came from, where each was found."""

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    """Without secrets."""
    origins: Mapping[str, str]
    """A flag, a variable, a line of the file, or `default`."""

    def given(self) -> dict[str, Any]:
        """Return the values that are no defaults."""
        return {name: value for name, value in self.values.items() if self.is_given(name)}

    def is_given(self, name: str) -> bool:
        return self.origins[name] != "default"


def list_lines(
    table: Sequence[Setting], texts: Mapping[str, str], origins: Mapping[str, str]
) -> list[str]:
    """Return the lines that are printed and logged, one per setting: value and origin."""
    width = max(len(setting.variable) for setting in table)
    return [
        f"{setting.variable:<{width}} = {texts[setting.name]}  ({origins[setting.name]})"
        for setting in table
    ]


def load(
    table: Sequence[Setting],
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | None = None,
    *,
    section: str = "relay",
    required: Collection[str] = (),
) -> Loaded:
    """Read a table of settings: flags, else the environment, else a TOML file, else defaults.

    Unknown names in `section` of the file are refused.

    >>> load([LOG_LEVEL], {"log_level": "error"}, environ={}).values
    {'log_level': 'error'}
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(CONFIG_VARIABLE)
    sections = {setting.section for setting in table}
    of_file = {name: _read_section(Path(file), name) if file else {} for name in sections}
    if section in of_file:
        known = [setting.name for setting in table if setting.section == section]
        _refuse_unknown(of_file[section], known, section, file)
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    origins: dict[str, str] = {}
    for setting in table:
        text, origin = _find(setting, flags or {}, environ, of_file[setting.section], file)
        values[setting.name] = _convert(setting, text, origin, setting.name in required)
        texts[setting.name] = setting.show(text)
        origins[setting.name] = origin
    return Loaded(values, texts, origins)


def read(
    setting: Setting,
    given: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Read one setting: `given`, else the environment, else the file, else its default.

    >>> read(MAX_ATTEMPTS, environ={"CONQUIET_OUTBOX_MAX_ATTEMPTS": "3"})
    3
    """
    environ = os.environ if environ is None else environ
    file = environ.get(CONFIG_VARIABLE)
    of_file = _read_section(Path(file), setting.section) if file else {}
    text, origin = _find(setting, {setting.name: given}, environ, of_file, file)
    return _convert(setting, text, origin, False)


def _find(
    setting: Setting,
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    of_file: Mapping[str, Any],
    file: str | None,
) -> tuple[str, str]:
    flag = flags.get(setting.name)
    if flag is not None:
        return flag, setting.flag
    if environ.get(setting.variable):  # compose files set variables to nothing
        return environ[setting.variable], setting.variable
    if setting.name in of_file:
        return _text_of(of_file[setting.name], setting.name, file), f"{setting.name} of {file}"
    return setting.default, "default"


def _convert(setting: Setting, text: str, origin: str, required: bool) -> Any:
    if not text and not setting.default:
        if required:
            raise ConfigError(
                f"{setting.variable} is not set: {setting.meaning}, {setting.allowed};"
                f" or give {setting.flag}"
            )
        return setting.empty
    try:
        return setting.read(text)
    except ValueError:
        where = setting.variable if origin == "default" else origin
        raise ConfigError(f"{where}: {mask(text)!r:.100} is not {setting.allowed}") from None


def _read_section(path: Path, section: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    lines = found.get(section, {})
    if not isinstance(lines, dict):
        raise ConfigError(f"{path}: {section} must be a table, as in [{section}]")
    return lines


def _refuse_unknown(
    lines: Mapping[str, Any], known: Sequence[str], section: str, file: str | None
) -> None:
    for name, value in lines.items():
        if name not in known:
            raise ConfigError(
                f"{file}: [{section}] has no setting {name!r}; choose from {', '.join(known)}"
            )
        _text_of(value, name, file)


def _text_of(value: object, name: str, file: str | None) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(f"{file}: {name} must be text, a number, true or false")


# --- values ---------------------------------------------------------------------------------


def whole(least: int, most: int) -> tuple[Callable[[str], int], str]:
    """Return a reader of whole numbers, and the words for what it allows."""

    def read_whole(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return read_whole, f"a whole number from {least} to {most}"


def seconds(least: float, most: float) -> tuple[Callable[[str], float], str]:
    """Return a reader of seconds, and the words for what it allows."""

    def read_seconds(text: str) -> float:
        value = float(text)
        if not text.isascii() or not least <= value <= most:
            raise ValueError
        return value

    return read_seconds, f"a number of seconds from {least:g} to {most:g}"


def choice(*words: str) -> tuple[Callable[[str], str], str]:
    """Return a reader of one of several words, and the words for what it allows."""

    def read_choice(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return read_choice, f"{', '.join(words[:-1])} or {words[-1]}"


def read_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError
    return text.lower() in ("true", "1", "yes", "on")


def read_text(text: str) -> str:
    if not text or "\0" in text or len(text) > 255:
        raise ValueError
    return text


def read_address(text: str) -> tuple[str, int] | None:
    """Read HOST:PORT; None for `off`."""
    if text == "off":
        return None
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port is None or parts.path or "@" in text:
        raise ValueError
    return parts.hostname, parts.port


def _read_database(text: str) -> str:
    if text.partition(":")[0].partition("+")[0] not in DATABASES or "://" not in text:
        raise ValueError
    return text


def _read_broker(text: str) -> str:
    if "://" not in text:
        raise ValueError
    return text


def _read_table(text: str) -> str:
    if not TABLE_NAME.fullmatch(text):
        raise ValueError
    return text


def has_events_layout(table: str) -> bool:
    """Return whether a table has the locked layout of domain events, by its name."""
    return table.rpartition(".")[2] == EVENTS_TABLE


# --- settings that several commands share ---------------------------------------------------

DATABASE = Setting(
    "database", DATABASE_VARIABLE, "", _read_database,
    "postgresql://USER@HOST/NAME or sqlite:///FILE", "the database with the outbox", True,
)  # fmt: skip
BROKER = Setting(
    "broker", BROKER_VARIABLE, LOCAL_BROKER, _read_broker, "a URL such as redis://HOST:PORT/0",
    "the broker that `redis:` in a URL refers to", True,
)  # fmt: skip
TABLE = Setting(
    "table", "CONQUIET_OUTBOX_TABLE", "outbox", _read_table,
    "a-z, 0-9 and _, with schema if need be, as in sales.outbox",
    "the table to publish; `outbox_events` has the layout of domain events",
)  # fmt: skip
MAX_ATTEMPTS = Setting(
    "max_attempts", "CONQUIET_OUTBOX_MAX_ATTEMPTS", "10", *whole(1, 1_000),
    "failures of one row before it is parked; an outage costs none",
)  # fmt: skip
HISTORY = Setting(
    "history", "CONQUIET_HISTORY", "true", read_boolean, "true or false",
    "keep what handlers and relays did in each minute, for a day, for the dashboard",
)  # fmt: skip
ORDERED = Setting(
    "ordered", "CONQUIET_OUTBOX_ORDERED", "false", read_boolean, "true or false",
    "keep the order of each key, by one relay at a time; a stuck key waits alone",
)  # fmt: skip
LOG_FORMAT = Setting(
    "log_format", "CONQUIET_LOG_FORMAT", "console", *choice("console", "json"),
    "the format of log lines, on stderr",
)  # fmt: skip
LOG_LEVEL = Setting(
    "log_level", "CONQUIET_LOG_LEVEL", "info", *choice("debug", "info", "warning", "error"),
    "the lowest level that is logged; each published event is an info",
)  # fmt: skip
