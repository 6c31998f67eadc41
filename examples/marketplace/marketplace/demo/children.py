"""Children: processes of the demo that end with it, whatever it dies of.

A child is told its settings by the first line of its standard input, which then stays open: when
it closes, the child ends by itself. What it has to say, it prints as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conquiet.errors import ConquietError

_GRACE_SECONDS = 15.0


class ChildFailed(ConquietError):
    """A process of the demo ended before its work was done."""


class Child:
    """A module of the demo in a process, and in a process group, of its own."""

    def __init__(
        self, module: str, settings: Mapping[str, Any], log: Path, env: Mapping[str, str] = {}
    ) -> None:
        self.name = module.rpartition(".")[2]
        self._log = log
        self._has_ended = False
        self._last: dict[str, Any] | None = None
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its children
            )
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"demo-{self.name}", daemon=True).start()
        self.tell(json.dumps(dict(settings)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead: whoever waits for it will be told
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """The next thing that it says, or None when the time is over; raises if it has ended."""
        try:
            said = self._said.get(timeout=timeout)
        except queue.Empty:
            return None
        if said is None:
            self._said.put(None)  # for the next who asks
            raise ChildFailed(f"the {self.name} process ended by itself; {self._last_words()}")
        return said

    def end(self) -> dict[str, Any] | None:
        """Ask it to end, and wait; its last words. It is killed if it does not listen."""
        if self._has_ended:
            return self._last
        self._has_ended = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        with contextlib.suppress(queue.Empty):
            while (said := self._said.get(timeout=1.0)) is not None:
                self._last = said
        return self._last

    def kill(self) -> None:
        """End it and what it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(b"{"):  # Java may have something to say, too
                    with contextlib.suppress(ValueError):
                        self._said.put(json.loads(line))
        self._said.put(None)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            if lines:
                return f"its log ends with: {lines[-1][:300]} ({self._log})"
        return f"see {self._log}"


# --- in the child ---------------------------------------------------------------------------


def read_settings() -> dict[str, Any]:
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit(0)
    found: dict[str, Any] = json.loads(line)
    return found


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def when_orphaned(act: Callable[[], object]) -> None:
    """Do something when standard input closes: the demo is done, or gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        act()

    threading.Thread(target=wait, name="demo-lifeline", daemon=True).start()
