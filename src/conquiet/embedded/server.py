"""A private server: started, killed and restarted on demand, and ended with this process.

A guardian process ends the server also if this process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from conquiet.errors import ConfigError

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.002
_AGAIN_SECONDS = 0.05

# A start that ends with one of these in the log is tried again: another process took the port, or
# the kernel has not yet finished with a server that was killed.
_TRANSIENT = ("Address already in use", "pre-existing shared memory block")


# Both scripts take a process to be the one in server.pid only if it was born at the same clock tick
# (field 22 of its stat): a pid may be in use again by the time that it is needed.
_BORN = 'born() { set -- $(cat "/proc/$1/stat" 2>/dev/null); echo "${22:-} ${3:-}"; }\n'

# The server writes its own pid before it becomes the server: no moment in which it runs unknown to
# the guardian, and no start any more once the guardian has removed the directory.
_LAUNCHER = _BORN + 'echo "$$ $(born $$)" > .pid && mv .pid server.pid 2>/dev/null && exec "$@"'

# Waits until the pipe closes, which the kernel does however this process ends.
_GUARDIAN = (
    _BORN
    + """trap '' HUP INT TERM
directory=$1 signal=$2
alive() {
    [ -n "$since" ] || { kill -0 "$pid" 2>/dev/null; return; }
    case "$(born "$pid")" in "$since Z") return 1 ;; "$since "*) ;; *) return 1 ;; esac
}
while read -r _; do :; done
if [ -r "$directory/server.pid" ] && read -r pid since _ < "$directory/server.pid" && alive; then
    kill -s "$signal" "$pid"
    tries=0
    while alive && [ $tries -lt 100 ]; do sleep 0.05; tries=$((tries + 1)); done
    alive && kill -s KILL "$pid"
