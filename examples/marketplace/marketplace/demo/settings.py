"""Settings of the demo: its size, its servers, the folder of its results."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from conquiet.errors import ConfigError

WORKERS = 2
RELAYS = 2
DUPLICATES = 0.02
"""The share of commands, and of events, that are sent twice."""
BATCH_SIZE = 250
"""Commands per transaction, and events per publication."""

COMMANDS = "market-commands"
DEAD_LETTERS = "market-dead-letters"
GROUP = "marketplace"
PROCESSES = "market-processes"
"""A list in Redis of the worker processes, each as `slot pid milliseconds`."""

REPORT, VERDICT, LAKE, LOGS = "report.html", "verdict.json", "lake", "logs"
_MARK = ".conquiet-demo"


@dataclass(frozen=True)
class Settings:
    """Holds the options of one run."""

    orders: int = 5_000
    seed: int = 7
    folder: Path = Path("conquiet-demo")
    spark: bool = True
    keep: bool = False
    database: str | None = None
    broker: str | None = None

    def __post_init__(self) -> None:
        if self.orders < 20:
            raise ConfigError(
                f"--orders {self.orders}: give at least 20; with fewer, all commands are handled"
                " before a worker can be killed"
            )


def claim_folder(folder: Path) -> Path:
    """Create the folder of results, or empty that of an earlier demo; refuse any other."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder for the results by --to")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise ConfigError(
            f"{folder} has files that no demo made: name another folder for the results by --to"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).write_text("made by conquiet demo, and replaced by the next one\n")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; name another by --to") from error
    for name in (LAKE, LOGS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (REPORT, VERDICT):
        (folder / name).unlink(missing_ok=True)
    (folder / LOGS).mkdir()
    return folder
