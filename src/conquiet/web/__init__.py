"""The dashboard: streams, outbox, dead letters and processes in a browser, with retry and replay.

Served by itself, or mounted in another ASGI application: `app.mount("/conquiet", dashboard())`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conquiet.config import missing_extra

if TYPE_CHECKING:
    from conquiet.web.access import Basic, Header, Open, Token
    from conquiet.web.app import Dashboard, dashboard

__all__ = ["Basic", "Dashboard", "Header", "Open", "Token", "dashboard"]

_home = {"Basic": "access", "Header": "access", "Open": "access", "Token": "access"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_home.get(name, 'app')}")
    except ModuleNotFoundError as error:
        raise missing_extra(error, "web,postgres,redis") from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
