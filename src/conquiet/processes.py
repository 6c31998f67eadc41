"""Processes: a worker in each of N child processes, supervised, and stopped together.

    supervisor ──stdin──▶ child    its settings, then orders; the end of it: the supervisor died
    supervisor ◀──ready── child    one byte, when its worker starts

    starting ──ready──▶ running ──stop──▶ stopping ──▶ exit 0 (all finished) or 1
        │                  └ died or stuck ──backoff──▶ replaced
        └ exit 2 before any child was ready: cannot work, give up

Children are stopped through their stdin and not by signals, because some service managers
signal every process of a group: a child would count that and ours as two, and hurry.
"""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import importlib
import json
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from conquiet.backoff import Backoff
from conquiet.errors import ConfigError, ConquietError
from conquiet.stopping import Signals
from conquiet.worker import Health, Worker

logger = logging.getLogger("conquiet.processes")

FINISHED, FAILED, CANNOT_WORK = 0, 1, 2
"""Exit codes of a child and of the supervisor."""

_LOOK_SECONDS = 0.05
_SLACK_SECONDS = 2.0
"""What a child gets beyond its grace time to give messages back, before SIGKILL."""
_HEALTHY_SECONDS = 10.0
"""A child that ran this long dies of something new: the backoff begins anew."""
_WATCH_SECONDS = 5.0
"""How often a child shows its watchdog that its interpreter runs."""

# -P: a file of the working directory must not shadow a module before sys.path is set.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from conquiet.processes import _serve; _serve(int(sys.argv[3]))"
)
_is_child = False


