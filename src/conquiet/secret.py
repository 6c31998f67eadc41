"""Secrets: URLs, and texts that quote them, without their passwords."""

from __future__ import annotations

import re

_scheme = re.compile(r"(?:[\w+.-]+:)?//")
_port = re.compile(r"(\d{1,5}|PORT)(?=:?$|[/?#,;.)'\"])")
_parameter = re.compile(
    r"(?i)([?&;][\w.%-]*(?:pass|pwd|secret|token|key|sig|credential|auth|code|jaas)[\w.%-]*=)[^&]*"
)
_keyword = re.compile(r"(?i)(\b\w*(?:password|passwd|pwd)\s*=\s*)('[^']*'|[^\s&]+)")
"""`host=db password=…`, as libpq takes it."""
_quoted_url = re.compile(
    r"""
      (?<=')[\w+.-]+://[^']*(?=')    # with spaces in it, if need be
    | (?<=")[\w+.-]+://[^"]*(?=")
    | (?:[\w+.-]+:|(?<![\w:/]))//\S*
    | \S+:\S*@\S*                    # without a scheme
    | \S*[?&]\S*=\S*
    """,
    re.VERBOSE,
)


def mask(url: str) -> str:
    """Replace the password of a URL, and parameters that look like secrets, by `***`.

    Masks too much rather than too little: up to the last @, since a password may not be
    percent-encoded; also where the scheme is missing, or the URL was cut off before its @.

    >>> mask("postgresql://app:pa55@db/shop?sslpassword=x")
    'postgresql://app:***@db/shop?sslpassword=***'
    """
    found = _scheme.match(url)
    scheme = found.group() if found else ""
    login, at, place = url[len(scheme) :].rpartition("@")
    user, colon, _ = login.partition(":")
    if colon:
        login = f"{user}:***"
    elif at and scheme in ("http://", "https://"):
        login = "***"
    elif scheme and not at:
        place = _mask_cut(place)
    masked = _parameter.sub(r"\1***", f"{login}{at}{place}")
    return scheme + _keyword.sub(r"\1***", masked)


def _mask_cut(place: str) -> str:
    """Mask `user:password`, where `host:port` would be expected."""
    host, _, port = place.partition(":")
    if not port or "/" in host or "?" in host or host.startswith("[") or _port.match(port):
        return place
    return f"{host}:***"


def mask_all(text: str) -> str:
    """Mask every URL that a text quotes.

    >>> mask_all("unrecognized arguments: --broker redis://:pa55@db/0 app:pa55@db")
    'unrecognized arguments: --broker redis://:***@db/0 app:***@db'
    >>> mask_all("no URL: host=db password=pa55 dbname=shop")
    'no URL: host=db password=*** dbname=shop'
    """
    return _keyword.sub(r"\1***", _quoted_url.sub(lambda found: mask(found[0]), text))
