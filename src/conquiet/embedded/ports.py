"""A port that a server can keep, over its restarts too."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port below those that the kernel gives to clients.

    A client that tries to reach a stopped server on one of the kernel's own ports may be given that
    very port, connect to itself, and keep the server from coming back.
    """
    first = 32768
    with contextlib.suppress(OSError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, first) if first > 11_000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
