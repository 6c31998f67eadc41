"""The demo as its user runs it, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

MARK = "CONQUIET_DEMO_TEST"


class Demo:
    """A process of `conquiet demo`, with a temporary directory of its own."""

    def __init__(self, place: Path, *options: str, **env: str) -> None:
        self.folder = place / "results"
        self.scratch = place / "tmp"
        self.scratch.mkdir(parents=True)
        self._mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "conquiet", "demo", "--to", str(self.folder), *options]
        self.process = subprocess.Popen(
            command,
            cwd=place,
            env={**os.environ, "TMPDIR": str(self.scratch), MARK: self._mark, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_until(self, text: str) -> str:
        """What it says, up to the line with this text in it."""
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if text in line:
                return said
        raise AssertionError(f"it ended without {text!r}: {said}")

    def finish(self) -> tuple[int, str, str]:
        try:
            output, errors = self.process.communicate(timeout=500)
        except BaseException:
            self.process.terminate()  # it cleans up after itself
            self.process.wait(60)
            raise
        return self.process.returncode, output, errors

    def left(self) -> list[str]:
        """Processes that it started and that still run, and files beside the results."""
        found = [str(path) for path in self.scratch.iterdir()]
        wanted = f"{MARK}={self._mark}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().decode().replace("\0", " "))
            except OSError:
                continue  # it has ended, or is somebody else's
        return found


def lines_of(verdict: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {line["name"]: (line["expected"], line["found"]) for line in verdict["lines"]}
