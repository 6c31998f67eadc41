"""Queued: a command that waits for EXEC, and stands where its result will never be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from conquiet.errors import HandlerError
from conquiet.message import Message


class Queued:
    """A command of a transaction. It has no result yet: to use it as one raises."""

    __slots__ = ("arguments", "messages", "packed")

    def __init__(
        self, arguments: tuple[Any, ...], packed: bytes, messages: Sequence[Message[Any]]
    ) -> None:
        self.arguments = arguments
        self.packed = packed
        self.messages = messages
        """Whose handler queued it; nobody's, if that is not known."""

    def _refuse(self, *_: object) -> NoReturn:
        raise HandlerError(
            f"the result of {self} is not known before the transaction ends; to decide by what is"
            " stored, read with commands(client).reader"
        )

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _refuse
    __getitem__ = __add__ = __sub__ = _refuse
    __hash__ = object.__hash__

    def __str__(self) -> str:
        """Name and key, not the values: those may be secret."""
        words = [_text(word) for word in self.arguments[:2]]
        return " ".join(words)

    def __repr__(self) -> str:
        return f"<Queued {self}>"


def _text(word: object) -> str:
    text = word.decode(errors="backslashreplace") if isinstance(word, bytes) else str(word)
    return text if len(text) <= 80 else f"{text[:77]}…"
