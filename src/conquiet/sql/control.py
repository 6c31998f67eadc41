"""Statements that begin or end a transaction, which a handler must leave to its transaction."""

from __future__ import annotations

import re

from conquiet.errors import HandlerError

# By the first word, comments aside. ROLLBACK TO a savepoint ends nothing.
_control = re.compile(
    r"(?:\s|;|--[^\n]*\n|/\*.*?\*/)*"
    r"(COMMIT|END|ABORT|BEGIN|(?:START|PREPARE)\s+TRANSACTION"
    r"|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)


def refuse_control(statement: str) -> None:
    """Raise, before it is sent, if a statement would begin or end the transaction around it.

    Else the effects so far would be committed, and the events that follow them lost.
    """
    found = _control.match(statement)
    if found is not None:
        raise not_yours(found[1].upper())


def not_yours(what: str) -> HandlerError:
    return HandlerError(
        f"{what} on the connection of a conquiet transaction, which the transaction alone may"
        " end; raise an exception to roll back, use begin_nested() for a savepoint"
    )
