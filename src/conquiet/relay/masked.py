"""URLs as logs may show them."""

from __future__ import annotations

import re

_scheme = re.compile(r"[\w+.-]+://")
_secret = re.compile(
    r"(?i)([?&;][\w.%-]*(?:pass|pwd|secret|token|key|sig|credential|auth|code|jaas)[\w.%-]*=)[^&]*"
)


def masked(url: str) -> str:
    """A URL as logs may show it: the password, and what looks like one, is hidden.

    Better too much than too little: up to the last @, since a password may not be encoded, and
    whether or not somebody forgot the scheme.
    """
    found = _scheme.match(url)
    scheme = found.group() if found else ""
    login, at, place = url[len(scheme) :].rpartition("@")
    user, colon, _ = login.partition(":")
    if colon:
        login = f"{user}:***"
    elif at and scheme in ("http://", "https://"):
        login = "***"
    return scheme + _secret.sub(r"\1***", f"{login}{at}{place}")
