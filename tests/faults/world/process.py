"""A role of the world, and the process that has it now."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests import zygote

SERVICE = Path(__file__).with_name("service.py")
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Process:
    """Started again whenever it ends; what it tells is noted."""

    role: str
    config: Path
    folder: Path
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    killed_at: float | None = None
    recoveries: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Exit codes of those that ended by themselves."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with self.log.open("ab") as log:
            command = [sys.executable, str(SERVICE), self.role, str(self.config)]
            self.popen = zygote.Popen(command, cwd=ROOT, stderr=log, stdout=log, env=environment)

    def told(self) -> tuple[int, float, int] | None:
        assert self.popen is not None
        try:
            handled, memory, files = (
                (self.folder / f"{self.role}.{self.popen.pid}").read_text().split()
            )
        except (OSError, ValueError):
            return None
        return int(handled), float(memory), int(files)

    def kill(self) -> None:
        with self.lock:
            assert self.popen is not None
            self.popen.kill()
            self.popen.wait()
            self.killed_at = time.monotonic()
            self.start()

    def look(self, sample: bool) -> None:
        """Start again what ended; note when what was killed is at work again."""
        assert self.popen is not None
        if self.popen.poll() is not None:
            self.ended.append(self.popen.returncode)
            self.start()
        told = self.told()
        if told is None:
            return
        if self.killed_at is not None and told[0]:
            self.recoveries.append(time.monotonic() - self.killed_at)
            self.killed_at = None
        if sample:
            self.memory.append(told[1])
            self.files.append(told[2])
