"""Keeper: renews the leases of handlers that run long, in one thread for all of them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger("conquiet.events")

_LONGEST_SLEEP_SECONDS = 1.0


class Renewable(Protocol):
    """Something whose lease must not end yet."""

    def renew(self) -> None: ...


class Keeper:
    """A thread that renews every `every` seconds; it lives while there is something to renew."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._due: dict[Renewable, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, lease: Renewable) -> None:
        with self._lock:
            self._due[lease] = time.monotonic() + self._every
            # Not alive: it has ended, or stayed behind in the process that we were forked from.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._keep, name="conquiet-idempotency", daemon=True
                )
                self._thread.start()

    def remove(self, lease: Renewable) -> None:
        with self._lock:
            self._due.pop(lease, None)

    def _keep(self) -> None:
        while True:
            time.sleep(min(self._every / 4, _LONGEST_SLEEP_SECONDS))
            now = time.monotonic()
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                due = [lease for lease, at in self._due.items() if at <= now]
                for lease in due:
                    self._due[lease] = now + self._every
            for lease in due:
                try:
                    lease.renew()
                except Exception as error:  # noqa: BLE001 - the next round tries again
                    logger.warning("a lease could not be renewed: %r", error)
