"""A progress bar on stderr, for terminals and for work that takes longer than two seconds."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

_AFTER_SECONDS = 2.0
_EVERY_SECONDS = 0.1
_TICK_SECONDS = 0.5
_CELLS = 30


class Progress:
    """Shows how much is done, and leaves nothing behind on the screen.

    >>> with Progress("replaying", 200) as progress:
    ...     for done in range(200):
    ...         progress.show(done + 1)

    Without a total it counts. `after` is how long it stays silent. It writes to terminals only.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        after: float = _AFTER_SECONDS,
        stream: TextIO | None = None,
    ) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._stream = stream or sys.stderr
        self._is_shown = self._stream.isatty()
        self._began = time.monotonic()
        self._next = self._began + after
        self._has_drawn = False

    def __enter__(self) -> Progress:
        end_waiting()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    def show(self, done: int, what: str | None = None) -> None:
        """Set the number done, and the description if `what` is given."""
        self.done = done
        self.what = what or self.what
        if self._is_shown and time.monotonic() >= self._next:
            self.draw()

    def add(self, more: int = 1) -> None:
        self.show(self.done + more)

    def draw(self) -> None:
        """Draw the bar now, however recently it was drawn."""
        if not self._is_shown:
            return
        width = shutil.get_terminal_size().columns
        text = f"{self.what}  {self._bar()}"[: max(10, width - 1)]
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
        self._has_drawn = True
        self._next = time.monotonic() + _EVERY_SECONDS

    def clear(self) -> None:
        """Erase the bar, so that something else can be printed."""
        if self._has_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._has_drawn = False

    def _bar(self) -> str:
        spent = time.monotonic() - self._began
        speed = self.done / spent if spent > 0 else 0.0
        if not self.total:
            return f"{self.done:,}  {speed:,.0f}/s"
        part = min(1.0, self.done / self.total)
        full = round(part * _CELLS)
        left = (self.total - self.done) / speed if speed else 0.0
        ends = f"  {_clock(left)} left" if speed and self.done < self.total else ""
        return (
            f"[{'#' * full}{'.' * (_CELLS - full)}] {part:4.0%}  "
            f"{self.done:,} of {self.total:,}{ends}"
        )


class Waiting:
    """Shows a description and a clock, from the third second on, until its block is left.

    It runs in a thread: the work that it waits for occupies the main one.
    """

    def __init__(
        self, what: str, *, after: float = _AFTER_SECONDS, stream: TextIO | None = None
    ) -> None:
        self.what = what
        self._after = after
        self._stream = stream or sys.stderr
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Waiting:
        if self._stream.isatty():
            self._thread = threading.Thread(target=self._run, name="conquiet-waiting", daemon=True)
            self._thread.start()
            _waiting.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def show(self, what: str) -> None:
        """Replace the description."""
        self.what = what

    def end(self) -> None:
        """Erase it for good."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            _waiting.remove(self)

    def _run(self) -> None:
        began = time.monotonic()
        wait = self._after
        while not self._ended.wait(wait):
            wait = _TICK_SECONDS
            self._stream.write(f"\r\x1b[K{self.what}  {_clock(time.monotonic() - began)}")
            self._stream.flush()
        if wait != self._after:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


_waiting: list[Waiting] = []


def end_waiting() -> None:
    """Erase clocks, before a question is asked or a bar is drawn."""
    for waiting in _waiting:
        waiting.end()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
