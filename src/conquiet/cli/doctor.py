"""`conquiet doctor`: what is installed, what is reachable, what is missing, and what fixes it."""

from __future__ import annotations

import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from conquiet.cli.options import add_broker, add_database
from conquiet.cli.terminal import (
    FAILED,
    OK,
    dim,
    green,
    hang,
    in_one_row,
    one_line,
    print_json,
    red,
    yellow,
)
from conquiet.config import BROKER_VARIABLE, DATABASE_VARIABLE, explain
from conquiet.errors import ConfigError, ConquietError
from conquiet.secret import mask

_EPILOG = f"""\
examples:
  conquiet doctor
  conquiet doctor --need spark --need postgres
  conquiet doctor --json | jq '.checks[] | select(.status != "ok")'

A notice is worth a look and does not fail the check: dead letters, parked rows, clocks that differ,
settings of a server by which a crash loses data (appendfsync, fsync, synchronous_commit, …).

Servers: those of --broker and --database, else of {BROKER_VARIABLE} and {DATABASE_VARIABLE}, else
whether something listens on this machine at the usual port.

exit codes:
  0  nothing that was asked for is broken or missing
  1  a server that was named cannot be used, or a need is missing
  2  wrong usage
"""
_CONNECT_SECONDS = 3
_OLDEST_REDIS = "6.0"
_OLDEST_JAVA = 17
_CLOCK_SECONDS = 5.0
"""A clock that differs by more distorts ages, leases of other consumers and searches by time."""
_SLOT_SHARE = 0.5
"""A slot that uses more of what PostgreSQL keeps for it is worth a look."""
_HIDDEN_EXTRAS = ("all",)
_requirement = re.compile(r"([\w.-]+)\s*(?:\[([\w,\s-]*)\])?.*?(?:;(.*))?")
_extra_marker = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")

