"""Settings of `conquiet dashboard`: by flag or environment, the first that says so.

One table, `SETTINGS`, is what reads them and what the documentation shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from conquiet.errors import ConfigError
from conquiet.relay import settings as of_relay
from conquiet.relay.masked import masked
from conquiet.relay.settings import Setting

if TYPE_CHECKING:
    from conquiet.web.access import Access

TOKEN_VARIABLE = "CONQUIET_DASHBOARD_TOKEN"
"""No flag: whoever lists processes would see it."""


def _text(text: str) -> str:
    if "\0" in text or len(text) > 1_000:
        raise ValueError
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65_535:
        raise ValueError
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _urls(text: str) -> tuple[str, ...]:
    found = _words(text)
    if not all(url.startswith(("http://", "https://")) and urlsplit(url).hostname for url in found):
        raise ValueError
    return found


def _redis(text: str) -> str:
    if text != "off" and not text.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError
    return "" if text == "off" else text


def _kind(text: str) -> str:
    if text not in ("token", "basic", "header", "none"):
        raise ValueError
    return text


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError
    return text.lower() in ("true", "1", "yes", "on")


def _shared(name: str) -> Setting:
    [found] = [one for one in of_relay.SETTINGS if one.name == name]
    return found


_P = "CONQUIET_DASHBOARD_"
SETTINGS: tuple[Setting, ...] = (
    _shared("database"),
    Setting(
        "redis", "CONQUIET_REDIS_URL", "redis://localhost:6379/0", _redis,
        "redis://HOST:PORT/0, rediss://… or off", "the Redis with streams and dead letters", True,
    ),
    _shared("table"),
    _shared("max_attempts"),
    Setting(
        "streams", f"{_P}STREAMS", "*", _text, "a glob pattern, as in orders*",
        "which streams to show",
    ),
    Setting(
        "relays", f"{_P}RELAYS", "", _urls, "http://HOST:PORT, several with commas",
        "health addresses of relays to ask", True,
    ),
    Setting("host", f"{_P}HOST", "127.0.0.1", _text, "an address", "where to listen"),
    Setting(
        "port", f"{_P}PORT", "8082", _port, "a whole number from 0 to 65535",
        "the port; 0 takes a free one",
    ),
    Setting(
        "public_url", f"{_P}PUBLIC_URL", "", _text, "https://HOST/PATH",
        "how browsers reach it through a proxy that takes the path off", True,
    ),
    Setting(
        "allowed_hosts", f"{_P}ALLOWED_HOSTS", "", _words, "names, with commas",
        "names it is reached by, besides those of loopback",
    ),
    Setting(
        "auth", f"{_P}AUTH", "token", _kind, "token, basic, header or none",
        "how to let people in; none is for loopback alone",
    ),
    Setting(
        "token_file", f"{_P}TOKEN_FILE", "", _text, "a path",
        "a file with the token, made if it is not there; of basic, with USER:PASSWORD",
    ),
    Setting(
        "auth_header", f"{_P}AUTH_HEADER", "X-Forwarded-User", _text, "a name",
        "the header in which a proxy says who it is",
    ),
    Setting(
        "proxies", f"{_P}PROXIES", "127.0.0.1,::1", _words, "addresses or networks, with commas",
        "whose header counts",
    ),
    Setting(
        "read_only", f"{_P}READ_ONLY", "false", _yes_or_no, "true or false",
        "show everything, change nothing",
    ),
    Setting(
        "hide_payloads", f"{_P}HIDE_PAYLOADS", "false", _yes_or_no, "true or false",
        "do not show the data of messages",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of one dashboard; `load` makes them."""

    database: str
    redis: str
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
    secret: str
    """Of the environment; empty if it has none."""

    def shown(self) -> dict[str, str]:
        """Each variable and its value, without secrets."""
        found = {setting.variable: _shown(setting, self) for setting in SETTINGS}
        return {**found, TOKEN_VARIABLE: "set" if self.secret else ""}


def _shown(setting: Setting, settings: Settings) -> str:
    value = getattr(settings, setting.name)
    if isinstance(value, bool):
        return str(value).lower()
    values = value if isinstance(value, tuple) else (str(value),)
    return ",".join(masked(one) if setting.is_url else one for one in values)


def load(
    flags: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from flags, else the environment, else the defaults.

    >>> load({"port": "9000"}, environ={}).port
    9000
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        flag = (flags or {}).get(setting.name)
        values[setting.name] = _value(setting, flag, environ)
    return Settings(**values, secret=environ.get(TOKEN_VARIABLE, ""))


def _value(setting: Setting, flag: str | None, environ: Mapping[str, str]) -> Any:
    text, where = flag, setting.flag
    if text is None:
        if setting in of_relay.SETTINGS:  # which may stand in the relay's file
            return of_relay.setting(setting.name, environ, required=False) or ""
        text, where = environ.get(setting.variable) or setting.default, setting.variable
    if not text and not setting.default:
        return setting.read("") if setting.read in (_words, _urls) else ""
    try:
        return setting.read(text)
    except ValueError:
        shown = masked(text) if setting.is_url else text
        raise ConfigError(f"{where}: {shown!r:.100} is not {setting.allowed}") from None


def access_of(settings: Settings) -> tuple[Access, bool]:
    """How to let people in, and whether the token was made here and must be told."""
    from conquiet.web.access import Basic, Header, Open, Token, is_loopback

    if settings.auth == "none":
        if not is_loopback(settings.host):
            raise ConfigError(
                f"--no-auth with --host {settings.host}: anybody could change things; listen on"
                " 127.0.0.1, or choose --auth token, basic or header"
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
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"--token-file {path}: {why}") from None
