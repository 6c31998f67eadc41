"""Bell: a file descriptor that is readable while rung, so that an event loop does not sleep."""

from __future__ import annotations

import os


class Bell:
    """Made when it is first rung; most loops never need it."""

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self.is_rung = False

    @property
    def fd(self) -> int:
        return self._pipe()[0]

    def _pipe(self) -> tuple[int, int]:
        if self._ends is None:
            self._ends = os.pipe()
        return self._ends

    def ring(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            os.write(self._pipe()[1], b"!")

    def silence(self) -> None:
        if self.is_rung:
            self.is_rung = False
            os.read(self.fd, 1)

    def close(self) -> None:
        ends, self._ends, self.is_rung = self._ends, None, False
        for end in ends or ():
            os.close(end)
