"""What an operator asks and does: streams, groups, dead letters, one event traced, who is alive.

Plain functions that print nothing; the command line and the dashboard are made of them. Rooms that
need packages are imported when one of their names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conquiet.errors import NotFound

if TYPE_CHECKING:
    from conquiet.operations.content import LogEntry
    from conquiet.operations.dead_letters import (
        Failure,
        Letter,
        Letters,
        Outcome,
        Wanted,
        drop,
        find,
        replay,
        show,
    )
    from conquiet.operations.entries import Claimed, PendingEntry, claim, entry, peek, pending
    from conquiet.operations.letters_in_file import FileLetters
    from conquiet.operations.letters_in_kombu import KombuLetters
    from conquiet.operations.letters_in_stream import StreamLetters, letter_streams
    from conquiet.operations.presence import Health, Session, Worker, relays, sessions, workers
    from conquiet.operations.survey import (
        ConsumerInfo,
        GroupInfo,
        ReaderInfo,
        StreamInfo,
        groups,
        stream,
        streams,
    )
    from conquiet.operations.tracing import Remembered, Trace, Written, trace
    from conquiet.operations.tracing_log import Buried, Logged, Searched, Taker

__all__ = [
    "Buried",
    "Claimed",
    "ConsumerInfo",
    "Failure",
    "FileLetters",
    "GroupInfo",
    "Health",
    "KombuLetters",
    "Letter",
    "Letters",
    "LogEntry",
    "Logged",
    "NotFound",
    "Outcome",
    "PendingEntry",
    "ReaderInfo",
    "Remembered",
    "Searched",
    "Session",
    "StreamInfo",
    "StreamLetters",
    "Taker",
    "Trace",
    "Wanted",
    "Worker",
    "Written",
    "claim",
    "drop",
    "entry",
    "find",
    "groups",
    "letter_streams",
    "peek",
    "pending",
    "relays",
    "replay",
    "sessions",
    "show",
    "stream",
    "streams",
    "trace",
    "workers",
]

_home = {
    "content": ("LogEntry",),
    "dead_letters": (
        *("Failure", "Letter", "Letters", "Outcome", "Wanted"),
        *("drop", "find", "replay", "show"),
    ),
    "entries": ("Claimed", "PendingEntry", "claim", "entry", "peek", "pending"),
    "letters_in_file": ("FileLetters",),
    "letters_in_kombu": ("KombuLetters",),
    "letters_in_stream": ("StreamLetters", "letter_streams"),
    "presence": ("Health", "Session", "Worker", "relays", "sessions", "workers"),
    "survey": (
        *("ConsumerInfo", "GroupInfo", "ReaderInfo", "StreamInfo"),
        *("groups", "stream", "streams"),
    ),
    "tracing": ("Remembered", "Trace", "Written", "trace"),
    "tracing_log": ("Buried", "Logged", "Searched", "Taker"),
}
_module = {name: module for module, names in _home.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_module[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
