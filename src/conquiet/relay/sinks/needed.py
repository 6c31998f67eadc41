"""Optional packages, imported when a sink is made."""

from __future__ import annotations

import importlib
from typing import Any

from conquiet.errors import ConfigError

_LONGEST_TIMEOUT = 3600


def needed(module: str, extra: str) -> Any:
    """The module, or a `ConfigError` that names the command which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this sink needs {module}, which is missing: pip install 'conquiet[{extra}]'"
        ) from error


def check_timeout(timeout: float) -> float:
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST_TIMEOUT:
        raise ConfigError(
            f"timeout={timeout!r}: must be a number of seconds above 0, {_LONGEST_TIMEOUT} at most"
        )
    return float(timeout)
