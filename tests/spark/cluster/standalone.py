"""A real standalone cluster on this machine: a master and workers, from pip's PySpark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
from tests.waiting import eventually

from conquiet.embedded.server import free_port

_SPARK_HOME = Path(pyspark.__file__).parent
_START_SECONDS = 240.0
"""Two JVMs on a busy machine."""
JOB_SECONDS = 500.0
"""A driver and two executors, which unpack an archive of 160 MB each: minutes on a busy machine."""


class Daemon:
    """A JVM of Spark; `spark-class` becomes it, so its pid is ours to kill."""

    def __init__(
        self,
        directory: Path,
        name: str,
        host: str,
        kind: str,
        *arguments: str,
        memory: str = "256m",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"{name}.log"
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SPARK_")},
            "SPARK_HOME": str(_SPARK_HOME),
            "SPARK_LOCAL_IP": host,
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "SPARK_DAEMON_MEMORY": memory,
            "PYSPARK_PYTHON": sys.executable,  # a Connect server asks for no other setting
        }
        command = [str(_SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.log.read_text(errors="replace")) is not None

    def kill(self) -> None:
        """As a machine dies; an executor notices that its worker is gone, and ends too."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


class Cluster:
    """One master, and workers with one core each.

    Every worker is a host of its own: Spark runs no second attempt of a task on the same one.
    """

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self._directory = directory
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self.master = Daemon(
            directory / "master", "master", "127.0.0.1", "master.Master",
            "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port()),
        )  # fmt: skip
        self.workers: list[Daemon] = []
        self._wait(self.master, "I have been elected leader")
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> Daemon:
        name = f"worker-{len(self.workers)}"
        place = self._directory / name
        host = f"127.0.0.{1 + len(self.workers)}"
        worker = Daemon(
            place, name, host, "worker.Worker",
            "--host", host, "--cores", "1", "--memory", "1g",
            "--work-dir", str(place / "work"), "--webui-port", str(free_port()), self.url,
        )  # fmt: skip
        self.workers.append(worker)
        self._wait(worker, "Successfully registered with master")
        return worker

    def _wait(self, daemon: Daemon, pattern: str) -> None:
        eventually(lambda: daemon.said(pattern), timeout=_START_SECONDS)

    def alive(self) -> list[Daemon]:
        return [worker for worker in self.workers if worker.process.poll() is None]

    def stop(self) -> None:
        for daemon in (*self.workers, self.master):
            daemon.stop()


class ConnectServer:
    """Spark Connect on a free port; its Python is that of the tests, which has conquiet."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.url = f"sc://127.0.0.1:{port}"
        confs = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.pyspark.python": sys.executable,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.ui.enabled": "false",
        }
        words = [word for pair in confs.items() for word in ("--conf", "=".join(pair))]
        self._daemon = Daemon(
            directory, "connect", "127.0.0.1", "SparkSubmit",
            "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
            "--master", "local[2]", *words, memory="512m",
        )  # fmt: skip
        eventually(
            lambda: self._daemon.said("Spark Connect server started"), timeout=_START_SECONDS
        )

    def said(self) -> str:
        return self._daemon.log.read_text(errors="replace")

    def stop(self) -> None:
        self._daemon.stop()


def settings(cluster: Cluster | None, directory: Path) -> dict[str, Any]:
    """For a driver on this machine: little memory, loopback, and nothing left behind."""
    return {
        "spark.master": "local-cluster[2,1,1024]" if cluster is None else cluster.url,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executorEnv.PYTHONPATH": os.getcwd(),  # the handlers of the tests
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.local.dir": str(directory / "driver"),
    }


class Job:
    """A driver in a process of its own, running one function of `jobs`."""

    def __init__(
        self, cluster: Cluster | None, directory: Path, name: str, **arguments: Any
    ) -> None:
        """Without a cluster, on one that Spark makes of two processes for this job."""
        import json

        self.out = directory / f"{name}.out"
        self.err = directory / f"{name}.err"
        given = json.dumps({"settings": settings(cluster, directory), **arguments}, default=str)
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        environment.pop("PYSPARK_PYTHON", None)
        # Executors run the Python of spark.pyspark.python, or else that of the driver.
        if "spark.pyspark.python" not in arguments.get("more", {}):
            environment["PYSPARK_PYTHON"] = sys.executable
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.cluster.jobs", name, given],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def result(self, timeout: float = JOB_SECONDS) -> Any:
        """What the function returned; fails with what it said if it failed."""
        import json

        try:
            code = self.process.wait(timeout)
        finally:
            self.stop()
        assert code == 0, self.err.read_text(errors="replace")[-6000:]
        return json.loads(self.out.read_text().splitlines()[-1])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its JVM ends when it finds its driver gone
            self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
