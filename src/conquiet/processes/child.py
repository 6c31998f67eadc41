"""A child: builds its worker from `module:attribute`, and runs it until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import faulthandler
import gc
import importlib
import json
import logging
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from conquiet.config import MissingExtra
from conquiet.errors import ConfigError, ConquietError
from conquiet.shutdown import Signals
from conquiet.worker import Health, Worker

logger = logging.getLogger("conquiet.processes")

FINISHED, FAILED, CANNOT_WORK = 0, 1, 2
"""Exit codes of a child and of the supervisor."""

_LOOK_SECONDS = 0.05
_REPORT_SECONDS = 1.0
_REPORT_CHARS = 300
_WATCH_SECONDS = 5.0
"""How often a child resets its watchdog."""

_serving = False


def in_child() -> bool:
    return _serving


@contextlib.contextmanager
def exclude_loaded_objects() -> Iterator[None]:
    """Keep the garbage collector from visiting what is loaded, while a worker runs.

    Messages in flight outlive a collection, so every few thousand messages it visits all objects of
    the process. Most of them are modules and classes, which never become garbage.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def serve(ready: int) -> NoReturn:
    """Run a child until it is stopped."""
    global _serving
    _serving = True
    orders = _Orders(_take_stdin())
    settings = orders.settings()
    with Signals() as signals:
        worker = _make_worker(settings)
        stop = partial(
            worker.stop, settings["grace"], hurry=lambda: orders.hurry or signals.count > 1
        )

        def is_over() -> bool:
            return bool(orders.stop or signals.count or not worker.health().threads_alive)

        with exclude_loaded_objects():
            if worker.is_async:
                asyncio.run(_work_async(worker, ready, is_over, stop))
            else:
                _report_ready(worker, ready)
                worker.start()
                while not is_over():
                    time.sleep(_LOOK_SECONDS)
            finished = stop()
    if finished:
        sys.exit(FINISHED if worker.failure is None else FAILED)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(FAILED)  # a handler that still runs could keep a plain exit waiting


async def _work_async(
    worker: Worker, ready: int, is_over: Callable[[], bool], stop: Callable[[], bool]
) -> None:
    try:
        await worker.__aenter__()
    except ConquietError as error:
        _refuse(error)
    try:
        _report_ready(worker, ready)
        while not is_over():
            await asyncio.sleep(_LOOK_SECONDS)
        stop()  # here it sets the grace time only; the end of the block waits
    finally:
        await worker.__aexit__()


def _report_ready(worker: Worker, ready: int) -> None:
    os.write(ready, b"\n")
    threading.Thread(
        target=_report, args=(worker, ready), name="conquiet-report", daemon=True
    ).start()
    threading.Thread(
        target=_watch, args=(worker.stuck_after,), name="conquiet-watch", daemon=True
    ).start()


def _report(worker: Worker, ready: int) -> None:
    """Tell the supervisor, every second, in a line why the worker is not ready; empty if it is."""
    os.set_blocking(ready, False)  # a supervisor that does not read must not stop this thread
    pause = threading.Event()
    while True:
        try:
            worker.health().look()
            line = b"\n"
        except ConquietError as error:
            line = " ".join(str(error)[:_REPORT_CHARS].split()).encode(errors="replace") + b"\n"
        with contextlib.suppress(OSError):
            os.write(ready, line)
        pause.wait(_REPORT_SECONDS)


class _Orders:
    """The orders of the supervisor, read from the lifeline by a thread."""

    def __init__(self, lifeline: int) -> None:
        self.stop = self.hurry = False
        self._lifeline = lifeline
        self._rest = b""

    def settings(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            heard = os.read(self._lifeline, 65536)
            if not heard:
                sys.exit(FINISHED)  # the supervisor died before it sent the settings
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
    """Hide the lifeline from handlers that read stdin, and from their child processes."""
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
            raise ConfigError(f"{settings['target']} returned {worker!r:.80}, not a Worker")
        worker.on_stuck = _end_process_after(worker.on_stuck)
        if not worker.is_async:  # else its start on the event loop checks the chain
            worker.build_chain()
    except ConquietError as error:
        _refuse(error)
    return worker


def _refuse(error: ConquietError) -> NoReturn:
    logger.error("%s", error)
    sys.exit(CANNOT_WORK)


def _end_process_after(also: Callable[[Health], object] | None) -> Callable[[Health], object]:
    def on_stuck(health: Health) -> None:
        """End this process, since a thread cannot be ended; the supervisor replaces it."""
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
    backtracks for ever, blocks every other thread of the process.
    """
    if not stuck_after < threading.TIMEOUT_MAX:
        return
    pause = threading.Event()
    while True:
        faulthandler.dump_traceback_later(stuck_after, file=2, exit=True)
        pause.wait(min(_WATCH_SECONDS, stuck_after / 4))


# --- names of objects -----------------------------------------------------------------------


def resolve(target: str) -> Any:
    """Return the object that a `target` such as `app:router` names, importing its module.

    Raises `ConfigError` with the reason.
    """
    module_name, _, path = target.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise ConfigError(f"{target!r} does not name an object; write module:name, as app:router")
    found: Any = _import(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(
                f"{module_name} has no {path!r}{_suggest(name, dir(found))}"
            ) from None
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except MissingExtra:  # it names the command that installs it
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            known = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
            raise ConfigError(
                f"no module named {missing!r}{_similar(missing, known)};"
                " run this where the module is, or set PYTHONPATH"
            ) from error
        raise ConfigError(
            f"{name} imports {missing!r}, which is not installed: pip install it"
        ) from error
    except Exception as error:
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _similar(name: str, known: list[str]) -> str:
    public = [item for item in known if not item.startswith("_")]
    close = difflib.get_close_matches(name, public, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _suggest(name: str, known: list[str]) -> str:
    public = ", ".join(item for item in known if not item.startswith("_"))
    return _similar(name, known) or (f"; there are: {public[:200]}" if public else "")


def name_of(target: Callable[..., Any]) -> str:
    """Return the `module:attribute` by which a child finds a function."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "<?>")
    if not module or "<" in name:
        raise ConfigError(
            f"{target!r:.100} cannot be imported by a child process: give a function at the top"
            " of a module, or its name as 'module:function'"
        )
    return f"{_main_module() if module == '__main__' else module}:{name}"


def _main_module() -> str:
    """Return the name by which a child imports the running script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = Path(getattr(main, "__file__", None) or "<stdin>")
    if not file.stem.isidentifier():
        raise ConfigError(f"{file.name} is not a module that a child process can import: rename it")
    return file.stem