def run_processes(
    target: Callable[..., Worker] | str,
    count: int,
    grace: float = 30.0,
    *,
    arguments: Mapping[str, Any] | None = None,
) -> int:
    """Run `count` workers, each in a process of its own, until SIGTERM or SIGINT; an exit code.

    `target` makes the worker in the child: a function at the top of a module, or its name as
    `module:function`; `arguments`, as JSON, are passed to it. A child that dies, or whose
    handler exceeds `Worker.stuck_after`, is replaced; one whose source has ended is not. The
    first signal stops all children softly, a second one ends their grace time.

    Returns 0 if everything in flight was finished, 1 if something was abandoned or killed,
    2 if no worker could be made.
    """
    if _is_child:
        raise ConfigError(
            "run_processes() was called by a module while a child process imports it;"
            ' move the call below: if __name__ == "__main__":'
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count={count!r}: must be a whole number of at least 1")
    if not 0 <= grace < float("inf"):
        raise ConfigError(f"grace={grace!r}: must be 0 seconds or more")
    name = target if isinstance(target, str) else _name_of(target)
    settings = {"target": name, "arguments": dict(arguments or {}), "grace": grace}
    return _Supervisor(name, json.dumps(settings).encode() + b"\n", count, grace).run()


# --- names ----------------------------------------------------------------------------------


def resolve(target: str) -> Any:
    """The object that `module:attribute` names; an error says what is wrong with the name."""
    module_name, _, path = target.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise ConfigError(f"{target!r} does not name an object; write module:name, as app:router")
    found: Any = _import(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(
                f"{module_name} has no {path!r}{_similar(name, dir(found))}"
            ) from None
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
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


def _name_of(target: Callable[..., Any]) -> str:
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "<?>")
    if not module or "<" in name:
        raise ConfigError(
            f"{target!r:.100} cannot be imported by a child process: give a function at the top"
            " of a module, or its name as 'module:function'"
        )
    return f"{_main_module() if module == '__main__' else module}:{name}"


def _main_module() -> str:
    """What a script is called when a child imports it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = Path(getattr(main, "__file__", None) or "<stdin>")
    if not file.stem.isidentifier():
        raise ConfigError(f"{file.name} is no module that a child process can import: rename it")
    return file.stem


# --- the supervisor -------------------------------------------------------------------------


class _Child:
    """A running child, its lifeline, and whether its worker has started."""

    def __init__(self, name: str, settings: bytes) -> None:
        self._ready, theirs = os.pipe()
        os.set_blocking(self._ready, False)
        command = [sys.executable, "-P", "-c", _CHILD, name, json.dumps(sys.path), str(theirs)]
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
        self.tell(settings)

    def tell(self, words: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # dead: the next look will see it
            self.process.stdin.write(words)
            self.process.stdin.flush()

    def listen(self) -> None:
        if not self.ran:
            with contextlib.suppress(BlockingIOError):
                self.ran = bool(os.read(self._ready, 1))

    def kill(self) -> None:
        """End it, and what its handlers have started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        os.close(self._ready)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class _Slot:
    """The place of one child: who runs in it, or when the next one will."""

    def __init__(self) -> None:
        self.child: _Child | None = None
        self.next_start: float | None = 0.0
        self.backoff = Backoff(first=0.1, cap=30.0)


class _Supervisor:
    def __init__(self, name: str, settings: bytes, count: int, grace: float) -> None:
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
                    time.sleep(_LOOK_SECONDS)
            finally:
                for slot in self._slots:
                    if slot.child is not None:
                        slot.child.kill()
                        slot.child.close()
        return self._code

    def _busy(self) -> bool:
        return any(slot.child or slot.next_start is not None for slot in self._slots)

    def _obey(self, signals: int, now: float) -> None:
        if signals and self._deadline is None:
            logger.info("stopping %d processes", len(self._slots))
            self._stop(now)
        if signals > 1 and not self._hurried:
            logger.warning("hurrying: what is not finished now will be delivered again")
            self._hurried = True
            self._deadline = min(self._deadline or now, now + _SLACK_SECONDS)
            self._tell_all(b"hurry\n")

    def _stop(self, now: float) -> None:
        self._deadline = now + self._grace + _SLACK_SECONDS
        for slot in self._slots:
            slot.next_start = None
        self._tell_all(b"stop\n")

    def _tell_all(self, words: bytes) -> None:
        for slot in self._slots:
            if slot.child is not None:
                slot.child.tell(words)

    def _look_after(self, slot: _Slot, now: float) -> None:
        child = slot.child
        if child is None:
            if slot.next_start is not None and now >= slot.next_start and self._may_start():
                self._start(slot, now)
            return
        child.listen()
        self._some_ran = self._some_ran or child.ran
        if self._deadline is not None and now > self._deadline:
            logger.error("process %d did not stop in time: killed", child.process.pid)
            child.kill()
        code = child.process.poll()
        if code is not None:
            child.close()
            slot.child = None
            self._ended(slot, child, code, now)

    def _may_start(self) -> bool:
        """The first child goes ahead: a fault that all would share is reported once."""
        return self._some_ran or not any(slot.child for slot in self._slots)

    def _start(self, slot: _Slot, now: float) -> None:
        slot.next_start = None
        try:
            slot.child = _Child(self._name, self._settings)
        except OSError as error:  # no memory, no process left: as good as a death
            slot.next_start = now + slot.backoff.next()
            logger.error("no process could be started: %s", error)

    def _ended(self, slot: _Slot, child: _Child, code: int, now: float) -> None:
        if self._deadline is not None:
            self._code = self._code or (FINISHED if code == FINISHED else FAILED)
        elif code == CANNOT_WORK and not self._some_ran:
            self._code = CANNOT_WORK
            self._stop(now)
        elif code != FINISHED:
            if now - child.born > _HEALTHY_SECONDS:
                slot.backoff.reset()
            wait = slot.backoff.next()
            slot.next_start = now + wait
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            logger.error("process %d %s; the next in %.1f s", child.process.pid, how, wait)


# --- the child ------------------------------------------------------------------------------


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


def _serve(ready: int) -> NoReturn:
    """The life of a child."""
    global _is_child
    _is_child = True
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
