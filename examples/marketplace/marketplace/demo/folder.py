"""Folder: where the results go. What is there is only replaced if a demo has made it."""

from __future__ import annotations

import shutil
from pathlib import Path

from conquiet.errors import ConfigError

MARK = ".conquiet-demo"
REPORT, VERDICT, LAKE, LOGS = "report.html", "verdict.json", "lake", "logs"


def claim(folder: Path) -> Path:
    """Make the folder, or empty that of an earlier demo; anything else is refused."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder for the results by --to")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ConfigError(
            f"{folder} has files that no demo made: name another folder for the results by --to"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text("made by conquiet demo, and replaced by the next one\n")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; name another by --to") from error
    for name in (LAKE, LOGS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (REPORT, VERDICT):
        (folder / name).unlink(missing_ok=True)
    (folder / LOGS).mkdir()
    return folder
