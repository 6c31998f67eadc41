"""An archive of conquiet and what it needs, for executors that have neither.

    spark-submit --archives conquiet-packages.zip#conquiet \
                 --conf spark.executorEnv.PYTHONPATH=./conquiet …

It holds the very versions that are installed here, compiled parts included, so it fits the Python
version and platform of this machine. Spark brings PySpark itself.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from conquiet.errors import ConfigError

ARCHIVE_NAME = "conquiet-packages.zip"
UNPACKED_AS = "conquiet"
"""The directory, beside an executor, that Spark unpacks the archive into."""

_OF_SPARK = frozenset(("pyspark", "py4j"))
_EXTRAS = ("spark",)
_UNNEEDED = frozenset(("__pycache__", "tests"))
_FAST = 1
"""Compression: most of it is compiled code, of which more effort makes little less."""

_requirement = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_extra = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class Archive:
    """What was packed."""

    path: Path
    packages: dict[str, str]
    """Name → version."""
    bytes: int


def settings_for(archive: str) -> dict[str, str]:
    """The settings with which executors find what an archive holds."""
    return {
        "spark.archives": f"{archive}#{UNPACKED_AS}",
        "spark.executorEnv.PYTHONPATH": f"./{UNPACKED_AS}",
    }


def pack(target: Path, *, include: Sequence[Path] = (), without: Iterable[str] = ()) -> Archive:
    """Pack conquiet, its dependencies and what is to be included: packages and modules of yours."""
    for path in include:
        if not path.exists():
            raise ConfigError(f"{path} cannot be included: there is no such file or directory")
        if path.is_file() and path.suffix != ".py":
            raise ConfigError(f"{path} cannot be included: give a package's directory or a module")
    left_out = {_normal(name) for name in without}
    found = needed("conquiet", _EXTRAS)
    if strange := sorted(left_out - set(found) - _OF_SPARK):
        raise ConfigError(
            f"{strange[0]} cannot be left out: it is none of what would be packed, which is"
            f" {', '.join(sorted(found))}"
        )
    found = {name: item for name, item in found.items() if name not in left_out}
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")  # nobody takes half an archive for a whole one
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=_FAST) as archive:
        written: set[str] = set()
        for item in found.values():
            _write(archive, _files(item), written)
        for path in include:
            _write(archive, _tree(path), written)
    part.replace(target)
    versions = {name: item.version for name, item in sorted(found.items())}
    return Archive(target, versions, target.stat().st_size)


def needed(name: str, extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """A distribution and all that it requires, as far as it is installed here."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(name, ""), *((name, extra) for extra in extras)]
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        name, extra = item
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform or another version of Python
        found[_normal(name)] = distribution
        pending.extend(_requirements(distribution, extra))
    return {name: found[name] for name in sorted(found)}


def _requirements(item: metadata.Distribution, extra: str) -> Iterator[tuple[str, str]]:
    """What it requires with an extra, or without any; PySpark's own are Spark's business."""
    for line in item.requires or ():
        wanted, _, marker = line.partition(";")
        of_extras = {_normal(name) for name in _extra.findall(marker)}
        if of_extras != ({_normal(extra)} if extra else set()):
            continue
        parsed = _requirement.match(wanted)
        if parsed is None or _normal(parsed[1]) in _OF_SPARK:
            continue
        name = _normal(parsed[1])
        yield name, ""
        for part in (parsed[2] or "").split(","):
            if part.strip():
                yield name, part.strip()


def _files(item: metadata.Distribution) -> Iterator[tuple[Path, str]]:
    """The files of a distribution, and their places in an archive."""
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


def python_version() -> str:
    """What the executors' Python must be."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
