"""Settings of `conquiet dashboard`, as `conquiet.config` loads them, and the access they set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from conquiet import config
from conquiet.config import Setting, choice, is_loopback, read_boolean, whole
from conquiet.errors import ConfigError
from conquiet.secret import mask

if TYPE_CHECKING:
    from conquiet.web.access import Access

TOKEN_VARIABLE = "CONQUIET_DASHBOARD_TOKEN"
"""Has no flag: the list of processes would show it."""


def _text(text: str) -> str:
    if "\0" in text or len(text) > 1_000:
        raise ValueError
    return text


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _urls(text: str) -> tuple[str, ...]:
    found = _words(text)
    if not all(url.startswith(("http://", "https://")) and urlsplit(url).hostname for url in found):
        raise ValueError
    return found


def _broker(text: str) -> str:
    if text != "off" and not text.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError
    return "" if text == "off" else text


_P = "CONQUIET_DASHBOARD_"
_own = partial(Setting, section="dashboard")
SETTINGS: tuple[Setting, ...] = (
    config.DATABASE,
    replace(
        config.BROKER,
        read=_broker,
        allowed="redis://HOST:PORT/0, rediss://… or off",
        meaning="the Redis with streams and dead letters",
    ),
    config.TABLE,
    config.MAX_ATTEMPTS,
    _own(
        "streams", f"{_P}STREAMS", "*", _text, "a glob pattern, as in orders*",
        "which streams to show",
    ),
    _own(
        "relays", f"{_P}RELAYS", "", _urls, "http://HOST:PORT, several with commas",
        "health addresses of relays to ask", is_url=True, empty=(),
    ),
    _own("host", f"{_P}HOST", "127.0.0.1", _text, "an address", "where to listen"),
    _own("port", f"{_P}PORT", "8082", *whole(0, 65_535), "the port; 0 takes a free one"),
    _own(
        "public_url", f"{_P}PUBLIC_URL", "", _text, "https://HOST/PATH",
        "how browsers reach it through a proxy that removes the path", is_url=True,
    ),
    _own(
        "allowed_hosts", f"{_P}ALLOWED_HOSTS", "", _words, "names, with commas",
        "host names it is reached by, besides those of loopback", empty=(),
    ),
    _own(
        "auth", f"{_P}AUTH", "token", *choice("token", "basic", "header", "none"),
        "how users sign in; none is for loopback alone",
    ),
    _own(
        "token_file", f"{_P}TOKEN_FILE", "", _text, "a path",
        "a file with the token, created if missing; for basic, with USER:PASSWORD",
    ),
    _own(
        "auth_header", f"{_P}AUTH_HEADER", "X-Forwarded-User", _text, "a name",
        "the header in which a proxy names the user",
    ),
    _own(
        "proxies", f"{_P}PROXIES", "127.0.0.1,::1", _words, "addresses or networks, with commas",
        "the proxies whose header is trusted",
    ),
    _own(
        "read_only", f"{_P}READ_ONLY", "false", read_boolean, "true or false",
        "show everything, change nothing",
    ),
    _own(
        "hide_payloads", f"{_P}HIDE_PAYLOADS", "false", read_boolean, "true or false",
        "do not show the data of messages",
    ),
    _own(
        "app", f"{_P}APP", "", _text, "module:name of an App",
        "an app whose interface and schedules to show; its module is imported",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of one dashboard; `load` creates them."""

    database: str
    broker: str
    table: str
    max_attempts: int
    streams: str
    relays: tuple[str, ...]
    host: str
    port: int
    public_url: str
    allowed_hosts: tuple[str, ...]
    auth: str
    token_file: str
    auth_header: str
    proxies: tuple[str, ...]
    read_only: bool
    hide_payloads: bool
    app: str
    secret: str
    """From the environment; empty if it is not set."""

    def describe(self) -> dict[str, str]:
        """Return each variable and its value, without secrets."""
        found = {setting.variable: _describe(setting, self) for setting in SETTINGS}
        return {**found, TOKEN_VARIABLE: "set" if self.secret else ""}


def _describe(setting: Setting, settings: Settings) -> str:
    value = getattr(settings, setting.name)
    if isinstance(value, bool):
        return str(value).lower()
    values = value if isinstance(value, tuple) else (str(value),)
    return ",".join(mask(one) if setting.is_url else one for one in values)


def load(
    flags: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Load the settings from flags, else the environment, else a TOML file, else the defaults.

    >>> load({"port": "9000"}, environ={}).port
    9000
    """
    environ = os.environ if environ is None else environ
    found = config.load(SETTINGS, flags, environ, section="dashboard")
    return Settings(**found.values, secret=environ.get(TOKEN_VARIABLE, ""))


def access_of(settings: Settings) -> tuple[Access, bool]:
    """Return how users sign in, and whether a new token was created that must be printed."""
    from conquiet.web.access import Basic, Header, Open, Token

    if settings.auth == "none":
        if not is_loopback(settings.host):
            raise ConfigError(
                f"--no-auth with --host {settings.host}: everyone on the network could change"
                " things; listen on 127.0.0.1, or choose --auth token, basic or header"
            )
        return Open(), False
    if settings.auth == "header":
        return Header(settings.auth_header, settings.proxies), False
    if settings.auth == "basic":
        given = settings.secret or _of_file(settings.token_file, None)
        user, _, password = given.partition(":")
        return Basic(user, password), False
    if settings.secret:
        return Token(settings.secret), False
    if not settings.token_file:
        return Token(), True
    from conquiet.web.access import new_token

    return Token(_of_file(settings.token_file, new_token)), False


def _of_file(name: str, make: Callable[[], str] | None) -> str:
    if not name:
        raise ConfigError(
            f"--auth basic needs USER:PASSWORD, in {TOKEN_VARIABLE} or in the file of --token-file"
        )
    path = Path(name)
    try:
        if make is not None and not path.exists():
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(make() + "\n")
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigError(f"--token-file {path}: {why}") from None
