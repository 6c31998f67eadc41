"""Runs inside Celery's unpacked suite: a Redis for each worker of pytest, and our transport.

At import, since Celery's own conftest reads the environment when it is imported.
"""

from __future__ import annotations

import os

import kombu.transport

from conquiet import embedded

SCHEME = os.environ["SUITE_SCHEME"]
if SCHEME != "redis" or os.environ.get("SUITE_TAKES_ALIAS"):
    import conquiet.kombu  # noqa: F401 - registers the scheme
if os.environ.get("SUITE_TAKES_ALIAS"):  # for tests that run for redis:// only
    aliases = kombu.transport.TRANSPORT_ALIASES
    aliases["redis"] = aliases["redis-streams"]

server = embedded.redis(private=True).start()
os.environ |= {
    "TEST_BROKER": f"{SCHEME}://127.0.0.1:{server.port}/0",
    "TEST_BACKEND": server.url,
    "REDIS_HOST": "127.0.0.1",
    "REDIS_PORT": str(server.port),
}
