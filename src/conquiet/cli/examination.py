"""What `conquiet doctor` looks at."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata

from conquiet.cli.check import Check, Status
from conquiet.cli.server_checks import server_checks
from conquiet.cli.terminal import FAILED, OK, dim, green, print_json, red, yellow
from conquiet.errors import ConfigError

_OLDEST_JAVA = 17
_HIDDEN_EXTRAS = ("all", "dev", "docs")
_requirement = re.compile(r"([\w.-]+)\s*(?:\[([\w,\s-]*)\])?.*?(?:;(.*))?")
_extra_marker = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def examine(options: Namespace) -> int:
    checks = [
        _python(),
        *_packages(),
        *server_checks(options.redis_url, options.database_url),
        java(),
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
        paint = {"ok": green, "absent": dim, "notice": yellow, "broken": red}[check.status]
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


# --- programs -------------------------------------------------------------------------------


def java() -> Check:
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
