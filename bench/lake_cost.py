"""What a process and all that it started cost: memory at its highest, and CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_EVERY_SECONDS = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_JAVA = "java"
"""A Java below a Java is about to become another program, and has its parent's memory till then."""


@dataclass
class Cost:
    """Resident memory of all processes together, a page that several share counted once."""

    peak_bytes: int = 0
    cpu: dict[int, float] = field(default_factory=dict)
    """Seconds by process; one that ended keeps what it had when it was last seen."""

    @property
    def peak_mb(self) -> int:
        return round(self.peak_bytes / 1e6)

    @property
    def cpu_seconds(self) -> float:
        return round(sum(self.cpu.values()), 1)

    def look(self, root: int) -> None:
        resident = 0
        for pid, parent in _tree(root):
            stat = _fields(pid)
            if stat is None:
                continue
            self.cpu[pid] = (int(stat[11]) + int(stat[12])) / _TICKS
            if _program(pid) != _JAVA or _program(parent) != _JAVA:
                resident += _share(pid)
        self.peak_bytes = max(self.peak_bytes, resident)


@contextmanager
def costing(root: int) -> Iterator[Cost]:
    """Look at a process again and again, until the block ends."""
    cost, done = Cost(), threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY_SECONDS):
            cost.look(root)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield cost
    finally:
        done.set()
        watcher.join()


def _tree(root: int) -> list[tuple[int, int]]:
    """A process and those below it, with their parents."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (stat := _fields(int(entry.name))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, left = [], [(root, 0)]
    while left:
        one = left.pop()
        found.append(one)
        left += [(child, one[0]) for child in children.get(one[0], [])]
    return found


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may hold spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _program(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/exe").resolve().name
    except OSError:
        return None


def _share(pid: int) -> int:
    """Bytes, of shared pages its part of them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
