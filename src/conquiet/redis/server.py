"""Server: which Redis is this, so that newer commands are used only where they exist."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from conquiet.redis.wire import Wire

_field = re.compile(rb"^(redis_version|valkey_version|server_name):(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Server:
    """Name and version. Valkey goes by the version of Redis whose commands it knows: 7.2.4.

    >>> Server("redis", "6.2.14").at_least("6.2"), Server("redis", "6.0.16").at_least("6.2")
    (True, False)
    """

    name: str
    version: str

    def at_least(self, version: str) -> bool:
        return _numbers(self.version) >= _numbers(version)


def server_of(client: Any, key: str = "") -> Server:
    """Ask the server, or in a cluster the node that holds `key`."""
    wire = client if isinstance(client, Wire) else Wire(client)
    found = dict(_field.findall(wire.call(key.encode(), b"INFO", b"server")))
    is_valkey = b"valkey_version" in found
    return Server(
        "valkey" if is_valkey else "redis", found.get(b"redis_version", b"6.0.0").decode()
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
