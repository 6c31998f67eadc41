"""conquiet: effects exactly once, events never lost.

The names below are imported when they are first used: a room that needs none of them, as
`conquiet.queue`, loads none of them, and `conquiet --help` need not wait.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conquiet.acking import Acking
    from conquiet.app import App, Depends
    from conquiet.errors import ConquietError
    from conquiet.message import Message
    from conquiet.router import Router
    from conquiet.schedule import Tick
    from conquiet.worker import Worker

__all__ = ["Acking", "App", "ConquietError", "Depends", "Message", "Router", "Tick", "Worker"]

_home = {
    "Acking": "conquiet.acking",
    "App": "conquiet.app",
    "ConquietError": "conquiet.errors",
    "Depends": "conquiet.app",
    "Message": "conquiet.message",
    "Router": "conquiet.router",
    "Tick": "conquiet.schedule",
    "Worker": "conquiet.worker",
}


def __getattr__(name: str) -> Any:
    if name not in _home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_home[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
