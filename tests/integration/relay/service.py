"""Relay processes as an operator runs them, and the tables they work on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests import zygote
from tests.waiting import eventually

CONQUIET = [sys.executable, "-m", "conquiet"]


class RelayRun:
    """One `conquiet relay run`, with its logs in a file and its health on a free port."""

    def __init__(self, logs: Path, database: str, sink: str, *flags: str) -> None:
        self.logs = logs
        arguments = ["--database", database, "--sink", sink, "--log-format", "json"]
        arguments += ["--health", "127.0.0.1:0", *flags]
        with logs.open("ab") as stream:
            self.process = zygote.Popen(
                [*CONQUIET, "relay", "run", *arguments],
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def lines(self) -> list[dict[str, Any]]:
        whole = self.logs.read_text().rpartition("\n")[0]  # the last line may be under way
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def said(self, text: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if text in line["message"]]

    @property
    def port(self) -> int:
        eventually(lambda: self.said("health is at"), timeout=30)
        return int(re.search(r":(\d+)$", self.said("health is at")[0]["message"])[1])

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def ready(self) -> dict[str, Any]:
        status, body = self.get("/readyz")
        return {"status": status, **json.loads(body)}

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(40)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def sample(exposition: str, name: str) -> float:
    [found] = re.findall(rf"^{re.escape(name)} (\S+)$", exposition, re.MULTILINE)
    return float(found)
