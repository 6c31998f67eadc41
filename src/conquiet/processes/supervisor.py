"""The supervisor: starts the children, replaces those that die, and stops them together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from conquiet.backoff import Backoff
from conquiet.errors import ConfigError, ConquietError
from conquiet.processes.child import CANNOT_WORK, FAILED, FINISHED, in_child, name_of
from conquiet.shutdown import Signals
from conquiet.worker import Worker

logger = logging.getLogger("conquiet.processes")

_LOOK_SECONDS = 0.05
_SLACK_SECONDS = 2.0
"""Time beyond the grace time to give messages back, before SIGKILL."""
_HEALTHY_SECONDS = 10.0
"""A child that ran this long resets the backoff."""

# -P: a file of the working directory must not shadow a module before sys.path is set.
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from conquiet.processes.child import serve; serve(int(sys.argv[3]))"
)


def run_processes(
    target: Callable[..., Worker] | str,
    count: int,
    grace: float = 30.0,
    *,
    arguments: Mapping[str, Any] | None = None,
    presence: Presence | None = None,
) -> int:
    """Run `count` workers, each in a process of its own, until SIGTERM or SIGINT; an exit code.

    `target` builds the worker in the child: a function at the top of a module, or its name as
    `module:function`; `arguments`, as JSON, are passed to it. A child that dies, or whose
    handler exceeds `Worker.stuck_after`, is replaced; one whose source has ended is not. The
    first signal lets messages in flight finish, a second one ends the grace time. `presence` is
    kept up to date, for a health server.

    Returns 0 if everything in flight was finished, 1 if a message was abandoned or a child killed,
    2 if no worker could be built.
    """
    if in_child():
        raise ConfigError(
            "run_processes() was called by a module while a child process imports it;"
            ' move the call below: if __name__ == "__main__":'
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count={count!r}: must be a whole number of at least 1")
    if not 0 <= grace < float("inf"):
        raise ConfigError(f"grace={grace!r}: must be 0 seconds or more")
    name = target if isinstance(target, str) else name_of(target)
    settings = {"target": name, "arguments": dict(arguments or {}), "grace": grace}
    presence = presence or Presence()
    return _Supervisor(name, json.dumps(settings).encode() + b"\n", count, grace, presence).run()


class Presence:
    """Holds which processes of a supervisor are ready, and why others are not.

    `on_end` is called with the id of each process that has ended.
    """

    def __init__(self, on_end: Callable[[int], object] = lambda pid: None) -> None:
        self.troubles: tuple[str, ...] = ("no process has started",)
        """For each process that should run, why it is not ready; empty if it is."""
        self.is_stopping = False
        self.on_end = on_end

    def look(self) -> dict[str, int]:
        """Return counts, for `/readyz`; raise if a process is not ready."""
        ready = sum(not trouble for trouble in self.troubles)
        if ready < len(self.troubles):
            why = next(filter(None, self.troubles))
            raise ConquietError(f"{ready} of {len(self.troubles)} processes are ready; {why}")
        return {"processes": ready}


class _Child:
    """A running child, its lifeline, and whether its worker has started."""

    def __init__(self, name: str, settings: bytes) -> None:
        self._ready, theirs = os.pipe()
        os.set_blocking(self._ready, False)
        command = [sys.executable, "-P", "-c", _COMMAND, name, json.dumps(sys.path), str(theirs)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=(theirs,),
                process_group=0,  # Ctrl-C is for the supervisor, who passes it on once
            )
        except BaseException:
            os.close(self._ready)
            raise
        finally:
            os.close(theirs)
        self.born = time.monotonic()
        self.ran = False
        self.trouble = "its worker has not started"
        self._heard = b""
        self.send(settings)

    def send(self, words: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # dead: the next poll will notice
            self.process.stdin.write(words)
            self.process.stdin.flush()

    def listen(self) -> None:
        """Read what the worker reports: a line per second, empty if it is ready."""
        with contextlib.suppress(BlockingIOError):
            while heard := os.read(self._ready, 65536):
                self.ran = True
                self._heard = (self._heard + heard)[-65536:]
        *lines, self._heard = self._heard.split(b"\n")
        if lines:
            self.trouble = lines[-1].decode(errors="replace")

    def kill(self) -> None:
        """Kill it and the processes of its handlers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        os.close(self._ready)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class _Slot:
    """The place of one child: the running child, or the time of the next start, or neither."""

    def __init__(self) -> None:
        self.child: _Child | None = None
        self._next_start: float | None = 0.0
        self._backoff = Backoff(first=0.1, cap=30.0)

    @property
    def is_busy(self) -> bool:
        return self.child is not None or self._next_start is not None

    @property
    def trouble(self) -> str:
        return "a process has ended" if self.child is None else self.child.trouble

    def is_due(self, now: float) -> bool:
        return self._next_start is not None and now >= self._next_start

    def start(self, name: str, settings: bytes, now: float) -> None:
        self._next_start = None
        try:
            self.child = _Child(name, settings)
        except OSError as error:  # no memory, no process left: treated like a death
            self.start_later(now)
            logger.error("no process could be started: %s", error)

    def start_later(self, now: float, *, was_healthy: bool = False) -> float:
        """Start another child after a pause, which grows while children die young; return it."""
        if was_healthy:
            self._backoff.reset()
        wait = self._backoff.next()
        self._next_start = now + wait
        return wait

    def start_no_more(self) -> None:
        self._next_start = None

    def end_child(self) -> None:
        """Release a child that has ended."""
        if self.child is not None:
            self.child.close()
            self.child = None


