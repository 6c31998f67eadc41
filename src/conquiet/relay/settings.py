"""Settings of the relay process: by flag, environment or file, the first that says so.

One table, `SETTINGS`, is what reads them, what prints them and what the documentation shows.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conquiet.errors import ConfigError
from conquiet.events.ttl import MOST_TTL_HOURS, TTL_HOURS, TTL_VARIABLE
from conquiet.relay.masked import masked

CONFIG_VARIABLE = "CONQUIET_CONFIG"
SECTION = "relay"
"""The table of the file that is ours; others may use the rest of it."""

DATABASES = ("postgresql", "postgres", "sqlite")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: where it comes from, what is allowed, what it means."""

    name: str
    variable: str
    default: str
    read: Callable[[str], Any]
    """The value of a text; raises ValueError."""
    allowed: str
    meaning: str
    is_url: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _whole(least: int, most: int) -> tuple[Callable[[str], int], str]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return read, f"a whole number from {least} to {most}"


def _choice(*words: str) -> tuple[Callable[[str], str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return read, " or ".join(words)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError
    return text.lower() in ("true", "1", "yes", "on")


def _database(text: str) -> str:
    if text.partition(":")[0].partition("+")[0] not in DATABASES or "://" not in text:
        raise ValueError
    return text


def _sink(text: str) -> str:
    from conquiet.relay.opening import SINKS, scheme_of

    if scheme_of(text) not in SINKS:
        raise ValueError
    return text


def _word(text: str) -> str:
    if not text or "\0" in text or len(text) > 255:
        raise ValueError
    return text


def _table(text: str) -> str:
    if not re.fullmatch(r"(?:[a-z_][a-z0-9_]{0,47}\.)?[a-z_][a-z0-9_]{0,47}", text):
        raise ValueError
    return text


def _address(text: str) -> tuple[str, int] | None:
    if text == "off":
        return None
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port is None or parts.path:
        raise ValueError
    return parts.hostname, parts.port


STUCK_FACTOR = 4
"""A batch whose last requests begin late takes up to so many times the time of its sink."""

_SINK_SCHEMES = "redis://, rediss://, pubsub://, amqp://, kombu+…://, kafka://, http://, https://"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "database", "CONQUIET_DATABASE_URL", "", _database,
        "postgresql://USER@HOST/NAME or sqlite:///FILE", "the database with the outbox", True,
    ),
    Setting(
        "sink", "CONQUIET_OUTBOX_SINK", "redis:", _sink,
        f"a URL that begins with {_SINK_SCHEMES} or stdout:",
        "where events go; `redis:` is the server of CONQUIET_REDIS_URL, or of this machine", True,
    ),
    Setting(
        "topic", "CONQUIET_OUTBOX_TOPIC", "pf-domain-events", _word, "1 to 255 characters",
        "the topic of events that name none",
    ),
    Setting(
        "table", "CONQUIET_OUTBOX_TABLE", "outbox", _table,
        "a-z, 0-9 and _, with schema if need be, as in sales.outbox",
        "the table to publish; `outbox_events` has the layout of domain events",
    ),
    Setting(
        "batch_size", "CONQUIET_OUTBOX_PUBLISH_BATCH_SIZE", "50", *_whole(1, 10_000),
        "rows claimed and published at a time",
    ),
    Setting(
        "poll_ms", "CONQUIET_OUTBOX_PUBLISH_POLL_MS", "500", *_whole(10, 60_000),
        "pause when nothing waits; up to four times as long while nothing comes, less jitter",
    ),
    Setting(
        "max_attempts", "CONQUIET_OUTBOX_MAX_ATTEMPTS", "10", *_whole(1, 1_000),
        "failures of one row before it is parked; an outage costs none",
    ),
    Setting(
        "idempotency_ttl_hours", TTL_VARIABLE, str(TTL_HOURS), *_whole(1, MOST_TTL_HOURS),
        "how long consumers remember an event: `Idempotency` takes the variable as its default",
    ),
    Setting(
        "ordered", "CONQUIET_OUTBOX_ORDERED", "false", _yes_or_no, "true or false",
        "keep the order of each key, by one relay at a time; a stuck key waits alone",
    ),
    Setting(
        "wakeup", "CONQUIET_OUTBOX_WAKEUP", "true", _yes_or_no, "true or false",
        "be told of new rows instead of finding them by polling alone",
    ),
    Setting(
        "publish_timeout_ms", "CONQUIET_OUTBOX_PUBLISH_TIMEOUT_MS", "10000",
        *_whole(100, 600_000),
        "how long a sink may take to confirm; what of a batch was not begun by then waits",
    ),
    Setting(
        "longest_pause_ms", "CONQUIET_OUTBOX_LONGEST_PAUSE_MS", "10000", *_whole(10, 600_000),
        "cap of the pauses in an outage, which double from 0.1 s, less jitter",
    ),
    Setting(
        "check_timeout_ms", "CONQUIET_OUTBOX_CHECK_TIMEOUT_MS", "2000", *_whole(10, 60_000),
        "how long a check of database or sink may take",
    ),
    Setting(
        "stuck_after_s", "CONQUIET_OUTBOX_STUCK_AFTER_S", "300", *_whole(1, 86_400),
        "a batch that takes longer ends the process, so that its rows are free again; at least"
        f" {STUCK_FACTOR} times …_PUBLISH_TIMEOUT_MS",
    ),
    Setting(
        "grace_s", "CONQUIET_OUTBOX_GRACE_S", "25", *_whole(0, 3_600),
        "time to finish the batch under way at SIGTERM",
    ),
    Setting(
        "health", "CONQUIET_OUTBOX_HEALTH", "127.0.0.1:8081", _address, "HOST:PORT or off",
        "where /healthz, /readyz and /metrics answer; port 0 takes a free one",
    ),
    Setting(
        "log_format", "CONQUIET_LOG_FORMAT", "console", *_choice("console", "json"),
        "how logs are written, on stderr",
    ),
    Setting(
        "log_level", "CONQUIET_LOG_LEVEL", "info",
        *_choice("debug", "info", "warning", "error"),
        "the least that is logged; each published event is an info",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of one relay process; `load` makes them."""

    database: str
    sink: str
    topic: str
    table: str
    batch_size: int
    poll_ms: int
    max_attempts: int
    idempotency_ttl_hours: int
    ordered: bool
    wakeup: bool
    publish_timeout_ms: int
    longest_pause_ms: int
    check_timeout_ms: int
    stuck_after_s: int
    grace_s: int
    health: tuple[str, int] | None
    log_format: str
    log_level: str
    texts: Mapping[str, str] = field(default_factory=dict)
    """Each setting as it was given, without secrets."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each came from: a flag, a variable, the file, or `default`."""

    @property
    def publish_seconds(self) -> float:
        return self.publish_timeout_ms / 1000

    def shown(self) -> list[str]:
        """What is printed at the start, one line per setting."""
        width = max(len(setting.variable) for setting in SETTINGS)
        return [
            f"{setting.variable:<{width}} = {self.texts[setting.name]}"
            f"  ({self.origins[setting.name]})"
            for setting in SETTINGS
        ]


def load(
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Settings:
    """Settings from flags, else the environment, else a TOML file, else the defaults.

    >>> load({"database": "sqlite:///shop.db", "batch_size": "20"}, environ={}).batch_size
    20
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get(CONFIG_VARIABLE)
    of_file = _of_file(Path(file)) if file else {}
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        text, origin = _find(setting, flags or {}, environ, of_file, file)
        values[setting.name] = _value(setting, text, origin)
        texts[setting.name] = masked(text) if setting.is_url else text
        origins[setting.name] = origin
    return _consistent(Settings(**values, texts=texts, origins=origins))


def _consistent(settings: Settings) -> Settings:
    least = STUCK_FACTOR * settings.publish_seconds
    if settings.stuck_after_s < least:
        raise ConfigError(
            f"CONQUIET_OUTBOX_STUCK_AFTER_S: {settings.stuck_after_s} is less than {STUCK_FACTOR}"
            f" times CONQUIET_OUTBOX_PUBLISH_TIMEOUT_MS, {settings.publish_timeout_ms}: a slow"
            " batch would end the process before it is marked; make it"
            f" {math.ceil(least)}, or shorten the other"
        )
    return settings


def setting(name: str, environ: Mapping[str, str] | None = None, *, required: bool = True) -> Any:
    """One setting by itself, for whoever else goes by it: from environment or file.

    >>> setting("max_attempts", {"CONQUIET_OUTBOX_MAX_ATTEMPTS": "3"})
    3
    """
    environ = os.environ if environ is None else environ
    file = environ.get(CONFIG_VARIABLE)
    of_file = _of_file(Path(file)) if file else {}
    [found] = [one for one in SETTINGS if one.name == name]
    text, origin = _find(found, {}, environ, of_file, file)
    return _value(found, text, origin) if text or required else None


def _find(
    setting: Setting,
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    of_file: Mapping[str, str],
    file: str | None,
) -> tuple[str, str]:
    flag = flags.get(setting.name)
    if flag is not None:
        return flag, setting.flag
    if environ.get(setting.variable):  # empty is as good as not set: compose files do that
        return environ[setting.variable], setting.variable
    if setting.name in of_file:
        return of_file[setting.name], f"{setting.name} of {file}"
    return setting.default, "default"


def _value(setting: Setting, text: str, origin: str) -> Any:
    if not text:
        raise ConfigError(
            f"{setting.variable} is not set: it is {setting.meaning}, {setting.allowed};"
            f" {setting.flag} says it too"
        )
    try:
        return setting.read(text)
    except ValueError:
        where = setting.variable if origin == setting.variable else f"{setting.variable}, {origin}"
        shown = masked(text) if setting.is_url else text
        raise ConfigError(f"{where}: {shown!r:.100} is not {setting.allowed}") from None


def _of_file(path: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    section = found.get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {SECTION} must be a table, as in [{SECTION}]")
    known = [setting.name for setting in SETTINGS]
    texts: dict[str, str] = {}
    for name, value in section.items():
        if name not in known:
            raise ConfigError(
                f"{path}: [{SECTION}] has no setting {name!r}; choose from {', '.join(known)}"
            )
        if isinstance(value, bool):
            texts[name] = str(value).lower()
        elif isinstance(value, (str, int)):
            texts[name] = str(value)
        else:
            raise ConfigError(f"{path}: {name} must be text, a whole number, true or false")
    return texts
