"""What Spark starts instead of pyspark.daemon: its workers die at one of their sends to Redis.

The directory FAULTS_FOLDER says which: the file `fate` has a number and a side. Each number dies
once, and leaves a file `killed-N`; the next attempt of its task lives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyspark import daemon
from tests.faults import seam


class OnceAtExec(seam.Seam):
    """Counts what is sent with an EXEC alone: Spark and its workers talk by sockets as well."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        number, self._side = (folder / "fate").read_text().split()
        self._number = int(number)
        self._mark = folder / f"killed-{number}-{self._side}"
        self._count = 0

    def passes(self, label: str, call: Any, half: Any = None, file: int = -1) -> Any:
        if not label.startswith("sendall MULTI") or "XADD" not in label:
            return call()
        self._count += 1
        if self._count == self._number and self._is_first():
            if self._side == "half":
                half()
            elif self._side == "after":
                call()
            seam.die()
        return call()

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


plain = daemon.worker


def worker(*given: Any) -> Any:
    OnceAtExec(Path(os.environ["FAULTS_FOLDER"])).install()
    return plain(*given)


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
