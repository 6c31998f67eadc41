"""Access: how users of the dashboard sign in, and the signatures of cookies and forms.

Token    a secret, given once by a link or a form; then a signed cookie
Basic    user and password, which the browser asks for
Header   a proxy authenticates users and passes their name
Open     no check; for loopback, or behind an application's own check
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import time
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

from starlette.requests import HTTPConnection

from conquiet.errors import ConfigError

SESSION_SECONDS = 12 * 3_600
LEAST_TOKEN_CHARS = 16
LEAST_PASSWORD_CHARS = 8


class Signer:
    """Signs texts that a browser stores; each purpose has a key derived from one secret.

    >>> signer = Signer("a secret")
    >>> text = signer.sign("note", {"n": 1})
    >>> signer.read("note", text)
    {'n': 1}
    >>> signer.read("session", text) is None
    True
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def digest(self, purpose: str, text: str = "") -> str:
        key = hmac.digest(self._secret, purpose.encode(), sha256)
        return hmac.new(key, text.encode(), sha256).hexdigest()

    def sign(self, purpose: str, value: Any) -> str:
        text = urlsafe_b64encode(json.dumps(value).encode()).decode()
        return f"{text}.{self.digest(purpose, text)}"

    def read(self, purpose: str, signed: str | None) -> Any:
        """Return the signed value; None if the signature is missing or wrong."""
        text, _, digest = (signed or "").rpartition(".")
        if not text or not same(digest, self.digest(purpose, text)):
            return None
        return json.loads(urlsafe_b64decode(text))


def same(given: str, wanted: str) -> bool:
    """Compare two texts in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode())


class Access(Protocol):
    """Identifies the user of a request."""

    @property
    def secret(self) -> str:
        """The secret that signs cookies and forms."""

    @property
    def challenge(self) -> str:
        """The header `WWW-Authenticate`; empty if there is a form instead."""

    def who(self, request: HTTPConnection, signer: Signer) -> str | None:
        """Return the name of the user; None if the request is not authenticated."""


def new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Token:
    """A secret that opens the dashboard; random unless given.

    A given `token` has 16 characters or more; it signs the sessions too, so that processes with the
    same one share them.
    """

    token: str = field(default_factory=new_token, repr=False)
    challenge: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if len(self.token) < LEAST_TOKEN_CHARS or not self.token.isprintable():
            raise ConfigError(
                f"the token of the dashboard needs {LEAST_TOKEN_CHARS} printable characters or"
                " more; leave it out, and a random one is used"
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
    """One `user` and `password` for all, by HTTP basic authentication; serve it by TLS only."""

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
    """A header in which a proxy names the user; ignored from other addresses.

    The proxy has to set the header `name`, and remove the one that a browser sends.
    """

    name: str = "X-Forwarded-User"
    proxies: Sequence[str] = ("127.0.0.1", "::1")
    """Addresses or networks of the proxies."""
    challenge: str = field(default="", init=False)
    secret: str = field(default_factory=new_token, repr=False)
    """Processes that serve one dashboard together must share it."""

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalnum() or not self.name.isascii():
            raise ConfigError(f"{self.name!r:.60} is not a header, such as X-Forwarded-User")
        for proxy in self.proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError:
                raise ConfigError(
                    f"{proxy!r:.60} is not an address or network of a proxy"
                ) from None

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
    """No authentication."""

    challenge: str = field(default="", init=False)
    secret: str = field(default_factory=new_token, repr=False)
    """Signs the forms; processes that serve one dashboard together must share it."""

    def who(self, request: HTTPConnection, signer: Signer) -> str | None:
        return "anonymous"


def new_session(signer: Signer) -> str:
    """Return the cookie of a user who has given the token."""
    until = time.time() + SESSION_SECONDS
    return signer.sign("session", {"id": secrets.token_urlsafe(12), "until": until})


def cookie_name(signer: Signer, of: str = "session") -> str:
    """Return a name that differs by secret: cookies do not depend on the port of a host."""
    return f"conquiet_{of}_{signer.digest('cookie name')[:8]}"
