"""A child: makes its worker, and runs it until the supervisor, or a signal, says stop."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from conquiet.errors import ConfigError, ConquietError
from conquiet.processes.target import resolve
from conquiet.stopping import Signals
from conquiet.worker import Health, Worker

logger = logging.getLogger("conquiet.processes")

FINISHED, FAILED, CANNOT_WORK = 0, 1, 2
"""Exit codes of a child and of the supervisor."""

_LOOK_SECONDS = 0.05
_WATCH_SECONDS = 5.0
"""How often a child shows its watchdog that its interpreter runs."""

_serving = False


def in_child() -> bool:
    return _serving


def serve(ready: int) -> NoReturn:
    """The life of a child."""
    global _serving
    _serving = True
    orders = _Orders(_take_stdin())
    settings = orders.settings()
    with Signals() as signals:
        worker = _make_worker(settings)
        os.write(ready, b"!")
        os.close(ready)
        threading.Thread(
            target=_watch, args=(worker.stuck_after,), name="conquiet-watch", daemon=True
        ).start()
        worker.start()
        while not (orders.stop or signals.count) and worker.health().threads_alive:
            time.sleep(_LOOK_SECONDS)
        finished = worker.stop(settings["grace"], hurry=lambda: orders.hurry or signals.count > 1)
    if finished:
        sys.exit(FINISHED)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(FAILED)  # a handler that still runs could keep a plain exit waiting


class _Orders:
    """What the supervisor wants, read from the lifeline by a thread of its own."""

    def __init__(self, lifeline: int) -> None:
        self.stop = self.hurry = False
        self._lifeline = lifeline
        self._rest = b""

    def settings(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            heard = os.read(self._lifeline, 65536)
            if not heard:
                sys.exit(FINISHED)  # the supervisor died before it could say anything
            self._rest += heard
        line, _, self._rest = self._rest.partition(b"\n")
        threading.Thread(target=self._listen, name="conquiet-lifeline", daemon=True).start()
        found: dict[str, Any] = json.loads(line)
        return found

    def _listen(self) -> None:
        heard = self._rest
        while True:
            self.stop = self.stop or b"stop" in heard
            self.hurry = self.hurry or b"hurry" in heard
            heard = os.read(self._lifeline, 4096)
            if not heard:
                break
        self.stop = True


def _take_stdin() -> int:
    """Keep the lifeline from handlers that read stdin, and from what they start."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def _make_worker(settings: dict[str, Any]) -> Worker:
    try:
        worker = resolve(settings["target"])
        if not isinstance(worker, Worker) and callable(worker):
            worker = worker(**settings["arguments"])
        if not isinstance(worker, Worker):
            raise ConfigError(f"{settings['target']} made {worker!r:.80} and not a Worker")
        worker.on_stuck = _ending(worker.on_stuck)
        worker.router.start()  # refuses a chain that cannot work
    except ConquietError as error:
        logger.error("%s", error)
        sys.exit(CANNOT_WORK)
    return worker


def _ending(also: Callable[[Health], object] | None) -> Callable[[Health], object]:
    def on_stuck(health: Health) -> None:
        """No thread can be ended from outside, but a process can; the supervisor replaces it."""
        try:
            if also is not None:
                also(health)
        finally:
            logging.shutdown()
            faulthandler.dump_traceback(file=2)  # where does it hang?
            os.killpg(0, signal.SIGKILL)

    return on_stuck


def _watch(stuck_after: float) -> None:
    """Keep the watchdog from ending this process; it needs no interpreter lock to do so.

    A handler inside a C function that keeps the lock, such as a regular expression that
    backtracks for ever, stops every other thread here, the keeper of the worker included.
    """
    if not stuck_after < threading.TIMEOUT_MAX:
        return
    pause = threading.Event()
    while True:
        faulthandler.dump_traceback_later(stuck_after, file=2, exit=True)
        pause.wait(min(_WATCH_SECONDS, stuck_after / 4))
