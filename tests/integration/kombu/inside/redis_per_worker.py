"""Runs inside the unpacked suite: a Redis for each worker of pytest, and our transport."""

from __future__ import annotations

import os

import kombu.transport
import pytest

from conquiet import embedded

SCHEME = os.environ["SUITE_SCHEME"]
if SCHEME != "redis":
    import conquiet.kombu  # noqa: F401 - registers the schemes

if os.environ.get("SUITE_TAKES_ALIAS"):
    aliases = kombu.transport.TRANSPORT_ALIASES
    for scheme in ("redis", "rediss", "sentinel"):
        aliases[scheme] = aliases[f"{scheme}-streams"]


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession"):  # xdist's controller runs no test
        return
    server = embedded.redis(private=True).start()
    config.add_cleanup(server.stop)
    os.environ |= {"REDIS_HOST": "127.0.0.1", "REDIS_6379_TCP": str(server.port)}
