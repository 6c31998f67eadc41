"""Names of objects, `module:attribute`: how a child is told what makes its worker."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conquiet.errors import ConfigError


def resolve(target: str) -> Any:
    """The object that `module:attribute` names; an error says what is wrong with the name."""
    module_name, _, path = target.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise ConfigError(f"{target!r} does not name an object; write module:name, as app:router")
    found: Any = _import(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(f"{module_name} has no {path!r}{_known(name, dir(found))}") from None
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            known = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
            raise ConfigError(
                f"no module named {missing!r}{_similar(missing, known)};"
                " run this where the module is, or set PYTHONPATH"
            ) from error
        raise ConfigError(
            f"{name} imports {missing!r}, which is not installed: pip install it"
        ) from error
    except Exception as error:
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _similar(name: str, known: list[str]) -> str:
    public = [item for item in known if not item.startswith("_")]
    close = difflib.get_close_matches(name, public, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known(name: str, known: list[str]) -> str:
    public = ", ".join(item for item in known if not item.startswith("_"))
    return _similar(name, known) or (f"; there are: {public[:200]}" if public else "")


def name_of(target: Callable[..., Any]) -> str:
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "<?>")
    if not module or "<" in name:
        raise ConfigError(
            f"{target!r:.100} cannot be imported by a child process: give a function at the top"
            " of a module, or its name as 'module:function'"
        )
    return f"{_main_module() if module == '__main__' else module}:{name}"


def _main_module() -> str:
    """What a script is called when a child imports it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = Path(getattr(main, "__file__", None) or "<stdin>")
    if not file.stem.isidentifier():
        raise ConfigError(f"{file.name} is no module that a child process can import: rename it")
    return file.stem
