"""Settle messages once: ack or nack(error).

    pending ──ack──▶ acked          (final)
       └─────nack──▶ nacked         (final)

A `Settler`, such as the source of a message, takes the settlements. It settles many messages in one
call, so a batch costs one round trip. Inside a transaction `ack` and `nack` wait for the commit; a
rollback discards them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Protocol, TypeVar

from conquiet import bridge

logger = logging.getLogger("conquiet.acking")

Error = Exception | None
T = TypeVar("T")


class State(Enum):
    """The state of a message; `ACKED` and `NACKED` are final."""

    PENDING = "pending"
    ACKED = "acked"
    NACKED = "nacked"


class Settler(Protocol):
    """Takes settlements by token: acked, or nacked with an error."""

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None: ...


class Acking:
    """Settles one message once; the first call wins, later ones do nothing.

    In a handler inside a transaction, the settlement reaches the source after the commit, and not
    at all after a rollback; until then the message is pending.

    >>> acking = Acking.calling(lambda: print("acked"), lambda error: print("nacked", error))
    >>> acking.ack(), acking.nack(None), acking.state.value
    acked
    (True, False, 'acked')

    `settler` is told of each settlement, with `token`, by which it knows the message.
    """

    __slots__ = ("_deferral", "_pending", "_settler", "error", "state", "token")

    def __init__(self, settler: Settler, token: Any = None) -> None:
        self._settler = settler
        self._pending = True
        self._deferral: _Deferral | None = None
        self.token = token
        self.state = State.PENDING
        self.error: Error = None

    @classmethod
    def calling(cls, on_ack: Callable[[], object], on_nack: Callable[[Error], object]) -> Acking:
        """Create an acking that calls `on_ack`, or `on_nack` with the error, outside any lock."""
        return cls(_Callbacks(on_ack, on_nack))

    def split(self, count: int) -> list[Acking]:
        """Share this acking among `count` messages.

        It is acked when all of them are; the first nack nacks it. Each share settles once,
        so a message that acks twice still counts once.
        """
        if count < 1:
            raise ValueError(f"an acking is shared by 1 message or more, not by {count}")
        share = _Share(self, count)
        return [Acking(share) for _ in range(count)]

    @property
    def settled(self) -> bool:
        """Return whether ack or nack was called."""
        return self.state is not State.PENDING

    def ack(self) -> bool:
        """Ack the message: it took effect. Return False if it was settled before."""
        if self.settled:
            return False
        deferral = self._deferral or _DEFERRAL.get()
        if deferral is None:
            return settle((self,)) == 1
        return deferral.add(self, True, None)

    def nack(self, error: Error = None) -> bool:
        """Nack the message, also with `None`. Return False if it was settled before."""
        if self.settled:
            return False
        deferral = self._deferral or _DEFERRAL.get()
        if deferral is None:
            return settle((), ((self, error),)) == 1
        return deferral.add(self, False, error)

    def _become(self, state: State, error: Error) -> bool:
        try:
            # Of several threads one deletes it. A lock for each message would do as well, and is
            # one more object for the garbage collector to visit.
            del self._pending
        except AttributeError:
            return False
        self.error = error
        self.state = state
        return True

    def __repr__(self) -> str:
        return f"<Acking {self.state.value} {self.token!r}>"


def settle(acked: Iterable[Acking], nacked: Iterable[tuple[Acking, Error]] = ()) -> int:
    """Settle many messages with one call per settler; return how many were pending.

    An exception of a settler is raised after the others were called: its messages count as settled
    here, and their source will deliver them again.
    """
    groups: dict[Settler, tuple[list[Any], list[tuple[Any, Error]]]] = {}
    count = 0
    last: Settler | None = None
    tokens: list[Any] = []
    for first in acked:
        if first._become(State.ACKED, None):
            count += 1
            settler = first._settler
            if settler is last:  # most messages of a batch have one source
                tokens.append(first.token)
                continue
            _collect(first, None, True, groups)
            if not isinstance(settler, _Share):
                last, tokens = settler, groups[settler][0]
    for first, error in nacked:
        if first._become(State.NACKED, error):
            count += 1
            _collect(first, error, False, groups)
    failure: Exception | None = None
    for settler, (good, bad) in groups.items():
        try:
            bridge.call(settler.settle, good, bad)
        except Exception as error:  # noqa: BLE001 - the other settlers must still be called
            failure = failure or error
    if failure is not None:
        raise failure
    return count


def settle_after_commit(
    acked: Iterable[Acking], nacked: Iterable[tuple[Acking, Error]] = ()
) -> None:
    """Settle many messages: inside a transaction after its commit, else at once."""
    deferral = _DEFERRAL.get()
    if deferral is None:
        settle(acked, nacked)
        return
    for acking in acked:
        deferral.add(acking, True, None)
    for acking, error in nacked:
        deferral.add(acking, False, error)


def _collect(
    acking: Acking,
    error: Error,
    good: bool,
    groups: dict[Settler, tuple[list[Any], list[tuple[Any, Error]]]],
) -> None:
    """Add a settlement to the group of its settler, resolving shares to their parent."""
    settler = acking._settler
    while isinstance(settler, _Share):
        if not settler.decides(good):
            return
        acking = settler.parent
        if not acking._become(State.ACKED if good else State.NACKED, error):
            return
        settler = acking._settler
    group = groups.get(settler)
    if group is None:
        group = groups[settler] = ([], [])
    if good:
        group[0].append(acking.token)
    else:
        group[1].append((acking.token, error))


class _Deferral:
    """Collects the settlements that are made inside one transaction, until it ends.

    open ──commit──▶ ended          settles what was collected
      └──rollback──▶ ended          discards it: the next attempt, or the router, settles
    """

    __slots__ = ("_ackings", "_collected", "_ended", "_lock", "_outer", "_token")

    def __init__(self, ackings: Sequence[Acking]) -> None:
        self._ackings = ackings
        self._outer = _DEFERRAL.get()
        self._lock = threading.Lock()
        self._collected: dict[Acking, tuple[bool, Error]] = {}
        self._ended = False

    def __enter__(self) -> None:
        for acking in self._ackings:  # for threads of a handler, which do not see its context
            acking._deferral = self
        self._token = _DEFERRAL.set(self)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _DEFERRAL.reset(self._token)
        if kind is None:
            self.commit()
        else:
            self.end()

    def add(self, acking: Acking, good: bool, error: Error) -> bool:
        """Collect a settlement; return False if the message has one."""
        with self._lock:
            if not self._ended:
                if acking in self._collected:
                    return False
                self._collected[acking] = (good, error)
                return True
        if self._outer is not None:
            return self._outer.add(acking, good, error)
        return settle((acking,)) == 1 if good else settle((), ((acking, error),)) == 1

    def commit(self) -> None:
        """Settle what was collected, or leave that to the transaction around this one."""
        collected = self.end()
        if self._outer is not None:
            for acking, (good, error) in collected.items():
                self._outer.add(acking, good, error)
            return
        if not collected:
            return
        try:
            settle(
                [acking for acking, (good, _) in collected.items() if good],
                [(acking, error) for acking, (good, error) in collected.items() if not good],
            )
        except Exception:
            # The effects are committed; the source redelivers, and the inbox skips duplicates.
            logger.exception("could not settle messages; they will be delivered again")

    def end(self) -> dict[Acking, tuple[bool, Error]]:
        """Collect no more; return what was collected."""
        with self._lock:
            self._ended = True
        for acking in self._ackings:
            acking._deferral = self._outer
        return self._collected


_DEFERRAL: ContextVar[_Deferral | None] = ContextVar("conquiet.deferral", default=None)
"""The deferral of the transaction around the running code."""


def defer_settlements(ackings: Sequence[Acking]) -> AbstractContextManager[None]:
    """Let settlements inside the block wait for its end; an exception discards them.

    `ackings` are those of the transaction's messages. Their settlements wait whichever thread makes
    them; those of other messages wait if they are made in the context of the block.
    """
    return _Deferral(ackings)


class _Share:
    """Counts the shares of one acking that are still missing."""

    __slots__ = ("_lock", "_missing", "parent")

    def __init__(self, parent: Acking, count: int) -> None:
        self.parent = parent
        self._missing = count
        self._lock = threading.Lock()

    def decides(self, good: bool) -> bool:
        """Count one settlement; return whether it settles the parent."""
        with self._lock:
            self._missing -= 1
            return not good or self._missing == 0

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
        raise AssertionError("a share is resolved to its parent before settling")


class _Callbacks:
    """Settles one message by calling one of two functions."""

    __slots__ = ("_on_ack", "_on_nack")

    def __init__(self, on_ack: Callable[[], object], on_nack: Callable[[Error], object]) -> None:
        self._on_ack = on_ack
        self._on_nack = on_nack

    def settle(self, acked: Sequence[Any], nacked: Sequence[tuple[Any, Error]]) -> None:
        if acked:
            self._on_ack()
        else:
            self._on_nack(nacked[0][1])
