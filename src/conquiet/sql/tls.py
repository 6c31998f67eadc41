"""Verify PostgreSQL servers on other hosts by TLS, unless a mode is configured.

libpq's own default, `sslmode=prefer`, accepts any certificate, or none. A mode given in the URL, by
PGSSLMODE or by a service file is used as it is; a server on this host needs no certificate.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import URL, make_url

from conquiet.errors import ConfigError

VERIFIED = "verify-full"
_BY_AUTHORITY = "verify-ca"
_LIBPQ_DRIVERS = ("default", "psycopg", "psycopg_async", "psycopg2")
_OF_SYSTEM = "system"
# Files of trusted authorities: Debian and Alpine, Red Hat, SUSE, macOS. The libpq in psycopg's
# binary package resolves `system` to a directory that no system has.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_REFUSED = re.compile(
    r"certificate verify failed|does not match host name|root certificate file .* does not exist"
    r"|server does not support SSL",
    re.IGNORECASE,
)


def verify_server(url: URL, given: Mapping[str, Any] | None = None) -> URL:
    """Add to a URL what libpq needs to verify the server; `given` are the driver's arguments.

    >>> str(verify_server(make_url("postgresql://db.example/shop?sslrootcert=ca.pem")))
    'postgresql://db.example/shop?sslmode=verify-full&sslrootcert=ca.pem'
    >>> str(verify_server(make_url("postgresql://127.0.0.1/shop")))
    'postgresql://127.0.0.1/shop'
    """
    return url.update_query_dict(_required_parameters(url, given or {}))


def verify_server_text(url: str) -> str:
    """Add the same to a libpq URL as text, leaving the rest of it unchanged."""
    wanted = _required_parameters(make_url(url), {})
    if not wanted:
        return url
    plain = re.sub(rf"(?<=[?&])sslrootcert={_OF_SYSTEM}(&|$)", "", url).rstrip("?&")
    return f"{plain}{'&' if '?' in plain else '?'}{urlencode(wanted, safe='/')}"


def verify_by_asyncpg(url: URL) -> tuple[URL, ssl.SSLContext | str | None]:
    """Translate libpq's parameters of TLS: return the URL without them, and asyncpg's `ssl`.

    None leaves it to asyncpg, which knows PGSSLMODE.
    """
    mode = url.query.get("ssl") or mode_of(url)
    authority = url.query.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
    given = url.query.get("ssl") or url.query.get("sslmode")
    url = url.difference_update_query(["ssl", "sslmode", "sslrootcert"])
    if mode not in (None, VERIFIED, _BY_AUTHORITY) or (mode is None and is_near(url)):
        return url, None if given is None else str(given)
    if authority is None and _has_own_authority():
        authority = _own_authority()
    try:
        context = ssl.create_default_context(
            cafile=None if authority in (None, _OF_SYSTEM) else str(authority)
        )
    except OSError as error:
        raise ConfigError(f"sslrootcert={authority} cannot be used: {error}") from error
    context.check_hostname = mode != _BY_AUTHORITY
    return url, context


def is_near(url: URL, given: Mapping[str, Any] | None = None) -> bool:
    """Return whether the server is on this host."""
    known = {**url.query, **(given or {})}
    names = known.get("host") or url.host or os.environ.get("PGHOST", "")
    addresses = known.get("hostaddr") or os.environ.get("PGHOSTADDR", "")
    listed = [part for part in (names, addresses) if isinstance(part, str)]
    listed += [each for part in (names, addresses) if not isinstance(part, str) for each in part]
    return all(_is_near(host) for each in listed for host in each.split(","))


def mode_of(url: URL, given: Mapping[str, Any] | None = None) -> str | None:
    """Return the configured sslmode, or None if there is none."""
    known = {**url.query, **(given or {})}
    if "sslmode" in known:
        return str(known["sslmode"])
    if "PGSSLMODE" in os.environ:
        return os.environ["PGSSLMODE"]
    if "service" in known or "PGSERVICE" in os.environ:  # a file that libpq reads
        return ""
    return None


def add_advice(reason: str) -> str:
    """Add to libpq's error what to change if a server could not be verified."""
    if not _REFUSED.search(reason):
        return reason
    return (
        f"{reason} (PostgreSQL on another host is verified: sslrootcert=FILE in the URL names an"
        " authority of your own, sslmode=prefer gives it up)"
    )


def _required_parameters(url: URL, given: Mapping[str, Any]) -> dict[str, str]:
    if url.get_backend_name() not in ("postgresql", "postgres") or not _is_libpq(url):
        return {}
    mode = mode_of(url, given)
    if mode not in (None, VERIFIED) or (mode is None and is_near(url, given)):
        return {}
    wanted = {} if mode else {"sslmode": VERIFIED}
    known = {"sslrootcert": os.environ.get("PGSSLROOTCERT"), **url.query, **given}["sslrootcert"]
    if known in (None, _OF_SYSTEM) and not (known is None and _has_own_authority()):
        wanted["sslrootcert"] = _authorities()
    return wanted


def _is_libpq(url: URL) -> bool:
    """Return whether the driver takes libpq's parameters; asyncpg and pg8000 do not."""
    return (url.drivername.partition("+")[2] or "default") in _LIBPQ_DRIVERS


def _is_near(host: str) -> bool:
    name = host if host.count(":") > 1 else host.partition(":")[0]  # SQLAlchemy allows host:port
    if not name or name == "localhost" or name.startswith(("/", "@")):
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _has_own_authority() -> bool:
    return os.path.exists(_own_authority())


def _own_authority() -> str:
    return os.path.expanduser("~/.postgresql/root.crt")


def _authorities() -> str:
    """Return a file of the authorities that this system trusts."""
    known = ssl.get_default_verify_paths().cafile
    return next((path for path in (known, *_BUNDLES) if path and os.path.exists(path)), _OF_SYSTEM)
