"""Settings: how big the demo is, on which servers, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conquiet.errors import ConfigError

WORKERS = 2
RELAYS = 2
TWICE = 0.02
"""The share of commands, and of events, that are sent twice."""
BATCH = 250
"""Commands per transaction, and events per publication."""

COMMANDS = "market-commands"
DEAD_LETTERS = "market-dead-letters"
GROUP = "marketplace"
PROCESSES = "market-processes"
"""A list on Redis of the worker processes, each as `slot pid milliseconds`."""


@dataclass(frozen=True)
class Settings:
    """What a run is asked for."""

    orders: int = 5_000
    seed: int = 7
    folder: Path = Path("conquiet-demo")
    spark: bool = True
    keep: bool = False
    postgres: str | None = None
    redis: str | None = None

    def __post_init__(self) -> None:
        if self.orders < 20:
            raise ConfigError(f"--orders {self.orders}: at least 20, or there is no middle to kill")
