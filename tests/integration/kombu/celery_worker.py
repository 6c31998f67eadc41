"""A Celery worker in a process of its own, which a test stops, kills, or asks to restart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import zygote
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 60
STOP_SECONDS = 30


class CeleryWorker:
    """`name` is the node name that the worker answers to."""

    def __init__(
        self,
        url: str,
        log: Path,
        *options: str,
        pool: str = "prefork",
        concurrency: int = 2,
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        self.name = f"{log.stem}@tests"
        self._log = log
        # Not python -m celery: on SIGHUP, that could not start itself again.
        celery = str(Path(python).with_name("celery"))
        command = [python, celery, "-A", "tests.integration.kombu.celery_app", "worker"]
        command += ["--pool", pool, "--concurrency", str(concurrency), "--hostname", self.name]
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        with log.open("wb") as said:
            self._process = zygote.Popen(
                [*command, "--loglevel", "INFO", "--events", *options],
                cwd=log.parent,
                env={**os.environ, "REDIS_URL": url, **paths, **environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a kill takes the pool along
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def is_ready(self, times: int = 1) -> None:
        """Wait until the worker has connected and consumes."""

        def ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the worker ended:\n{self.log}")
            return self.log.count(" ready.") >= times

        eventually(ready, timeout=START_SECONDS, message=f"{self.name} is ready")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def has_ended(self) -> int:
        """Wait for the end; the exit code."""
        return self._process.wait(STOP_SECONDS)

    def suspend(self) -> None:
        """As a virtual machine that is paused, with the processes of its pool."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a crash of the machine: the worker and the processes of its pool, all at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Warm if it can be; nothing is left running in any case."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.has_ended()
        self.kill()
