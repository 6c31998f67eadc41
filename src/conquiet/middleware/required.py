"""Refuse messages without required attributes."""

from __future__ import annotations

from typing import Any

from conquiet.errors import ConfigError, InvalidMessage
from conquiet.handler import Process
from conquiet.message import Message, describe


class Required:
    """Refuses messages that lack an attribute, before any transaction begins.

    >>> Required("subject", "correlationid").admit(Message(b"", {"id": "1", "type": "t"}))
    Traceback (most recent call last):
    ...
    conquiet.errors.InvalidMessage: t id=1 source=-: lacks subject, correlationid; let the \
producer set them

    `names` are those of the attributes.
    """

    def __init__(self, *names: str) -> None:
        if not names:
            raise ConfigError("Required() needs the names of attributes, such as 'subject'")
        for name in names:
            if not isinstance(name, str) or not (name.isascii() and name.isalnum()):
                raise ConfigError(
                    f"Required({name!r}): the name of an attribute consists of a-z and 0-9"
                )
        self.names = names

    def admit(self, message: Message[Any]) -> None:
        """Refuse a message without a required attribute; called outside the transaction."""
        attributes = message.attributes
        for name in self.names:
            if attributes.get(name, "") in ("", None):
                raise self._lacks(message)

    def _lacks(self, message: Message[Any]) -> InvalidMessage:
        missing = [name for name in self.names if message.attributes.get(name, "") in ("", None)]
        return InvalidMessage(
            f"{describe(message.attributes)}: lacks {', '.join(missing)}; let the producer set them"
        )

    def __call__(self, next: Process) -> Process:
        return next  # admit does the work
