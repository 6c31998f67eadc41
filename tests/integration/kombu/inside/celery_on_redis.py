"""Runs inside Celery's unpacked suite: a Redis for each worker of pytest, and our transport.

At import, since Celery's own conftest reads the environment when it is imported.
"""

from __future__ import annotations

import os

from conquiet import embedded

SCHEME = os.environ["SUITE_SCHEME"]
if SCHEME != "redis":
    import conquiet.kombu  # noqa: F401 - registers the scheme

server = embedded.redis(private=True).start()
os.environ |= {
    "TEST_BROKER": f"{SCHEME}://127.0.0.1:{server.port}/0",
    "TEST_BACKEND": server.url,
    "REDIS_HOST": "127.0.0.1",
    "REDIS_PORT": str(server.port),
}
