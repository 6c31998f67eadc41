"""The versions of Kombu that the suites are run on."""

from __future__ import annotations

import subprocess
import sys


def version_of(package: str, python: str = sys.executable) -> str:
    """The version that an interpreter would import."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def ordered(version: str) -> tuple[int, ...]:
    """Of a release number what can be compared."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def known_since(numbers: dict[str, int], version: str) -> int:
    """The number of the newest version that is not newer than this one."""
    newest = max((one for one in numbers if ordered(one) <= ordered(version)), key=ordered)
    return numbers[newest]


OLDEST = "5.6.2"
INSTALLED = version_of("kombu")
