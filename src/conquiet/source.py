"""Read messages whose acking settles them at their origin: the protocols of sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from conquiet.message import Message


class Source(Protocol):
    """Delivers messages to a worker. One thread reads at a time; any thread may settle.

    A nacked message is delivered again. If its error is `Blameless`, the delivery does not count.

    An async worker calls a source in threads. One whose `is_async` is True it calls on its event
    loop, where the source waits by `conquiet.bridge.wait_for` and must not block.
    """

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        """Return up to `limit` messages; wait up to `timeout` seconds for the first."""

    def close(self) -> None:
        """Stop reading. Unsettled messages are delivered again, here or elsewhere."""


@runtime_checkable
class Leased(Protocol):
    """Delivers messages again that are not settled within `lease` seconds."""

    lease: float

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Extend the lease of messages in flight by another `lease` seconds."""


@runtime_checkable
class Replayable(Protocol):
    """Can be read again from any position."""

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """Yield messages from `start` to `end`, both inclusive, without moving the read position.

        A message has its position in `locals["position"]`.
        """


@runtime_checkable
class Positioned(Protocol):
    """Can keep its position in the transaction of the effects.

    A worker adds the middleware `inbox` to the chain of its router, inside the transaction; None
    adds nothing.
    """

    inbox: Callable[[Any], Any] | None


@runtime_checkable
class Delaying(Protocol):
    """Can keep a failed message for hours, and deliver others meanwhile."""

    def allow_delays(self, attempts: int, *, ordered: bool) -> None:
        """Keep a message that is nacked with `TryLater` for its seconds, in the store.

        A worker calls it before the first read. A message may be delivered `attempts` times. If
        `ordered`, later messages of its key wait for it; raises if the source cannot do that.
        """


class EndOfSource(Exception):
    """Raised by `read` when the source has ended; the worker then stops."""
