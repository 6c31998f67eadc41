"""Other libraries: their own virtual environment, and a script for each that prints seconds."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
HOME = HERE.parent.parent / ".venv-peers"
PACKAGES = ("faststream[redis]", "taskiq-redis", "streaq")
_SECONDS = 120


class Peer(NamedTuple):
    """A script beside this file, how many messages are enough to tell its rate, and options."""

    script: str
    messages: int
    options: tuple[str, ...] = ()


PEERS: Mapping[str, Peer] = {
    "FastStream, batches of 100": Peer("faststream_peer.py", 20_000, ("batch",)),
    "FastStream, one by one": Peer("faststream_peer.py", 3_000, ("single",)),
    "taskiq-redis": Peer("taskiq_peer.py", 2_000, ("idle",)),
    "streaq": Peer("streaq_peer.py", 2_000),
}

WAITING: Mapping[str, Peer] = {
    "FastStream": Peer("faststream_peer.py", 3_000, ("wait",)),
    "taskiq-redis": Peer("taskiq_peer.py", 3_000, ("wait",)),
}
"""With handlers that await 50 ms, 100 in flight."""


def rate(python: Path, url: str, peer: Peer) -> float | None:
    """Messages per second, or None if it failed."""
    command = [str(python), str(HERE / peer.script), url, str(peer.messages), *peer.options]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        return peer.messages / float(ended.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        print(f"{peer.script} failed and is left out: {error}", file=sys.stderr)
        return None


def interpreter(*, make: bool) -> Path | None:
    """The Python that has the other libraries; made if need be."""
    if not make and not (HOME / "complete").exists():
        print("no other libraries: run without --quick once to install them", file=sys.stderr)
        return None
    return environment(HOME, PACKAGES)


def environment(home: Path, packages: Sequence[str]) -> Path | None:
    """The Python of a virtual environment with these packages, made if need be."""
    python = home / "bin" / "python"
    marker = home / "complete"
    if marker.exists():
        return python
    print(f"installing {', '.join(packages)} into {home.name}", file=sys.stderr)
    venv.create(home, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", *packages]
    if subprocess.run(install).returncode != 0:
        print("they cannot be installed and are left out", file=sys.stderr)
        return None
    marker.touch()
    return python
