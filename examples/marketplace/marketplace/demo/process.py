"""Run the parts of the demo as child processes that end with it, also when it is killed.

A child reads its settings from the first line of its standard input, which then stays open: when
it closes, the child exits. A child reports by lines of JSON on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conquiet import ConquietError

_GRACE_SECONDS = 15.0
_MAX_CHARS = 300
_MESSAGE_LINES = 10
"""How far below its first line the message of a Java error may end."""

_JAVA_ERROR = re.compile(
    r"(?:: |Exception in thread \"[^\"]*\" )*"
    r"(?!py4j|pyspark)((?:[a-z_]\w*\.)+[A-Z][\w$]*(?:Error|Exception)\b(?::.*)?)$"
)
"""An error with its package, as `java.lang.OutOfMemoryError: Java heap space`."""
_JAVA_FRAME = re.compile(r"\s+at [\w.$/<>]+\(|\s+\.\.\. \d+ more")
_JVM_DIED = re.compile(
    r"# There is insufficient memory|# A fatal error has been detected"
    r"|Invalid .* size: |Unrecognized VM option|Could not reserve enough space"
)
_TRACEBACK = "Traceback (most recent call last):"
_DAEMON = "/pyspark/daemon.py"
"""Spark's daemon of Python workers prints a traceback whenever a task is canceled."""
_RESTARTED = "; the next in "
"""A supervisor replaces a worker, as it should when the demo kills one."""
_LOGGED = re.compile(r".*\b(?:ERROR|CRITICAL|FATAL)\b(.*)")


class ChildFailed(ConquietError):
    """A process of the demo ended before its work was done."""


class Child:
    """Runs a module of the demo in a process, and in a process group, of its own."""

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
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"demo-{self.name}", daemon=True).start()
        self.send(json.dumps(dict(settings)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead: `hear` raises
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return its next report, or None after the timeout; raises if the child has exited."""
        try:
            report = self._reports.get(timeout=timeout)
        except queue.Empty:
            return None
        if report is None:
            self._reports.put(None)  # for the next call
            raise ChildFailed(f"the {self.name} process failed: {self._cause()}")
        return report

    def end(self) -> dict[str, Any] | None:
        """Ask it to exit, wait, and return its last report; kill it if it does not exit in time."""
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
            while (report := self._reports.get(timeout=1.0)) is not None:
                self._last = report
        return self._last

    def kill(self) -> None:
        """Kill it and the processes that it has started."""
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
                try:
                    self._reports.put(json.loads(line))
                except ValueError:  # Java prints here, too
                    self._keep(line)
        self._reports.put(None)

    def _keep(self, line: bytes) -> None:
        with contextlib.suppress(OSError), self._log.open("ab") as log:
            log.write(line)

    def _cause(self) -> str:
        """Name the first error of its log, and where the whole log is, in one line."""
        text = ""
        with contextlib.suppress(OSError):
            text = self._log.read_text(errors="replace")
        return f"{find_cause(text) or 'its log is empty'} (the whole log: {self._log})"


# --- the cause of a failure --------------------------------------------------------------------


def find_cause(log: str) -> str:
    """Return the line that names the first error, or the last line if none is recognized.

    An error of Java comes before the tracebacks of Python, wherever it is: when the JVM fails,
    Python only finds that its connection is refused.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    for find in (_java_errors, _python_errors, _logged_errors):
        for found in find(lines):
            return _shorten(found)
    return _shorten(lines[-1]) if lines else ""


def _java_errors(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if _JVM_DIED.match(line):
            yield line.lstrip("# ")
        elif not (found := _JAVA_ERROR.match(line)):
            continue
        elif line.endswith(_TRACEBACK):
            yield _end_of_traceback(lines, number)  # of a task in Python, reported by Java
        elif _has_frames(lines, number):
            yield found[1]


def _has_frames(lines: Sequence[str], number: int) -> bool:
    """Whether a stack of Java follows: an error of Python can have a dotted name, too."""
    return any(map(_JAVA_FRAME.match, lines[number + 1 : number + 1 + _MESSAGE_LINES]))


def _python_errors(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if line == _TRACEBACK and _DAEMON not in "".join(lines[number + 1 : number + 2]):
            yield _end_of_traceback(lines, number)


def _logged_errors(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if (found := _LOGGED.match(line)) and _RESTARTED not in line:
            yield found[1].strip(" :")


def _end_of_traceback(lines: Sequence[str], number: int) -> str:
    """The first line after the frames, which names the error."""
    rest = lines[number + 1 :]
    return next((line for line in rest if not line.startswith(" ")), lines[number])


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 1]}…"


# --- in the child ---------------------------------------------------------------------------


def read_settings() -> dict[str, Any]:
    """Read the next line of settings; exit if the demo has ended."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit(0)
    found: dict[str, Any] = json.loads(line)
    return found


def report(**facts: Any) -> None:
    """Print a line that `Child.hear` returns in the demo."""
    print(json.dumps(facts), flush=True)


def when_orphaned(act: Callable[[], object]) -> None:
    """Call `act` when standard input closes: the demo has ended, or was killed."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        act()

    threading.Thread(target=wait, name="demo-lifeline", daemon=True).start()
