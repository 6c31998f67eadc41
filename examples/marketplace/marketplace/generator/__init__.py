"""Generates the log of a marketplace, at any size, the same for the same seed, with faults by name.

Modules that need pyarrow, redis-py or SQLAlchemy are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marketplace.generator.entry import (
    DOMAIN_TOPIC,
    TELEMETRY_TOPIC,
    Entry,
    messages,
)
from marketplace.generator.faults import FAULTS
from marketplace.generator.generator import PROFILES, Generator
from marketplace.generator.publication import Seen, Truth, Witness

if TYPE_CHECKING:
    from marketplace.generator.commands import commands
    from marketplace.generator.writers import (
        write_jsonlines,
        write_log,
        write_outbox,
        write_parquet,
    )

__all__ = [
    "DOMAIN_TOPIC",
    "FAULTS",
    "PROFILES",
    "TELEMETRY_TOPIC",
    "Entry",
    "Generator",
    "Seen",
    "Truth",
    "Witness",
    "commands",
    "messages",
    "write_jsonlines",
    "write_log",
    "write_outbox",
    "write_parquet",
]

_home = {
    "commands": "marketplace.generator.commands",
    "write_jsonlines": "marketplace.generator.writers",
    "write_log": "marketplace.generator.writers",
    "write_outbox": "marketplace.generator.writers",
    "write_parquet": "marketplace.generator.writers",
}


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_home[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
