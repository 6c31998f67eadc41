"""Supervising: the process that starts the workers of `handling`, and replaces one that dies."""

from __future__ import annotations

import logging
import os
import signal

from conquiet.processes import run_processes
from marketplace.demo.process import read_settings, when_orphaned
from marketplace.demo.settings import WORKERS

_GRACE_SECONDS = 5.0


def main() -> int:
    """Ends with the demo, and its workers with it."""
    settings = read_settings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    when_orphaned(lambda: os.kill(os.getpid(), signal.SIGTERM))
    target = "marketplace.demo.handling:make_worker"
    return run_processes(target, WORKERS, _GRACE_SECONDS, arguments=settings)


if __name__ == "__main__":
    raise SystemExit(main())
