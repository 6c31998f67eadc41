"""Settings of the relay process, as `conquiet.config` loads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from conquiet import config
from conquiet.config import (
    Setting,
    choice,
    read_address,
    read_boolean,
    read_text,
    seconds,
    whole,
)
from conquiet.errors import ConfigError
from conquiet.events.ttl import MAX_TTL_HOURS, TTL_HOURS, TTL_VARIABLE
from conquiet.registry import SINK_SCHEMES, sink_scheme


def _read_sink(text: str) -> str:
    sink_scheme(text)
    return text


STUCK_FACTOR = 4
"""A batch whose last requests begin late takes up to so many times the timeout of its sink."""

SETTINGS: tuple[Setting, ...] = (
    config.DATABASE,
    config.BROKER,
    Setting(
        "sink", "CONQUIET_OUTBOX_SINK", "redis:", _read_sink,
        f"a URL that begins with one of {SINK_SCHEMES}",
        "where events go; `redis:` is the server of CONQUIET_BROKER_URL", True,
    ),
    Setting(
        "topic", "CONQUIET_OUTBOX_TOPIC", "domain-events", read_text, "1 to 255 characters",
        "the topic of events that name none",
    ),
    config.TABLE,
    Setting(
        "from", "CONQUIET_OUTBOX_FROM", "auto", *choice("auto", "claim", "wal"),
        "claim rows, or follow PostgreSQL's write-ahead log; auto takes the log if it is set up for"
        " it",
    ),
    Setting(
        "batch_size", "CONQUIET_OUTBOX_PUBLISH_BATCH_SIZE", "50", *whole(1, 10_000),
        "rows claimed and published at a time",
    ),
    Setting(
        "poll_ms", "CONQUIET_OUTBOX_PUBLISH_POLL_MS", "500", *whole(10, 60_000),
        "pause while the outbox is empty; grows up to four times as long, less jitter",
    ),
    config.MAX_ATTEMPTS,
    Setting(
        "idempotency_ttl_hours", TTL_VARIABLE, str(TTL_HOURS), *whole(1, MAX_TTL_HOURS),
        "how long consumers remember an event: `Idempotency` takes the variable as its default",
    ),
    config.ORDERED,
    Setting(
        "wakeup", "CONQUIET_OUTBOX_WAKEUP", "true", read_boolean, "true or false",
        "let the database notify the relay of new rows, besides polling",
    ),
    Setting(
        "publish_timeout_seconds", "CONQUIET_OUTBOX_PUBLISH_TIMEOUT_SECONDS", "10",
        *seconds(0.1, 600),
        "how long a sink may take to confirm; messages not sent by then wait for the next batch",
    ),
    Setting(
        "longest_pause_seconds", "CONQUIET_OUTBOX_LONGEST_PAUSE_SECONDS", "10",
        *seconds(0.01, 600),
        "longest pause between attempts in an outage; pauses double from 0.1 s, less jitter",
    ),
    Setting(
        "check_timeout_seconds", "CONQUIET_OUTBOX_CHECK_TIMEOUT_SECONDS", "2",
        *seconds(0.01, 60),
        "how long a health check of database or sink may take",
    ),
    Setting(
        "stuck_after_seconds", "CONQUIET_OUTBOX_STUCK_AFTER_SECONDS", "300",
        *seconds(1, 86_400),
        "a batch that takes longer ends the process, which releases its rows; at least"
        f" {STUCK_FACTOR} times …_PUBLISH_TIMEOUT_SECONDS",
    ),
    Setting(
        "grace_seconds", "CONQUIET_OUTBOX_GRACE_SECONDS", "25", *seconds(0, 3_600),
        "time to finish the batch in flight at SIGTERM",
    ),
    Setting(
        "health", "CONQUIET_OUTBOX_HEALTH", "127.0.0.1:8081", read_address, "HOST:PORT or off",
        "where /healthz, /readyz and /metrics answer; port 0 takes a free one",
    ),
    Setting(
        "health_details", "CONQUIET_OUTBOX_HEALTH_DETAILS", "false", read_boolean, "true or false",
        "let /readyz name counts and errors also where it listens beyond loopback",
    ),
    config.HISTORY,
    config.LOG_FORMAT,
    config.LOG_LEVEL,
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of one relay process; `load` creates them."""

    database: str
    broker: str
    sink: str
    topic: str
    table: str
    read_from: str
    batch_size: int
    poll_ms: int
    max_attempts: int
    idempotency_ttl_hours: int
    ordered: bool
    history: bool
    wakeup: bool
    publish_timeout_seconds: float
    longest_pause_seconds: float
    check_timeout_seconds: float
    stuck_after_seconds: float
    grace_seconds: float
    health: tuple[str, int] | None
    health_details: bool
    log_format: str
    log_level: str
    texts: Mapping[str, str] = field(default_factory=dict)
    """Each setting as it was given, without secrets."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each came from: a flag, a variable, the file, or `default`."""

    def origin(self, name: str) -> str:
        """Return what to correct if a setting is wrong: its flag, its variable, or the file."""
        [setting] = (setting for setting in SETTINGS if setting.name == name)
        found = self.origins.get(name, "default")
        return setting.variable if found == "default" else found

    def list_lines(self) -> list[str]:
        """Return the lines that are logged at the start, one per setting."""
        return config.list_lines(SETTINGS, self.texts, self.origins)


def load(
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | None = None,
) -> Settings:
    """Load the settings from flags, else the environment, else a TOML file, else the defaults.

    >>> load({"database": "sqlite:///shop.db", "batch_size": "20"}, environ={}).batch_size
    20
    """
    found = config.load(SETTINGS, flags, environ, file, required=["database"])
    values = dict(found.values)
    values["read_from"] = values.pop("from")  # no name of Python
    return _check(Settings(**values, texts=found.texts, origins=found.origins))


def _check(settings: Settings) -> Settings:
    least = STUCK_FACTOR * settings.publish_timeout_seconds
    if settings.stuck_after_seconds < least:
        raise ConfigError(
            f"{settings.origin('stuck_after_seconds')}: {settings.stuck_after_seconds:g} is less"
            f" than {STUCK_FACTOR} times {settings.origin('publish_timeout_seconds')},"
            f" {settings.publish_timeout_seconds:g}: a slow batch would end the process before its"
            f" rows are marked; set it to {math.ceil(least)}, or shorten the other"
        )
    return settings
