"""Settings of a worker process, as `conquiet.config` loads them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from conquiet import config
from conquiet.config import Setting, read_address, read_boolean, read_text, seconds, whole

_P = "CONQUIET_WORKER_"
_own = partial(Setting, section="worker", empty=None)

SOURCE = _own(
    "source", f"{_P}SOURCE", "", read_text, "a URL, such as redis:?stream=NAME&group=NAME",
    "where a router's messages come from", True,
)  # fmt: skip
SINK = _own(
    "sink", f"{_P}SINK", "", read_text, "a URL, such as redis:?stream=NAME",
    "where a router's events go to", True,
)  # fmt: skip
BATCH_SIZE = _own(
    "batch_size", f"{_P}BATCH_SIZE", "", *whole(1, 100_000), "messages per batch (100)"
)
BATCH_WAIT = _own(
    "batch_wait_seconds", f"{_P}BATCH_WAIT_SECONDS", "", *seconds(0, 3_600),
    "how long to wait for a full batch (0)",
)  # fmt: skip
THREADS = _own("threads", f"{_P}THREADS", "", *whole(1, 1_000), "threads of a worker (1)")
CONCURRENCY = _own(
    "concurrency", f"{_P}CONCURRENCY", "", *whole(1, 100_000),
    "on an event loop, transactions in flight at once (100)",
)  # fmt: skip
ORDERED = _own(
    "ordered", f"{_P}ORDERED", "", read_boolean, "true or false", "keep the order of each key"
)
PROCESSES = _own(
    "processes", f"{_P}PROCESSES", "", *whole(1, 1_000),
    "workers, each in a process; one that ends is replaced",
)  # fmt: skip
MAX_ATTEMPTS = _own(
    "max_attempts", f"{_P}MAX_ATTEMPTS", "", *whole(1, 1_000_000),
    "deliveries before a dead letter (3; 10 in a database, 25 on Redis and brokers)",
)  # fmt: skip
DEAD_LETTERS = _own(
    "dead_letters",
    f"{_P}DEAD_LETTERS",
    "",
    read_text,
    "a path",
    "file to append failed messages to",
)
MAX_LINE_BYTES = _own(
    "max_line_bytes",
    f"{_P}MAX_LINE_BYTES",
    "",
    *whole(1, 1 << 40),
    "longest line accepted (32 MiB)",
)
GRACE = _own(
    "grace_seconds", f"{_P}GRACE_SECONDS", "", *seconds(0, 86_400),
    "time to finish messages in flight at a stop (30)",
)  # fmt: skip
STUCK_AFTER = _own(
    "stuck_after_seconds", f"{_P}STUCK_AFTER_SECONDS", "", *seconds(0.001, 30 * 86_400),
    "end a process whose handler takes longer",
)  # fmt: skip
HEALTH = _own(
    "health", f"{_P}HEALTH", "off", read_address, "HOST:PORT or off",
    "where /healthz, /readyz and /metrics answer; port 0 takes a free one",
)  # fmt: skip
HEALTH_DETAILS = _own(
    "health_details", f"{_P}HEALTH_DETAILS", "false", read_boolean, "true or false",
    "let /readyz name counts and errors also where it listens beyond loopback",
)  # fmt: skip
HISTORY = replace(config.HISTORY, section="worker")
LOG_FORMAT = replace(config.LOG_FORMAT, section="worker")
LOG_LEVEL = replace(
    config.LOG_LEVEL, section="worker", default="warning", meaning="the lowest level that is logged"
)

OF_WORKERS: tuple[Setting, ...] = (
    *(BATCH_SIZE, THREADS, CONCURRENCY, ORDERED, GRACE, STUCK_AFTER),
    *(HEALTH, HEALTH_DETAILS, HISTORY, LOG_FORMAT, LOG_LEVEL),
)
"""Of any worker, also that of an app."""

SETTINGS: tuple[Setting, ...] = (
    *(SOURCE, SINK, replace(config.BROKER, section="worker")),
    *(BATCH_SIZE, BATCH_WAIT, THREADS, CONCURRENCY, ORDERED, PROCESSES),
    *(MAX_ATTEMPTS, DEAD_LETTERS, MAX_LINE_BYTES, GRACE, STUCK_AFTER),
    *(HEALTH, HEALTH_DETAILS, HISTORY, LOG_FORMAT, LOG_LEVEL),
)
"""Of the worker of a router."""
