"""SIGTERM, with respect for whoever handled it before."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from conquiet.queue.errors import QueueError


class SigtermHandler:
    """Installed when made; calls `stop` and then the previous handler."""

    def __init__(self, stop: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise QueueError(
                "Python takes signal handlers in the main thread only: ask for SIGTERM there, or "
                "call stop() from a handler of your own"
            )
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None:
            raise QueueError(
                "SIGTERM has a handler that was not installed by Python, and so could not be kept: "
                "call stop() from it"
            )
        self._stop = stop
        self._previous = previous
        self._installed = self._handle  # one object, to be recognised again
        signal.signal(signal.SIGTERM, self._installed)

    def restore(self) -> None:
        """Put the previous handler back, unless somebody has installed another one since."""
        if signal.getsignal(signal.SIGTERM) is self._installed:
            signal.signal(signal.SIGTERM, self._previous)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stop()
        if callable(self._previous):  # SIG_DFL and SIG_IGN are not
            self._previous(number, frame)
