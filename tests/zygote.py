"""Child processes of tests, forked from a process that has imported what they import.

    Popen, run ──request, stdin, stdout, stderr──▶ zygote ──fork, fork──▶ child of the test

A child is a process like any other: it has its own pid, arguments, environment, working folder and
exit code, and it can be signaled and killed. Only the half of a second in which Python imports
SQLAlchemy and redis-py is saved. A test of that start, of the command line of a process or of an
option of Python takes `subprocess` instead. A command that is not plain Python falls back to it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_LARGEST = 1 << 20
_SET_CHILD_SUBREAPER = 36
_WARM = (
    *("sqlalchemy", "sqlalchemy.orm", "sqlalchemy.dialects.postgresql.psycopg", "psycopg"),
    *("sqlalchemy.dialects.sqlite", "alembic", "redis", "redis.asyncio", "redis.cluster"),
    *("msgspec", "prometheus_client", "kombu", "conquiet.sql", "conquiet.redis", "conquiet.kombu"),
    *("conquiet.queue", "conquiet.events", "conquiet.relay", "conquiet.operations"),
    *("conquiet.cli.outbox", "conquiet.cli.worker", "conquiet.cli.relay", "conquiet.cli.queue"),
    *("conquiet.cli.streams", "conquiet.cli.dead_letters", "conquiet.cli.kombu"),
    *("conquiet.processes", "conquiet.embedded"),
)


class Popen(subprocess.Popen[Any]):
    """A child that the zygote forks."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        asked = signature.bind(self, *given, **named).arguments
        program = _program(asked)
        if program is None:
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        inside = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        files = [number if file == -1 else file for number, file in enumerate(inside)]
        request = {
            "program": program,
            "cwd": os.fspath(asked["cwd"] or os.getcwd()),
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "new session": asked["start_new_session"],
        }
        try:
            self.pid = _zygote().fork(request, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def run(
    command: Any,
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more["stdout"] = more["stderr"] = subprocess.PIPE
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _program(asked: dict[str, Any]) -> list[str] | None:
    """Return the arguments after Python's name, or None if only a new Python can run them."""
    special = ("preexec_fn", "pass_fds", "shell", "executable", "gids")
    arguments = asked["args"]
    if isinstance(arguments, (str, bytes, os.PathLike)) or any(asked[name] for name in special):
        return None
    command = [os.fspath(one) for one in arguments]
    if command[0] != sys.executable or len(command) < 2:
        return None
    first = command[3:] if command[1] == "-W" else command[1:]
    if first[0].startswith("-") and first[0] not in ("-m", "-c"):
        return None
    return command[1:]


# --- in the test --------------------------------------------------------------------------------


class _Zygote:
    """Owns the process that forks, and the socket to it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Threads of a library for linear algebra would be lost in a fork.
            one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
                cwd=_ROOT,
                env={**os.environ, **one_thread},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Return the pid of a new child of this process."""
        with self._lock:
            # The child's parent ends at once, and the nearest reaper above adopts the child.
            _be_reaper(True)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                answer = self._socket.recv(64)
            finally:
                _be_reaper(False)
        if not answer:
            raise RuntimeError("the zygote of the tests has ended; see its messages above")
        return int(answer)

    def end(self) -> None:
        if os.getpid() == self._owner:  # not in a fork of the tests
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._process.wait()


_made: list[_Zygote] = []
_making = threading.Lock()


def _zygote() -> _Zygote:
    with _making:
        if not _made:
            _made.append(_Zygote())
        return _made[0]


def _be_reaper(is_reaper: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(is_reaper), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


# --- in the zygote ------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each request; return in the children alone."""
    while True:
        request, files, _, _ = socket.recv_fds(requests, _LARGEST, 3)
        if not request:
            os._exit(0)  # the tests have ended
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                requests.close()
                os.close(reading)
                os.close(writing)
                return json.loads(request), list(files)
            os.write(writing, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(reading, 64))
        for file in (reading, writing, *files):
            os.close(file)


def _take_place(request: dict[str, Any], files: list[int], paths: list[str]) -> None:
    """Become the process that was asked for, up to its first line."""
    if request["new session"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    reading = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(reading, "utf-8")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "strict", through)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", True)  # type: ignore[misc]
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, named), *paths]
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def _text(number: int, errors: str, through: bool) -> io.TextIOWrapper:
    raw: Any = io.FileIO(number, "wb", closefd=False)
    out = raw if through else io.BufferedWriter(raw)
    return io.TextIOWrapper(out, "utf-8", errors, write_through=through)


def _run(program: list[str]) -> None:
    """Run a module, a string or a file as the main program."""
    if program[0] == "-W":
        warnings.simplefilter(program[1])  # type: ignore[arg-type]
        program = program[2:]
    how, *rest = program
    if how == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(how).resolve().parent))
        sys.argv = program
        runpy.run_path(how, run_name="__main__")


def main(requests: socket.socket) -> None:
    """Import, then fork for ever; a child goes on as the main program, and ends as any does."""
    paths = sys.path[1:]  # without the folder that -m adds
    for name in _WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with closing(requests):
        request, files = _serve(requests)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_place(request, files, paths)
    _run(request["program"])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