Status = Literal["ok", "absent", "notice", "broken"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    `absent` is a fault only if --need names it; `notice` is worth a look, and fails nothing.
    """

    section: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def register(commands: Any, common: ArgumentParser) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is installed, reachable, missing, and the command that fixes it",
        description="Show what is installed and reachable, and the command that fixes the rest.",
        epilog=_EPILOG,
        parents=[common],
    )
    add_broker(parser)
    add_database(parser)
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        metavar="NAME",
        help="an extra, or the name of a check, that must be ok; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    parser.set_defaults(run=_run)


def _run(options: Namespace) -> int:
    checks = [
        _check_python(),
        *_check_packages(),
        *_check_servers(options.broker, options.database),
        check_java(),
        *_check_embedded(),
    ]
    checks = _apply_needs(checks, options.need)
    broken = [check for check in checks if check.status == "broken"]
    if options.json:
        print_json({"ok": not broken, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks)
    return FAILED if broken else OK


def _apply_needs(checks: list[Check], names: Sequence[str]) -> list[Check]:
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
        paint = {"ok": green, "absent": dim, "notice": yellow, "broken": red}[check.status]
        status = paint(f"{check.status:<6}", sys.stdout)
        margin = width + 12
        print(f"  {status}  {check.name:<{width}}  {hang(in_one_row(check.detail), margin)}")
        if check.fix and check.status != "ok":
            print(f"{'':<{margin}}→ {hang(check.fix, margin + 2)}")


# --- Python and its packages ----------------------------------------------------------------


def _check_python() -> Check:
    from importlib import metadata

    version = ".".join(map(str, sys.version_info[:3]))
    detail = f"{version}, conquiet {metadata.version('conquiet')}"
    return Check("python", "python", "ok", detail)


def _check_packages() -> Iterator[Check]:
    from importlib import metadata

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
    """Return the packages of each extra; an entry in brackets names another extra."""
    from importlib import metadata

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


# --- programs -------------------------------------------------------------------------------


def check_java() -> Check:
    import shutil
    import subprocess

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


def _check_embedded() -> Iterator[Check]:
    from conquiet.embedded import binaries

    for server, flavours in ("Redis", binaries.REDIS), ("PostgreSQL", binaries.POSTGRES):
        for flavour, (find, install, _) in flavours.items():
            name = f"{server.lower()}:{flavour}"
            if find() is None:
                yield Check("embedded servers", name, "absent", "not installed", install)
            else:
                yield Check("embedded servers", name, "ok", f"a private {server} can be started")


# --- servers --------------------------------------------------------------------------------


def _check_servers(broker: str | None, database: str | None) -> Iterator[Check]:
    """Check the servers that are named, else whether something listens at the usual ports."""
    broker = broker or os.environ.get(BROKER_VARIABLE)
    if broker:
        yield from _check_redis(broker)
    else:
        yield _check_port("redis server", 6379, BROKER_VARIABLE)
    database = database or os.environ.get(DATABASE_VARIABLE)
    if database:
        yield from _check_database(database)
    else:
        yield _check_port("database", 5432, DATABASE_VARIABLE)


def _check_port(name: str, port: int, variable: str) -> Check:
    """Check whether something listens; without a URL there is no way to log in."""
    import socket

    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        fix = f"export {variable}=… names one; conquiet.embedded can start a private one"
        return Check("servers", name, "absent", f"nothing listens on localhost:{port}", fix)
    detail = f"localhost:{port} accepts connections; set {variable} to have it checked"
    return Check("servers", name, "ok", detail)


def _check_redis(url: str) -> Iterator[Check]:
    from conquiet.registry import join_cluster, open_redis

    try:
        import redis
    except ModuleNotFoundError:
        yield _without_client("redis server", url, "redis")
        return
    waits: Any = {"connect_seconds": _CONNECT_SECONDS, "answer_seconds": _CONNECT_SECONDS}
    try:
        with open_redis(url, **waits) as client:
            info: Any = client.info()
            yield _check_redis_version(url, info)
            yield _check_redis_clock(client)
            yield from _check_eviction(info)
            yield from _check_redis_durability(client, info)
            with join_cluster(client, url, **waits) as whole:
                yield _check_dead_letters(whole)
    except (redis.RedisError, OSError, ValueError, ConquietError) as error:
        yield _unreachable("redis server", url, error, BROKER_VARIABLE)


def _check_redis_version(url: str, info: dict[str, Any]) -> Check:
    from conquiet.redis.wire import Server

    version = info.get("valkey_version") or info.get("redis_version")
    known = Server("redis", str(info.get("redis_version", "0")))
    status: Status = "ok" if known.at_least(_OLDEST_REDIS) else "broken"
    fix = f"conquiet needs Redis {_OLDEST_REDIS} or newer, or Valkey"
    return Check("servers", "redis server", status, f"{mask(url)}, version {version}", fix)


def _check_redis_clock(client: Any) -> Check:
    before = time.time()
    seconds, micros = client.time()
    return _compare_clocks("redis clock", seconds + micros / 1_000_000, before)


def _check_eviction(info: dict[str, Any]) -> Iterator[Check]:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if not info.get("maxmemory") or policy == "noeviction":
        return
    what = (
        "streams and inbox keys: events are lost"
        if policy.startswith("allkeys")
        else "inbox keys before they expire: a redelivery would take effect twice"
    )
    detail = f"maxmemory-policy {policy} deletes {what} when memory is short"
    fix = "redis-cli CONFIG SET maxmemory-policy noeviction, and in its file"
    yield Check("servers", "redis memory", "notice", detail, fix)


def _check_redis_durability(client: Any, info: dict[str, Any]) -> Iterator[Check]:
    """Say what a crash of the server loses, by the settings of its files."""
    import redis

    try:
        settings: dict[str, str] = client.config_get("append*") | client.config_get("save")
    except redis.RedisError:  # managed servers and ACLs often forbid CONFIG
        settings = {}
    name = "redis durability"
    if not info.get("aof_enabled"):
        kept = "the last snapshot" if settings.get("save") else "nothing"
        kept = kept if settings else "the last snapshot, if any"
        detail = f"appendonly no: after a crash {kept} is left, and acked messages since are lost"
        fix = "redis-cli CONFIG SET appendonly yes, and in its file"
        yield Check("servers", name, "notice", detail, fix)
        return
    lost: dict[str, tuple[Status, str]] = {
        "always": ("ok", "appendfsync always: a crash loses nothing that was answered"),
        "everysec": (
            "ok",
            "appendfsync everysec: a crash of the machine loses up to two seconds; of Redis alone,"
            " nothing",
        ),
        "no": ("notice", "appendfsync no: a crash of the machine loses up to half a minute"),
    }
    unknown: tuple[Status, str] = ("ok", "appendonly yes; appendfsync may not be read")
    status, detail = lost.get(settings.get("appendfsync", ""), unknown)
    fix = "redis-cli CONFIG SET appendfsync everysec (or always), and in its file"
    yield Check("servers", name, status, detail, fix)


def _check_dead_letters(client: Any) -> Check:
    from conquiet.operations.dead_letters import list_streams

    found = list_streams(client)
    if not found:
        return Check("servers", "dead letters", "ok", "no stream holds any")
    some = ", ".join(f"{count:,} in {name}" for name, count in list(found.items())[:5])
    fix = f"conquiet dead-letters list {next(iter(found))} shows the reasons"
    return Check("servers", "dead letters", "notice", some, fix)


def _check_database(url: str) -> Iterator[Check]:
    from conquiet.registry import open_database

    try:
        import sqlalchemy
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        yield _without_client("database", url, "postgres")
        return
    try:
        made = open_database(
            *(url, "it"),
            application="conquiet-doctor",
            connect_seconds=_CONNECT_SECONDS,
            must_exist=False,
            poolclass=sqlalchemy.NullPool,
        )
        is_sqlite = made.dialect.name == "sqlite"
        with made.connect() as connection:
            version = ".".join(map(str, connection.dialect.server_version_info or ()))
            detail = f"{mask(url)}, {made.dialect.name} {version}".rstrip()
            yield Check("servers", "database", "ok", detail)
            yield from _check_verification(made.url)
            if not is_sqlite:  # which has the clock of this machine
                before = time.time()
                now = connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())")
                yield _compare_clocks("database clock", float(now.scalar_one()), before)
            yield _check_database_durability(connection, is_sqlite)
        yield from _check_tables(made)
    except (SQLAlchemyError, OSError, ValueError, ConquietError) as error:
        cause = getattr(error, "orig", None) or error
        yield _unreachable("database", url, cause, DATABASE_VARIABLE)


def _check_verification(url: Any) -> Iterator[Check]:
    """Report a PostgreSQL on another host whose certificate the URL leaves unverified."""
    from conquiet.sql.tls import VERIFIED, is_near, mode_of

    mode = mode_of(url)
    if url.get_backend_name() != "postgresql" or is_near(url) or mode == VERIFIED:
        return
    fix = "set sslmode=verify-full in its URL, with sslrootcert=FILE for a private authority"
    said = f"sslmode={mode}" if mode else "a service file"
    detail = f"{said}: the certificate of {url.host} is not verified"
    yield Check("servers", "database TLS", "notice", detail, fix)


def _check_database_durability(connection: Any, is_sqlite: bool) -> Check:
    """Say what a crash loses, by the settings of the database."""
    name = "database durability"

    def read(statement: str) -> str:
        return str(connection.exec_driver_sql(statement).scalar_one()).lower()

    if is_sqlite:
        mode, level = read("PRAGMA journal_mode"), read("PRAGMA synchronous")
        word = {"0": "OFF", "1": "NORMAL", "2": "FULL", "3": "EXTRA"}.get(level, level)
        said = f"journal_mode {mode}, synchronous {word}"
        fix = "PRAGMA synchronous=FULL on every connection"
        if level == "0":
            return Check(
                *("servers", name, "notice"),
                f"{said}: a power failure may lose commits, or damage the file",
                fix,
            )
        if level == "1" and mode == "wal":
            lost = "a power failure may lose the last commits"
            return Check("servers", name, "notice", f"{said}: {lost}", fix)
        return Check("servers", name, "ok", f"{said}: a crash loses no commit")
    settings = {one: read(f"SHOW {one}") for one in _DURABLE}
    said = ", ".join(f"{one} {value}" for one, value in settings.items())
    fix = "ALTER SYSTEM SET {0} = on; SELECT pg_reload_conf()"
    for one, lost in _DURABLE.items():
        if settings[one] == "off":
            return Check("servers", name, "notice", f"{one} off: {lost}", fix.format(one))
    return Check("servers", name, "ok", f"{said}: a crash loses no commit")


_DURABLE = {
    "fsync": "a crash of the machine may damage the whole database",
    "full_page_writes": "a crash of the machine may damage pages that were being written",
    "synchronous_commit": "a crash loses the last commits, of messages that are acked by then",
}
"""Settings of PostgreSQL, and what is lost if one is off."""


def _check_tables(engine: Any) -> Iterator[Check]:
    """Compare the tables with what this version needs."""
    from sqlalchemy import inspect

    from conquiet.config import TABLE, has_events_layout, read
    from conquiet.sql import schema
    from conquiet.sql.schema import split_name

    fix = "conquiet outbox migrate"
    found = inspect(engine)
    for table in dict.fromkeys((read(TABLE), "outbox", "outbox_events")):
        place, plain = split_name(table)
        if not found.has_table(plain, schema=place):
            continue
        if has_events_layout(table):
            yield Check("servers", f"table {table}", "ok", "is there")
        elif differences := schema.verify(engine.url, outbox=table, inbox=None):
            more = f" --table {table}" if table != "outbox" else ""
            yield Check("servers", f"table {table}", "broken", str(differences[0]), fix + more)
        else:
            yield Check("servers", f"table {table}", "ok", "as this version needs it")
        yield _check_parked(engine, table)
        yield from _check_slot(engine, table)
        return
    yield Check("servers", "table outbox", "absent", "no outbox in this database", fix)


def _check_parked(engine: Any, table: str) -> Check:
    from conquiet.config import MAX_ATTEMPTS, read
    from conquiet.relay.inspection import Inspection

    try:
        figures = Inspection(engine, table, max_attempts=read(MAX_ATTEMPTS)).figures()
    except ConquietError as error:
        return Check("servers", "parked rows", "notice", one_line(str(error))[:200])
    if not figures.parked:
        return Check("servers", "parked rows", "ok", f"none; {figures.pending:,} wait")
    fix = "conquiet outbox list --parked shows the reasons, conquiet outbox retry tries again"
    return Check("servers", "parked rows", "notice", f"{figures.parked:,}", fix)


def _check_slot(engine: Any, table: str) -> Iterator[Check]:
    """Check the slot of an outbox that is published from the write-ahead log."""
    from conquiet.config import has_events_layout
    from conquiet.sql import dialect
    from conquiet.sql.wal import WalOutbox

    if not dialect.uses_psycopg(engine.dialect) or has_events_layout(table):
        return
    slot = WalOutbox(engine, table).slot()
    if slot is None:
        return
    limit = "no limit" if slot.kept_bytes is None else f"{slot.kept_bytes:,} are kept"
    reader = "is read" if slot.active else "is not read"
    detail = f"{slot.name} {reader}, {slot.lag_bytes:,} bytes behind, {limit}"
    fix = "start conquiet relay run --from wal; or change back with --from claim"
    if slot.is_lost:
        detail = (
            f"{slot.name or table}: {slot.status}; the next relay claims what it lacks, but for"
            " events without rows, which are lost"
        )
        yield Check("servers", "slot", "broken", detail, fix)
    elif slot.kept_bytes is None:
        fix = "ALTER SYSTEM SET max_slot_wal_keep_size = '10GB': else a relay that is away fills"
        yield Check("servers", "slot", "notice", detail, f"{fix} the disk")
    elif not slot.active or slot.share > _SLOT_SHARE:
        yield Check("servers", "slot", "notice", detail, fix)
    else:
        yield Check("servers", "slot", "ok", detail)


def _compare_clocks(name: str, there: float, before: float) -> Check:
    """Compare the clocks of two machines, less the time that the question took."""
    after = time.time()
    apart = max(0.0, before - there, there - after)
    fix = "let both machines keep the time by NTP: timedatectl set-ntp true"
    status: Status = "notice" if apart > _CLOCK_SECONDS else "ok"
    detail = f"differs from this machine's by {apart:.1f} s"
    return Check("servers", name, status, detail, fix)


def _without_client(name: str, url: str, extra: str) -> Check:
    fix = f"pip install 'conquiet[{extra}]'"
    return Check("servers", name, "broken", f"{mask(url)}: no client is installed", fix)


def _unreachable(name: str, url: str, error: BaseException, variable: str) -> Check:
    secret = _secret(url)
    reason = one_line(explain(error, url) or repr(error))[:300]
    reason = reason.replace(secret, "***") if secret else reason
    fix = f"start the server, or correct {variable}"
    return Check("servers", name, "broken", f"{mask(url)}: {reason}", fix)


def _secret(url: str) -> str:
    from urllib.parse import urlsplit

    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""
