"""Pack conquiet and its dependencies into an archive, for executors that have neither.

    spark-submit --archives conquiet-packages.zip#conquiet \
                 --conf spark.executorEnv.PYTHONPATH=./conquiet …

It holds the versions that are installed here, compiled parts included, so it fits the platform of
this machine and its minor version of Python. Some packages are needed on early patch releases only
(redis needs async-timeout before Python 3.11.3): the archive records the first patch release that
it fits, and `conquiet.spark` refuses an earlier one. Spark brings PySpark itself.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from conquiet.errors import ConfigError

MANIFEST = "conquiet-packages.json"
UNPACKED_AS = "conquiet"
"""The directory, beside an executor, that Spark unpacks the archive into."""

_OF_SPARK = frozenset(("pyspark", "py4j"))
_EXTRAS = ("spark",)
_UNNEEDED = frozenset(("__pycache__", "tests"))
_FAST = 1
"""Compression: most of it is compiled code, of which more effort makes little less."""

_LAST_PATCH = 40
"""Patch releases of a minor version that are looked at."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that was made."""

    path: Path
    python: str
    """The first release of Python that it fits; later ones of the same minor version do too."""
    packages: dict[str, str]
    """Name → version."""
    bytes: int


def settings_for(archive: str) -> dict[str, str]:
    """Return the settings by which executors find the packages of an archive."""
    return {
        "spark.archives": f"{archive}#{UNPACKED_AS}",
        "spark.executorEnv.PYTHONPATH": f"./{UNPACKED_AS}",
    }


def pack(
    target: Path,
    *,
    include: Sequence[Path] = (),
    without: Iterable[str] = (),
    python: str | None = None,
) -> Archive:
    """Pack conquiet, its dependencies, and packages and modules of yours.

    `python` is the version of the executors, such as 3.11.2; a package that they need and that is
    not installed here is an error.
    """
    for path in include:
        if not path.exists():
            raise ConfigError(f"{path} cannot be included: there is no such file or directory")
        if path.is_file() and path.suffix != ".py":
            raise ConfigError(f"{path} cannot be included: give a package's directory or a module")
    left_out = {_normal(name) for name in without}
    wanted = python or this_python()
    check_minor(wanted)
    found = list_needed("conquiet", _EXTRAS, wanted)
    if strange := sorted(left_out - set(found) - _OF_SPARK):
        raise ConfigError(
            f"{strange[0]} cannot be left out: it is none of what would be packed, which is"
            f" {', '.join(sorted(found))}"
        )
    found = {name: item for name, item in found.items() if name not in left_out}
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")  # half an archive must not look like a whole one
    versions = {name: item.version for name, item in sorted(found.items())}
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=_FAST) as archive:
        written: set[str] = set()
        for item in found.values():
            _write(archive, _files(item), written)
        for path in include:
            _write(archive, _tree(path), written)
        first = first_python({*found, *left_out})
        archive.writestr(MANIFEST, json.dumps({"python": first, "packages": versions}))
    part.replace(target)
    return Archive(target, first, versions, target.stat().st_size)


def this_python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def check_minor(python: str) -> None:
    """Raise unless a version of Python has the minor version of this one."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not re.fullmatch(rf"{re.escape(here)}\.\d+", python):
        raise ConfigError(
            f"Python {python!r:.20}: an archive has compiled parts for Python {here}; give a"
            f" version such as {here}.2, or make the archive with that Python"
        )


def first_python(packages: set[str]) -> str:
    """Return the first patch release of this Python that needs none but these packages."""
    major, minor = sys.version_info[:2]
    first = _LAST_PATCH
    for patch in reversed(range(_LAST_PATCH)):
        needed, missing = _resolve("conquiet", _EXTRAS, f"{major}.{minor}.{patch}")
        if {*needed, *missing} - packages:
            break
        first = patch
    return f"{major}.{minor}.{first}"


def list_needed(
    name: str, extras: Iterable[str], python: str | None = None
) -> dict[str, metadata.Distribution]:
    """Return a distribution and all that it requires on a version of Python."""
    python = python or this_python()
    found, missing = _resolve(name, extras, python)
    if missing:
        package, parent = next(iter(missing.items()))
        raise ConfigError(
            f"{parent} needs {package} on Python {python}, and it is not installed here: pip"
            f" install {package}, or leave it out by --without {package}"
        )
    return found


def _resolve(
    name: str, extras: Iterable[str], python: str
) -> tuple[dict[str, metadata.Distribution], dict[str, str]]:
    """Return the distributions, and those that only the other Python needs and that are missing.

    A package that is missing for this Python too is passed over: conquiet runs without it.
    """
    found: dict[str, metadata.Distribution] = {}
    missing: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(name, "", ""), *((name, extra, "") for extra in extras)]
    while pending:
        name, extra, parent = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if parent:
                missing[name] = parent
            continue
        found[_normal(name)] = distribution
        pending.extend(_requirements(distribution, extra, python))
    return {name: found[name] for name in sorted(found)}, missing


def _requirements(
    item: metadata.Distribution, extra: str, python: str
) -> Iterator[tuple[str, str, str]]:
    """Yield name, extra, and the parent if only the other Python needs it; Spark brings PySpark."""
    from packaging.requirements import Requirement

    parent = _normal(item.metadata["Name"])
    for line in item.requires or ():
        wanted = Requirement(line)
        name = _normal(wanted.name)
        if name in _OF_SPARK or not _applies(wanted.marker, extra, python):
            continue
        is_of_other = not _applies(wanted.marker, extra, this_python())
        for part in ("", *wanted.extras):
            yield name, part, parent if is_of_other else ""


def _applies(marker: Any, extra: str, python: str) -> bool:
    """Return whether a marker holds on a version of Python, with an extra or without any."""
    if marker is None:
        return not extra
    given = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    return bool(marker.evaluate({**given, "extra": extra})) and (
        not extra or not marker.evaluate({**given, "extra": ""})
    )


def _files(item: metadata.Distribution) -> Iterator[tuple[Path, str]]:
    """Yield the files of a distribution, and their places in an archive."""
    name = _normal(item.metadata["Name"])
    if name == "conquiet":  # may be installed in place, for development
        yield from _tree(Path(__file__).resolve().parents[1])
    elif _is_in_place(item):
        raise ConfigError(
            f"{name} is installed in place (editable), so its files are not known: leave it out and"
            f" include its directory: --without {name} --include PATH"
        )
    for file in item.files or ():
        place = str(file)
        if place.startswith(("..", "/")) or _UNNEEDED & set(file.parts) or file.suffix == ".pth":
            continue
        if name == "conquiet" and place.startswith("conquiet/"):
            continue
        yield Path(str(item.locate_file(file))), place


def _is_in_place(item: metadata.Distribution) -> bool:
    about = item.read_text("direct_url.json") or ""
    return '"editable": true' in about


def _tree(path: Path) -> Iterator[tuple[Path, str]]:
    path = path.resolve()
    if path.is_file():
        yield path, path.name
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file, str(file.relative_to(path.parent))


def _write(archive: zipfile.ZipFile, files: Iterable[tuple[Path, str]], written: set[str]) -> None:
    for path, place in files:
        if place not in written and path.is_file():
            written.add(place)
            archive.write(path, place)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
