"""The log as a sink: a frame into a stream, against the fastest XADDs there are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from pyspark.sql import DataFrame

from bench import spark_floors as floors
from bench.harness import Case, Seconds, compare
from bench.spark_ground import Ground, Run, in_turn, judged

TOPIC, BY_HAND = "written", "by-hand"
DATABASE = 1
"""Of Redis, so that it can be emptied while another holds the log."""


def sink(ground: Ground) -> Iterator[Case]:
    rows = max(1_000, ground.events // 2 // 1_000 * 1_000)  # redis-benchmark adds whole pipelines
    url = ground.redis_url.removesuffix("/0") + f"/{DATABASE}"
    with redis.Redis.from_url(url) as client:
        yield from _Writing(ground, client, url, rows).cases()
        client.flushdb()


class _Writing:
    def __init__(self, ground: Ground, client: redis.Redis, url: str, rows: int) -> None:
        self._ground, self._client, self._url, self._rows = ground, client, url, rows
        self._names = count()
        self._frame = _events(ground, rows)

    def cases(self) -> Iterator[Case]:
        floor, by_hand = self._floor()
        runs = {
            floor: by_hand,
            "sink": self._run(),
            "sink, denseIds": self._run(denseIds="true"),
            "sink, partitions=4": self._run(partitions="4"),
        }
        seconds = in_turn(runs, self._rows, self._ground.rounds)
        allocator = self._allocator()
        for name in runs:
            if name != floor:
                case = compare(
                    name, self._rows, seconds, name, floor, rows=self._rows, allocator=allocator
                )
                yield judged(case, 0.5, self._ground.events) if name == "sink" else case
        seconds |= self._twice()
        yield compare("sink, written again", self._rows, seconds, "again", floor, rows=self._rows)
        self._frame.unpersist()

    def _run(self, **options: str) -> Run:
        return Run(partial(self._write, **options), self._count, self._client.flushdb)

    def _write(self, **options: str) -> None:
        writer = self._frame.write.format("conquiet").mode("append")
        writer.options(url=self._url, topic=TOPIC, **options).save()

    def _count(self) -> int:
        streams: Any = self._client.scan_iter(f"{TOPIC}*", _type="stream")
        return sum(int(str(self._client.xlen(name))) for name in streams)

    def _allocator(self) -> str:
        """With that of libc, EXEC takes the longer, the more entries there are."""
        memory: Any = self._client.info("memory")
        return str(memory["mem_allocator"])

    def _twice(self) -> dict[str, Seconds]:
        """A batch with a name, written once more: nothing may be added."""

        name = ""

        def first() -> None:
            nonlocal name
            name = f"batch-{next(self._names)}"
            self._client.flushdb()
            self._write(writeId=name)

        runs = {"again": Run(lambda: self._write(writeId=name), self._count, first)}
        return in_turn(runs, self._rows, self._ground.rounds)

    def _floor(self) -> tuple[str, Run]:
        program = _benchmark()
        if program is not None:
            address = urlsplit(self._url)
            command = [str(program), "-h", str(address.hostname), "-p", str(address.port)]
            command += ["--dbnum", str(DATABASE), "-n", str(self._rows), "-P", "100", "-c", "2"]
            command += ["-q", "XADD", BY_HAND, "*"]
            command += [part % {"n": 0} for item in floors.FIELDS.items() for part in item]
            work: Any = partial(subprocess.run, command, check=True, capture_output=True)
            return program.name, Run(work, self._count_by_hand, self._client.flushdb)
        half = self._rows // 2
        shares = ((self._url, [BY_HAND], 0, half), (self._url, [BY_HAND], half, self._rows - half))
        work = self._ground.in_two_processes(floors.add, *shares)
        return "two raw pipelines of XADD", Run(work, self._count_by_hand, self._client.flushdb)

    def _count_by_hand(self) -> int:
        return int(str(self._client.xlen(BY_HAND)))


def _benchmark() -> Path | None:
    """The redis-benchmark beside the redis-server of the PATH."""
    server = shutil.which("redis-server")
    program = Path(server).with_name("redis-benchmark") if server else None
    return program if program is not None and program.exists() else None


def _events(ground: Ground, rows: int) -> DataFrame:
    """The events of the log, as a frame in memory."""
    columns = {"id": "event_id", "datacontenttype": "content_type"}
    texts = []
    for name, text in floors.FIELDS.items():
        pieces = ", lpad(id, 12, '0'), ".join(f"'{one}'" for one in text.split("%(n)012d"))
        texts.append(f"concat({pieces}) AS {columns.get(name, name)}")
    chosen = [text for text in texts if not text.endswith(" AS specversion")]
    chosen = [
        "timestamp'2026-01-31 12:00:00Z' AS time" if text.endswith(" AS time") else text
        for text in chosen
    ]
    frame = ground.spark.range(0, rows, 1, 2).selectExpr(*chosen).persist()
    frame.count()
    return frame
