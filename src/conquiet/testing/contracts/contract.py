"""Contract: the base of all contracts; keeps a binding from breaking the tests it binds."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

_HERE = __name__.rpartition(".")[0]


class Contract(ABC):  # noqa: B024 - each contract has abstract methods of its own
    """A set of tests, and the names that a subclass may define to bind them."""

    bindings: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours: set[str] = set()
        theirs: set[str] = set()
        for base in cls.__mro__:
            (ours if base.__module__.startswith(_HERE) else theirs).update(vars(base))
        if cls.__module__.startswith(_HERE):
            return
        internal = {name for name in ours - cls.bindings if not name.startswith(("test_", "__"))}
        clash = sorted(internal & theirs - set(vars(ABC)))
        if clash:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(clash)}, which the contract uses itself;"
                f" rename it. To be defined are: {', '.join(sorted(cls.bindings))}"
            )
