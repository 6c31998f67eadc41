"""A private PgBouncer in transaction mode, in front of the PostgreSQL of the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from conquiet.embedded import Server
from conquiet.embedded.postgres_server import find_plain_user, may_run
from conquiet.errors import ConfigError

POOL_SIZE = 2
"""Connections to PostgreSQL per database: fewer than the clients of a test have."""


class PgBouncer(Server):
    """Gives each transaction any of its few connections, and each client to any transaction."""

    kind = "PgBouncer"
    _ready = "process up"

    def __init__(self, upstream: str) -> None:
        found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if found is None:
            raise ConfigError("no pgbouncer found: apt-get install pgbouncer")
        super().__init__(Path(found))
        self._upstream = urlsplit(upstream)

    def in_front_of(self, database_url: str) -> str:
        """The URL of the same database, through the bouncer."""
        return urlunsplit(urlsplit(database_url)._replace(netloc=f"any@127.0.0.1:{self.port}"))

    def _url(self, port: int) -> str:
        return f"postgresql://any@127.0.0.1:{port}/pgbouncer"

    def _make_directory(self) -> Path:
        """It refuses to run as root, as PostgreSQL does."""
        if os.geteuid() != 0:
            return super()._make_directory()
        self._user = find_plain_user()
        place = None if may_run(self._user, "test", "-x", tempfile.gettempdir()) else "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="conquiet-pgbouncer-", dir=place))
        os.chown(directory, self._user.pw_uid, self._user.pw_gid)
        return directory

    def _command(self, directory: Path, port: int) -> list[str]:
        target = self._upstream
        login = f"user={target.username or 'postgres'}"
        if target.password:
            login += f" password='{target.password}'"
        settings = directory / "pgbouncer.ini"
        settings.write_text(
            f"""[databases]
* = host={target.hostname} port={target.port or 5432} {login}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
admin_users = any
pool_mode = transaction
default_pool_size = {POOL_SIZE}
query_wait_timeout = 20
"""
        )
        settings.chmod(0o644)
        return [str(self._binary), str(settings)]
