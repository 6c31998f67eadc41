"""Optional packages, imported when a sink is made."""

from __future__ import annotations

import importlib
from typing import Any

from conquiet.errors import ConfigError


def needed(module: str, extra: str) -> Any:
    """The module, or a `ConfigError` that names the command which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this sink needs {module}, which is missing: pip install 'conquiet[{extra}]'"
        ) from error


def check_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds above 0")
    return float(timeout)
