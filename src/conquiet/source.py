"""Source: yields messages whose acking is bound to where they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from conquiet.message import Message


class Source(Protocol):
    """Where a worker reads. One thread reads at a time; settling may come from any.

    A nack gives the message back to be delivered again. If its error is `Blameless`, the
    delivery does not count.
    """

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        """Up to `limit` messages; waits `timeout` seconds at most for the first of them."""

    def close(self) -> None:
        """Stop reading. What is not settled by now is delivered again, here or elsewhere."""


@runtime_checkable
class Leased(Protocol):
    """A source that delivers again what was not settled within `lease` seconds."""

    lease: float

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Start the lease of these messages anew: they are still being worked on."""


@runtime_checkable
class Replayable(Protocol):
    """A source that can be read again from any point."""

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """What was published from `start` to `end`, both inclusive; the live position stays.

        A message says where it stands in `locals["position"]`.
        """


class EndOfSource(Exception):
    """Raised by `read` when nothing will ever come again; the worker then stops."""
