"""Servers and programs that a machine may lack: their tests are skipped here, and fail in CI."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

import pytest

from conquiet.errors import ConfigError

Found = TypeVar("Found")

PREFIX = "needs "
PACKAGES = {
    "Java 17 or newer for Spark": "openjdk-17-jre-headless",
    "PgBouncer": "pgbouncer",
    "PostgreSQL": "postgresql",
    "RabbitMQ": "rabbitmq-server",
    "Redis": "redis-server",
    "buildah": "buildah",
    "chromium": "chromium",
    "fish": "fish",
    "mmdebstrap": "mmdebstrap",
    "openssl": "openssl",
    "promtool": "prometheus",
    "setpriv": "util-linux",
    "zsh": "zsh",
}
"""The Debian packages of what tests need."""


def missing(what: str, why: object) -> NoReturn:
    """Skip the test that calls it, for a reason that `left_out` recognizes."""
    reason = f"{PREFIX}{what}: {why}"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"nothing may be missing in CI, but this test {reason}", pytrace=False)
    pytest.skip(reason)


def found(what: str, find: Callable[[], Found]) -> Found:
    """Return the outcome of `find`, or skip the test if the server is not installed."""
    try:
        return find()
    except ConfigError as error:
        missing(what, error)


def left_out(reasons: Iterable[str]) -> str:
    """Say in one line which tests were skipped for want of what, and the command that installs it.

    >>> left_out(["needs zsh: apt-get install zsh", "needs a checkout that every user may read"])
    'left out: 1 test of zsh, 1 of a checkout that every user may read; to run more of them: \
sudo apt-get install --no-install-recommends zsh'
    """
    wanting = [reason.removeprefix(PREFIX) for reason in reasons if reason.startswith(PREFIX)]
    counts = Counter(text.partition(":")[0] for text in wanting)
    if not counts:
        return ""
    listed = [f"{count} of {name}" for name, count in counts.most_common()]
    first = counts.most_common(1)[0][1]
    listed[0] = listed[0].replace(" of ", " test of " if first == 1 else " tests of ", 1)
    line = f"left out: {', '.join(listed)}"
    packages = sorted(PACKAGES[name] for name in counts if name in PACKAGES)
    if packages:
        install = f"sudo apt-get install --no-install-recommends {' '.join(packages)}"
        line += f"; to run {'them' if len(packages) == len(counts) else 'more of them'}: {install}"
    return line