fi
rm -rf "$directory"
"""
)


def free_port() -> int:
    """Return a port below those that the kernel gives to clients.

    A client that tries to reach a stopped server on one of the kernel's own ports may be given that
    very port, connect to itself, and keep the server from coming back.
    """
    first = 32768
    with contextlib.suppress(OSError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, first) if first > 11_000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])


def guard(command: list[str]) -> list[str]:
    """Return the command that starts a server and records its pid for the guardian."""
    return ["/bin/sh", "-c", _LAUNCHER, "launcher", *command]


class Guardian:
    """A process that ends a server and removes its directory when this process is gone."""

    def __init__(self, directory: Path, signal: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "guardian", str(directory), signal],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal must not reach it before us
        )
        _on_duty.add(self)

    def finish(self) -> None:
        """End the server and remove its directory now."""
        _on_duty.discard(self)
        self._let_go()
        self._process.wait()

    def _let_go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


_on_duty: set[Guardian] = set()


def _let_go_of_all() -> None:
    """Close the pipes in a forked child: the guardians would wait for it too."""
    while _on_duty:
        _on_duty.pop()._let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


class Server(ABC):
    """A private server, or the address of an external one.

    `binary` is the program to start; `redis()` and `postgres()` find it. `options` are added to its
    command line. With `external_url` nothing is started, and `stop` does nothing.
    """

    kind = "server"
    _ready = "eady to accept connections"
    _stop_signal = signal.SIGTERM
    _guardian_signal = "KILL"

    def __init__(
        self, binary: Path | None, options: Sequence[str] = (), external_url: str | None = None
    ) -> None:
        self._binary = binary
        self._options = tuple(options)
        self._external_url = external_url
        self._owner = os.getpid()
        self._user: pwd.struct_passwd | None = None
        self._port: int | None = None
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guardian: Guardian | None = None

    @property
    def external(self) -> bool:
        """Return whether the server runs elsewhere, and cannot be killed or restarted here."""
        return self._external_url is not None

    @property
    def url(self) -> str:
        if self._external_url is not None:
            return self._external_url
        return self._url(self.port)

    @property
    def port(self) -> int:
        if self._port is None:
            raise self._misuse("has no port yet: call start(), or use it in a with statement")
        return self._port

    @property
    def pid(self) -> int:
        if self._process is None:
            raise self._misuse("is not running, so it has no pid")
        return self._process.pid

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise self._misuse("has no directory: it is not started, or external")
        return self._directory

    @property
    def running(self) -> bool:
        return self.external or (self._process is not None and self._process.poll() is None)

    def start(self) -> Self:
        if self.running:
            return self
        self._process = None
        try:
            if self._directory is None:
                self._directory = self._make_directory()
                self._guardian = Guardian(self._directory, self._guardian_signal)
                _live.add(self)
                self._prepare(self._directory)
            self._launch()
        except BaseException:
            if self._port is None:
                self.stop()
            raise
        return self

    def stop(self, *, keep: bool = False) -> None:
        """Stop cleanly; `keep` leaves the directory for a restart()."""
        self._stop(self._stop_signal, keep)

    def kill(self) -> None:
        """SIGKILL, as in a crash: nothing is flushed, and the directory stays for a restart()."""
        if self.external:
            raise self._misuse("is external: only a private server can be killed from here")
        if not self.running:
            raise self._misuse("is not running, so it cannot be killed")
        self._kill(self.pid)
        self._reap()

    def restart(self) -> None:
        """Start again on the same port and directory, after kill() or stop(keep=True)."""
        if self.external:
            raise self._misuse("is external: only a private server can be restarted from here")
        if self._directory is None:
            raise self._misuse("has no directory to start from: use stop(keep=True) or kill()")
        self._stop(self._stop_signal, keep=True)
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @abstractmethod
    def _url(self, port: int) -> str:
        """Return its URL."""

    @abstractmethod
    def _command(self, directory: Path, port: int) -> list[str]:
        """Return the command that starts it."""

    def _prepare(self, directory: Path) -> None:  # noqa: B027 - nothing, unless a server needs it
        """Fill a new directory; most servers do that by themselves."""

    def _forget(self, directory: Path) -> None:  # noqa: B027 - the same
        """Release what a killed server left outside its directory."""

    def _kill(self, pid: int) -> None:
        os.killpg(pid, signal.SIGKILL)

    def _make_directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"conquiet-{self.kind.lower()}-"))

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        with (self.directory / "server.log").open("wb") as log:
            return subprocess.Popen(
                guard(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=environment | {"LC_ALL": "C"},
                start_new_session=True,
                user=self._user.pw_uid if self._user else None,
                group=self._user.pw_gid if self._user else None,
                extra_groups=[] if self._user else None,
            )

    def _launch(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            port = self._port or free_port()
            self._process = self._spawn(self._command(self.directory, port))
            if self._wait_until_ready(self._process, deadline):
                self._port = port
                return
            self._reap()
            log = self._log()
            if not any(text in log for text in _TRANSIENT) or time.monotonic() > deadline:
                raise self._failure("start", log)
            time.sleep(_AGAIN_SECONDS)

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Wait for the line in its log, not for a connection: another server may have the port."""
        while self._ready not in self._log():
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self._kill(process.pid)
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _stop(self, with_signal: signal.Signals, keep: bool) -> None:
        if self.external or self._owner != os.getpid():
            return
        if self._process is not None and self.running:
            self._process.send_signal(with_signal)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill(self._process.pid)
        self._reap()
        if not keep:
            self._remove()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
            (self.directory / "server.pid").unlink(missing_ok=True)

    def _remove(self) -> None:
        if self._directory is None:
            return
        self._forget(self._directory)
        if self._guardian is not None:
            self._guardian.finish()
        shutil.rmtree(self._directory, ignore_errors=True)  # in case the guardian was killed
        self._directory = self._guardian = self._port = None
        _live.discard(self)

    def _log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    def _misuse(self, what: str) -> ConfigError:
        return ConfigError(f"the {self.kind} server {what}")

    def _failure(self, to_do_what: str, log: str) -> ConfigError:
        tail = "\n".join(log.splitlines()[-20:])
        return ConfigError(f"{self._binary} did not {to_do_what}; the end of its log:\n{tail}")


_live: set[Server] = set()


@atexit.register
def _stop_all() -> None:
    for server in tuple(_live):
        server.stop()
