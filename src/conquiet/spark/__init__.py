"""Read the event log and outboxes on Spark, write to them, and run a router on a cluster.

Each name is imported when it is first used: a driver that only builds a session needs no Redis.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conquiet.spark.catalog import events
    from conquiet.spark.formats import register
    from conquiet.spark.progress import DataLoss, LagListener, lag, losses
    from conquiet.spark.query import start_query
    from conquiet.spark.settings import session
    from conquiet.spark.upsert.sink import upsert_batches_into, upsert_into
    from conquiet.spark.worker import SparkWorker

__all__ = [
    "DataLoss",
    "LagListener",
    "SparkWorker",
    "events",
    "lag",
    "losses",
    "register",
    "session",
    "start_query",
    "upsert_batches_into",
    "upsert_into",
]

_home = {
    "DataLoss": "conquiet.spark.progress",
    "register": "conquiet.spark.formats",
    "session": "conquiet.spark.settings",
    "LagListener": "conquiet.spark.progress",
    "events": "conquiet.spark.catalog",
    "lag": "conquiet.spark.progress",
    "losses": "conquiet.spark.progress",
    "SparkWorker": "conquiet.spark.worker",
    "start_query": "conquiet.spark.query",
    "upsert_into": "conquiet.spark.upsert.sink",
    "upsert_batches_into": "conquiet.spark.upsert.sink",
}


def _check_archive() -> None:
    """Refuse a Python that an archive of `conquiet pipeline package` does not fit."""
    manifest = Path(__file__).parents[2] / "conquiet-packages.json"
    if not manifest.is_file():
        return
    first = json.loads(manifest.read_text())["python"]
    here = sys.version_info[:3]
    wanted = tuple(map(int, first.split(".")))
    if here[:2] != wanted[:2] or here < wanted:
        raise ImportError(
            f"{manifest.parent} was packed for Python {first} and later patch releases, and this is"
            f" {'.'.join(map(str, here))}: pack it again with --python {'.'.join(map(str, here))}"
        )


_check_archive()


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_home[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