class _Supervisor:
    def __init__(
        self, name: str, settings: bytes, count: int, grace: float, presence: Presence
    ) -> None:
        self._presence = presence
        self._name = name
        self._settings = settings
        self._grace = grace
        self._slots = [_Slot() for _ in range(count)]
        self._deadline: float | None = None
        self._hurried = False
        self._some_ran = False
        self._code = FINISHED

    def run(self) -> int:
        with Signals() as signals:
            try:
                while self._busy():
                    now = time.monotonic()
                    self._obey(signals.count, now)
                    for slot in self._slots:
                        self._look_after(slot, now)
                    self._presence.troubles = tuple(slot.trouble for slot in self._slots)
                    time.sleep(_LOOK_SECONDS)
            finally:
                for slot in self._slots:
                    if slot.child is not None:
                        slot.child.kill()
                        slot.end_child()
        return self._code

    def _busy(self) -> bool:
        return any(slot.is_busy for slot in self._slots)

    def _obey(self, signals: int, now: float) -> None:
        if signals and self._deadline is None:
            logger.info("stopping %d processes", len(self._slots))
            self._stop(now)
        if signals > 1 and not self._hurried:
            logger.warning("hurrying: unfinished messages will be delivered again")
            self._hurried = True
            self._deadline = min(self._deadline or now, now + _SLACK_SECONDS)
            self._send_all(b"hurry\n")

    def _stop(self, now: float) -> None:
        self._presence.is_stopping = True
        self._deadline = now + self._grace + _SLACK_SECONDS
        for slot in self._slots:
            slot.start_no_more()
        self._send_all(b"stop\n")

    def _send_all(self, words: bytes) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.send(words)

    def _look_after(self, slot: _Slot, now: float) -> None:
        child = slot.child
        if child is None:
            if slot.is_due(now) and self._may_start():
                slot.start(self._name, self._settings, now)
            return
        child.listen()
        self._some_ran = self._some_ran or child.ran
        if self._deadline is not None and now > self._deadline:
            logger.error("process %d did not stop in time: killed", child.process.pid)
            child.kill()
        code = child.process.poll()
        if code is not None:
            slot.end_child()
            self._presence.on_end(child.process.pid)
            self._note_end(slot, child, code, now)

    def _may_start(self) -> bool:
        """Return whether a child may start: the first goes ahead, to report a common fault once."""
        return self._some_ran or not any(slot.child for slot in self._slots)

    def _note_end(self, slot: _Slot, child: _Child, code: int, now: float) -> None:
        if self._deadline is not None:
            self._code = self._code or (FINISHED if code == FINISHED else FAILED)
        elif code == CANNOT_WORK and not self._some_ran:
            self._code = CANNOT_WORK
            self._stop(now)
        elif code != FINISHED:
            was_healthy = now - child.born > _HEALTHY_SECONDS
            wait = slot.start_later(now, was_healthy=was_healthy)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            logger.error("process %d %s; the next in %.1f s", child.process.pid, how, wait)
