"""Access: who may see the dashboard.

Token    a secret, given once by a link or a form; then a signed cookie
Basic    a name and a password, which the browser asks for
Header   a proxy has checked it, and says who it is
Open     anybody; for loopback, or behind an application's own check
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection

from conquiet.errors import ConfigError
from conquiet.web.signing import Signer, same

SESSION_SECONDS = 12 * 3_600
LEAST_TOKEN_CHARS = 16
LEAST_PASSWORD_CHARS = 8


class Access(Protocol):
    """Says who asks, or None."""

    @property
    def secret(self) -> str:
        """What cookies and forms are signed with."""

    @property
    def challenge(self) -> str:
        """The header `WWW-Authenticate`; empty if there is a form to fill in instead."""

    def who(self, request: HTTPConnection, signer: Signer) -> str | None: ...


def new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Token:
    """A secret that opens the dashboard; made up unless given."""

    token: str = field(default_factory=new_token, repr=False)
    challenge: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if len(self.token) < LEAST_TOKEN_CHARS or not self.token.isprintable():
            raise ConfigError(
                f"the token of the dashboard needs {LEAST_TOKEN_CHARS} printable characters or"
                " more; leave it out, and one is made"
            )

    @property
    def secret(self) -> str:
        return self.token

    def who(self, request: HTTPConnection, signer: Signer) -> str | None:
        session = signer.read("session", request.cookies.get(cookie_name(signer)))
        if session is not None and session["until"] > time.time():
            return f"session {session['id']}"
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(given.strip(), self.token):
            return "bearer"
        return None

    def fits(self, given: str) -> bool:
        return same(given, self.token)


@dataclass(frozen=True)
class Basic:
    """A name and a password of HTTP."""

    user: str
    password: str = field(repr=False)
    challenge: str = field(default='Basic realm="conquiet", charset="UTF-8"', init=False)

    def __post_init__(self) -> None:
        if not self.user or ":" in self.user or len(self.password) < LEAST_PASSWORD_CHARS:
            raise ConfigError(
                "basic authentication needs USER:PASSWORD, with a password of"
                f" {LEAST_PASSWORD_CHARS} characters or more"
            )

    @property
    def secret(self) -> str:
        return f"{self.user}:{self.password}"

    def who(self, request: HTTPConnection, signer: Signer) -> str | None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "basic":
            return None
        try:
            text = b64decode(given.strip(), validate=True).decode()
        except ValueError:  # no base64, or no UTF-8 in it
            return None
        return self.user if same(text, self.secret) else None


@dataclass(frozen=True)
class Header:
    """A header in which a proxy says who it let in; from other addresses it counts for nothing."""

    name: str = "X-Forwarded-User"
    proxies: Sequence[str] = ("127.0.0.1", "::1")
    """Addresses or networks of the proxies."""
    challenge: str = field(default="", init=False)
    secret: str = field(default_factory=new_token, repr=False)
    """Processes that serve one dashboard together must share it."""

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalnum() or not self.name.isascii():
            raise ConfigError(f"{self.name!r:.60} is no name of a header, such as X-Forwarded-User")
        for proxy in self.proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError:
                raise ConfigError(f"{proxy!r:.60} is no address or network of a proxy") from None

    def who(self, request: HTTPConnection, signer: Signer) -> str | None:
        given = request.headers.getlist(self.name)
        return given[0] if len(given) == 1 and given[0] and self._is_proxy(request) else None

    def _is_proxy(self, request: HTTPConnection) -> bool:
        try:
            peer = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        networks = (ipaddress.ip_network(proxy, strict=False) for proxy in self.proxies)
        return any(peer in network for network in networks)


@dataclass(frozen=True)
class Open:
    """No check at all."""

    challenge: str = field(default="", init=False)
    secret: str = field(default_factory=new_token, repr=False)

    def who(self, request: HTTPConnection, signer: Signer) -> str | None:
        return "anybody"


def new_session(signer: Signer) -> str:
    """The value of the cookie of somebody who has shown the token."""
    until = time.time() + SESSION_SECONDS
    return signer.sign("session", {"id": secrets.token_urlsafe(12), "until": until})


def cookie_name(signer: Signer, of: str = "session") -> str:
    """Of its own for each secret: cookies do not tell the ports of one machine apart."""
    return f"conquiet_{of}_{signer.digest('cookie name')[:8]}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
