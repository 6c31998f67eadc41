"""A marketplace that never was: its log at any size, the same for the same seed, faults by name.

What needs pyarrow, redis-py or SQLAlchemy is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conquiet.marketplace.generator.entry import (
    DOMAIN_TOPIC,
    TELEMETRY_TOPIC,
    Entry,
    messages,
)
from conquiet.marketplace.generator.faults import FAULTS
from conquiet.marketplace.generator.generator import PROFILES, Generator
from conquiet.marketplace.generator.witness import Seen, Told, Witness

if TYPE_CHECKING:
    from conquiet.marketplace.generator.commands import commands
    from conquiet.marketplace.generator.files import write_jsonlines, write_parquet
    from conquiet.marketplace.generator.log import write_log
    from conquiet.marketplace.generator.outbox import write_outbox

__all__ = [
    "DOMAIN_TOPIC",
    "FAULTS",
    "PROFILES",
    "TELEMETRY_TOPIC",
    "Entry",
    "Generator",
    "Seen",
    "Told",
    "Witness",
    "commands",
    "messages",
    "write_jsonlines",
    "write_log",
    "write_outbox",
    "write_parquet",
]

_home = {
    "commands": "conquiet.marketplace.generator.commands",
    "write_jsonlines": "conquiet.marketplace.generator.files",
    "write_log": "conquiet.marketplace.generator.log",
    "write_outbox": "conquiet.marketplace.generator.outbox",
    "write_parquet": "conquiet.marketplace.generator.files",
}


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_home[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
