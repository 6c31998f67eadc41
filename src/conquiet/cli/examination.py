"""What `conquiet doctor` looks at."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Literal
from urllib.parse import urlsplit

from conquiet.cli.terminal import FAILED, OK, dim, green, one_line, print_json, red
from conquiet.errors import ConfigError
from conquiet.relay.masked import masked
from conquiet.relay.sinks.url import trouble

Status = Literal["ok", "absent", "broken"]

_CONNECT_SECONDS = 3
_OLDEST_JAVA = 17
_HIDDEN_EXTRAS = ("all", "dev", "docs")
_requirement = re.compile(r"([\w.-]+)\s*(?:\[([\w,\s-]*)\])?.*?(?:;(.*))?")
_extra_marker = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. Absent is no fault until somebody asks for it."""

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def examine(options: Namespace) -> int:
    checks = [
        _python(),
        *_packages(),
        *_servers(options),
        _java(),
        *_embedded(),
    ]
    checks = _needed(checks, options.need)
    broken = [check for check in checks if check.status == "broken"]
    if options.json:
        print_json({"ok": not broken, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    return FAILED if broken else OK


def _needed(checks: list[Check], names: Sequence[str]) -> list[Check]:
    known = {check.name for check in checks}
    for name in names:
        if name not in known:
            raise ConfigError(f"--need {name}: unknown, choose from {', '.join(sorted(known))}")
    return [
        replace(check, status="broken")
        if check.name in names and check.status == "absent"
        else check
        for check in checks
    ]


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            print(f"{section}")
        paint = {"ok": green, "absent": dim, "broken": red}[check.status]
        status = paint(f"{check.status:<6}", sys.stdout)
        print(f"  {status}  {check.name:<{width}}  {check.detail}")
        if check.fix and check.status != "ok":
            print(f"  {'':<6}  {'':<{width}}  → {check.fix}")


# --- this interpreter -----------------------------------------------------------------------


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    detail = f"{version}, conquiet {metadata.version('conquiet')}"
    return Check("python", "python", "ok", detail)


def _packages() -> Iterator[Check]:
    extras = _extras()
    for extra in sorted(set(extras) - set(_HIDDEN_EXTRAS)):
        found, missing = [], []
        for package in sorted(_with_inherited(extra, extras)):
            try:
                found.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                missing.append(package)
        detail = ", ".join(found + [f"no {package}" for package in missing])
        status: Status = "absent" if missing else "ok"
        yield Check("extras", extra, status, detail, f"pip install 'conquiet[{extra}]'")


def _extras() -> dict[str, set[str]]:
    """What each extra brings; `conquiet[sql]` stands for another extra."""
    extras: dict[str, set[str]] = {}
    for text in metadata.requires("conquiet") or ():
        parts = _requirement.fullmatch(text)
        marker = _extra_marker.search(text)
        if parts is None or marker is None:
            continue
        brought = extras.setdefault(marker[1], set())
        if parts[1] == "conquiet":
            brought.update(f"[{name.strip()}]" for name in (parts[2] or "").split(","))
        else:
            brought.add(parts[1])
    return extras


def _with_inherited(extra: str, extras: dict[str, set[str]]) -> set[str]:
    packages: set[str] = set()
    for item in extras.get(extra, ()):
        if item.startswith("["):
            packages |= _with_inherited(item.strip("[]"), extras)
        else:
            packages.add(item)
    return packages


# --- servers --------------------------------------------------------------------------------


def _servers(options: Namespace) -> Iterator[Check]:
    redis = options.redis_url or os.environ.get("CONQUIET_REDIS_URL")
    yield _redis(redis) if redis else _local("redis server", 6379, "CONQUIET_REDIS_URL")
    database = options.database_url or os.environ.get("CONQUIET_DATABASE_URL")
    yield _database(database) if database else _local("database", 5432, "CONQUIET_DATABASE_URL")


def _local(name: str, port: int, variable: str) -> Check:
    """Whether somebody listens; nobody has told us how to log in."""
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        fix = f"export {variable}=… names one; conquiet.embedded can start a private one"
        return Check("servers", name, "absent", f"nothing listens on localhost:{port}", fix)
    detail = f"localhost:{port} accepts connections; set {variable} to have it checked"
    return Check("servers", name, "ok", detail)


def _redis(url: str) -> Check:
    try:
        import redis
    except ModuleNotFoundError:
        return _unchecked("redis server", url, "redis")
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=_CONNECT_SECONDS, socket_timeout=_CONNECT_SECONDS
        ) as client:
            info = client.info("server")
        version = info.get("valkey_version") or info.get("redis_version")
        return Check("servers", "redis server", "ok", f"{masked(url)}, version {version}")
    except (redis.RedisError, OSError, ValueError) as error:
        return _unreachable("redis server", url, error, "CONQUIET_REDIS_URL")


def _database(url: str) -> Check:
    try:
        import sqlalchemy
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

        from conquiet.sql import engine
    except ModuleNotFoundError:
        return _unchecked("database", url, "postgres")
    try:
        is_sqlite = url.startswith("sqlite")
        patience = {} if is_sqlite else {"connect_timeout": _CONNECT_SECONDS}
        made = engine(url, connect_args=patience, poolclass=sqlalchemy.NullPool)
        with made.connect() as connection:
            version = ".".join(map(str, connection.dialect.server_version_info or ()))
        detail = f"{masked(url)}, {made.dialect.name} {version}".rstrip()
        return Check("servers", "database", "ok", detail)
    except (ModuleNotFoundError, NoSuchModuleError):
        return _unchecked("database", url, "postgres")
    except (ArgumentError, SQLAlchemyError, OSError, ValueError) as error:
        cause = getattr(error, "orig", None) or error
        return _unreachable("database", url, cause, "CONQUIET_DATABASE_URL")


def _unchecked(name: str, url: str, extra: str) -> Check:
    fix = f"pip install 'conquiet[{extra}]'"
    return Check("servers", name, "broken", f"{masked(url)}: no client is installed", fix)


def _unreachable(name: str, url: str, error: BaseException, variable: str) -> Check:
    secret = _secret(url)
    reason = one_line(trouble(error, url) or repr(error))[:300]
    reason = reason.replace(secret, "***") if secret else reason
    fix = f"start the server, or correct {variable}"
    return Check("servers", name, "broken", f"{masked(url)}: {reason}", fix)


def _secret(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""


# --- programs -------------------------------------------------------------------------------


def _java() -> Check:
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    fix = "apt-get install default-jre-headless, or set JAVA_HOME"
    if not program:
        return Check("programs", "java", "absent", "not found; Spark needs it", fix)
    try:
        run = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("programs", "java", "absent", f"{program} does not run: {error}", fix)
    found = re.search(r'version "(\d+)(?:\.(\d+))?[^"]*"', run.stderr + run.stdout)
    version = int(found[1]) if found else 0
    if version < _OLDEST_JAVA:
        detail = f"{program} is version {version or 'unknown'}; Spark needs {_OLDEST_JAVA} or newer"
        return Check("programs", "java", "absent", detail, fix)
    return Check("programs", "java", "ok", f"{program}, version {version}")


def _embedded() -> Iterator[Check]:
    from conquiet.embedded import binaries

    for server, flavours in ("Redis", binaries.REDIS), ("PostgreSQL", binaries.POSTGRES):
        for flavour, (find, install, _) in flavours.items():
            name = f"{server.lower()}:{flavour}"
            if find() is None:
                yield Check("embedded servers", name, "absent", "not installed", install)
            else:
                yield Check("embedded servers", name, "ok", f"a private {server} can be started")
