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
        if self._ends is None:
            self._ends = os.pipe()
        return self._ends[0]

    def ring(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            _ = self.fd
            os.write(self._ends[1], b"!")  # type: ignore[index]

    def silence(self) -> None:
        if self.is_rung:
            self.is_rung = False
            os.read(self.fd, 1)

    def close(self) -> None:
        ends, self._ends, self.is_rung = self._ends, None, False
        for end in ends or ():
            os.close(end)
