"""A private RabbitMQ: its own directory, node name, cookie and ports, and its own epmd."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests import needs

from conquiet.embedded.server import Guardian, free_port, guard

# Not the wrapper in /usr/sbin, which changes to the user and the directory of the service.
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
MAX_MESSAGE_BYTES = 100_000
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_READY = "Server startup complete"


class RabbitMQ:
    """Started, killed and restarted at will; keeps what it has confirmed."""

    def __init__(self) -> None:
        if not SERVER.exists() or shutil.which("epmd") is None:
            needs.missing("RabbitMQ", "apt-get install --no-install-recommends rabbitmq-server")
        self.port, self._epmd_port, self._node_port = free_port(), free_port(), free_port()
        self._name = f"test{os.getpid()}{secrets.token_hex(3)}@localhost"
        self._directory = Path(tempfile.mkdtemp(prefix="conquiet-rabbitmq-"))
        settings = f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
        settings += f"max_message_size = {MAX_MESSAGE_BYTES}\n"
        (self._directory / "rabbitmq.conf").write_text(settings)
        (self._directory / "plugins").write_text("[].\n")
        cookie = self._directory / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        (self._directory / "epmd").mkdir()
        # They end both processes if we are killed.
        self._guardians = [
            Guardian(place, "KILL") for place in (self._directory / "epmd", self._directory)
        ]
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        if self._epmd is None:
            command = ["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"]
            self._epmd = subprocess.Popen(
                guard(command),
                env=self._environment,
                cwd=self._directory / "epmd",
                start_new_session=True,
            )
        log = self._directory / "server.log"
        with log.open("wb") as stream:
            self._server = subprocess.Popen(
                guard([str(SERVER)]),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while _READY not in log.read_text(errors="replace"):
            ended = self._server.poll() is not None
            assert not ended, f"RabbitMQ did not start:\n{log.read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < deadline, "RabbitMQ did not start in time"
            time.sleep(0.05)

    def kill(self) -> None:
        """As in a crash: nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
        for guardian in self._guardians:
            guardian.finish()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, with_signal: signal.Signals) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        try:
            # Its whole session, which is ours alone: the server starts programs of its own.
            os.killpg(server.pid, with_signal)
            server.wait(_STOP_SECONDS)
        except ProcessLookupError:
            server.wait()
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    @property
    def _environment(self) -> dict[str, str]:
        place = self._directory
        foreign = ("RABBITMQ_", "ERL_")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return inherited | {
            "HOME": str(place),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP_BYTES": "0",
            "RABBITMQ_NODENAME": self._name,
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "RABBITMQ_MNESIA_BASE": str(place / "mnesia"),
            "RABBITMQ_LOG_BASE": str(place / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
            # Makes the script become the server; -noinput undoes what else it does.
            "RABBITMQ_ALLOW_INPUT": "1",
            # One scheduler that sleeps when idle: the machine is shared with other tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-noinput -kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none"
            ),
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
