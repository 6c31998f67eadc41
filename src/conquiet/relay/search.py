"""Search: which rows of an outbox an operator wants to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, and_, or_

from conquiet.errors import ConfigError

State = Literal["waiting", "pending", "parked", "published", "any"]


@dataclass(frozen=True, slots=True)
class Search:
    """All that is said must hold. `type` may have * for anything.

    >>> Search(state="parked", type="order.*", error="timeout").state
    'parked'
    """

    state: State = "waiting"
    """`waiting` is what is not published: pending or parked."""
    id: str = ""
    """Of the event, or of the row."""
    type: str = ""
    aggregate: str = ""
    """Its id or type; of the generic outbox, the key or the topic."""
    error: str = ""
    """A part of the last error, in capitals or not."""
    attempts: int = 0
    """At least so many."""

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise ConfigError(f"state={self.state!r}: choose one of {', '.join(get_args(State))}")

    def condition(
        self,
        states: Mapping[str, ColumnElement[bool]],
        columns: Mapping[str, ColumnElement[Any]],
        named: ColumnElement[bool] | None,
    ) -> ColumnElement[bool]:
        """In SQL, of the columns that both tables have under other names."""
        wanted = [states[self.state]]
        if named is not None:
            wanted.append(named)
        if self.type:
            wanted.append(columns["type"].like(_pattern(self.type), escape="\\"))
        if self.aggregate:
            ids = (columns["aggregate_id"], columns["aggregate_type"])
            wanted.append(or_(*(column == self.aggregate for column in ids)))
        if self.error:
            wanted.append(columns["error"].icontains(self.error, autoescape=True))
        if self.attempts:
            wanted.append(columns["attempts"] >= self.attempts)
        return and_(*wanted)


def _pattern(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return plain.replace("*", "%")
