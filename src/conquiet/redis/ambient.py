"""The ambient transaction: how adapters find the one that they run in.

A `Unit` stands in a ContextVar, so each thread has its own, and a coroutine that runs in a
copied context sees the one of its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import redis

from conquiet.errors import HandlerError, StoreError
from conquiet.handler import Result
from conquiet.inbox import Entry
from conquiet.message import Message
from conquiet.redis.home import CrossSlot, Home
from conquiet.redis.lease import Leases
from conquiet.redis.outcome import Fenced, PartlyApplied, UnknownOutcome, refusal
from conquiet.redis.queued import Queued
from conquiet.redis.session import Session, pack
from conquiet.redis.wire import TROUBLE

logger = logging.getLogger("conquiet.redis")

UNITS: ContextVar[tuple[Unit, ...]] = ContextVar("conquiet.redis.units", default=())
"""The transactions around the running code, innermost last."""

_MULTI = pack((b"MULTI",))
_EXEC = pack((b"EXEC",))
_UNWATCH = pack((b"UNWATCH",))


class TransactionEnded(HandlerError):
    """Commands were queued, or read, through a transaction that is over."""


class Unit:
    """One transaction: the commands that wait for its EXEC, and what it has leased for it."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.ended = False
        self.commands: list[Queued] = []
        self.leases = Leases(self)
        self.held: dict[int, Exception] = {}
        """By the id of the message: why it must not run in this transaction."""
        self.fresh: set[Entry] = set()
        """The entries that the inbox leased last: their messages were not seen before."""
        self.on_commit: list[Acks] = []
        self._session: Session | None = None
        self._slot: int | None = None
        self._watches = False
        self._handling: Sequence[Message[Any]] = ()

    # --- inside -----------------------------------------------------------------------------

    def queue(self, name: str, arguments: tuple[Any, ...]) -> Queued:
        """Let a command wait for EXEC. What Redis cannot take is refused here and now."""
        self.check()
        if self.home.is_cluster:
            self.join_slot(self.home.slot_of(name, arguments), name)
        queued = Queued(arguments, self.home.pack(arguments), self._handling)
        self.commands.append(queued)
        return queued

    def watch(self, keys: Sequence[bytes]) -> None:
        """WATCH now: if a key changes before EXEC, nothing is written and all runs again."""
        self.check()
        for key in keys:
            self.join_key(key)
        session = self.session()
        with session.lock:
            self._watches = session.is_watching = True
            try:
                [reply] = session.exchange([pack((b"WATCH", *keys))])
            except TROUBLE as error:
                raise StoreError(f"WATCH failed: {error}") from error
        if isinstance(reply, Exception):
            raise StoreError(f"WATCH failed: {reply}") from reply

    @property
    def watches_data(self) -> bool:
        return self._watches

    def note(
        self, messages: Sequence[Message[Any]], call: Callable[[], Sequence[Result]]
    ) -> Sequence[Result]:
        """Around a handler: what is queued meanwhile belongs to these messages."""
        self._handling = messages
        try:
            return call()
        finally:
            self._handling = ()

    def check(self) -> None:
        # Also met by a thread that copied the context and outlived the handler: its writes
        # would otherwise be lost without a word.
        if self.ended:
            raise TransactionEnded(
                "Redis was used through a transaction that has ended; finish all work before the"
                " handler returns, and ask conquiet.redis.commands(client) anew each time"
            )

    # --- slots ------------------------------------------------------------------------------

    def join_key(self, key: bytes) -> None:
        if self.home.is_cluster:
            self.join_slot(self.home.slot(key), key.decode(errors="backslashreplace"))

    def join_slot(self, slot: int | None, what: str) -> None:
        """All keys of a transaction lie in one slot, or nothing is sent (R11)."""
        if slot is None or slot == self._slot:
            return
        if self._slot is not None:
            raise CrossSlot(
                f"{what} lies in slot {slot} of the cluster and the transaction in slot"
                f" {self._slot}; give the keys of one transaction the same hash tag, such as"
                " order:{billing}:17 for Inbox('billing'), or name one by Inbox(…, tag=…)"
            )
        self._slot = slot

    def shares_slot(self, key: bytes) -> bool:
        """Whether a key may be part of this transaction as it is."""
        return not self.home.is_cluster or self.home.slot(key) == self._slot

    def session(self) -> Session:
        """The connection of this transaction, from when it is first needed."""
        if self._session is None:
            self._session = self.home.session(self._slot)
        return self._session

    # --- the end ----------------------------------------------------------------------------

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what was queued inside if an exception passes, and only that."""
        self.check()
        marks = len(self.commands), len(self.leases.confirmed), len(self.on_commit)
        try:
            yield
        except BaseException:
            commands, confirmed, acks = marks
            del self.commands[commands:], self.leases.confirmed[confirmed:], self.on_commit[acks:]
            raise

    def commit(self) -> None:
        """MULTI … EXEC: all in one go, or nothing."""
        self.ended = True
        packed = [queued.packed for queued in self.commands]
        packed += self.leases.settling()
        ours = len(packed)
        for acks in self.on_commit:
            packed += acks.packed
        if not packed and self._session is None:
            return
        session = self.session()
        with session.lock:
            if not packed:
                self._unwatch(session)
                return
            replies = self._execute(session, packed)
        applied = replies[-1]
        if applied is None:
            self.leases.abandon()
            raise Fenced(
                "a lease of the inbox ran out before EXEC, or watched data changed; nothing was"
                " written"
            )
        if isinstance(applied, Exception):
            self.leases.abandon()
            refused = refusal([*self.commands, *[None] * len(packed)], replies[1:-1], applied)
            if isinstance(refused, StoreError):
                self.home.lost()
                session.drop()  # after a failover the next connection may find the new master
            raise refused from applied
        self.leases.forget()
        self._tell(applied[ours:])
        self._look_for_failures(applied)

    def _execute(self, session: Session, packed: list[bytes]) -> list[Any]:
        try:
            session.send([_MULTI, *packed, _EXEC])
        except BaseException as error:
            self.leases.abandon()
            self.home.lost()
            if isinstance(error, TROUBLE):
                raise StoreError(f"the transaction could not be sent: {error}") from error
            raise
        try:
            replies = session.receive(len(packed) + 2)
        except BaseException as error:
            self.leases.abandon()
            self.home.lost()
            if isinstance(error, TROUBLE):
                raise UnknownOutcome(
                    f"the reply of EXEC was lost, so that it is unknown whether"
                    f" {len(self.commands)} commands took effect; the inbox will know: {error}"
                ) from error
            raise
        session.is_watching = False
        return replies

    def _unwatch(self, session: Session) -> None:
        if session.is_watching:
            try:
                session.exchange([_UNWATCH])
                session.is_watching = False
            except TROUBLE:  # nothing hangs on it: the connection is closed instead
                pass

    def _tell(self, replies: Sequence[Any]) -> None:
        """Let the sources know which acks the commit has carried."""
        start = 0
        for acks in self.on_commit:
            mine = replies[start : start + len(acks.packed)]
            start += len(acks.packed)
            if not any(isinstance(reply, Exception) for reply in mine):
                acks.done()

    def _look_for_failures(self, replies: Sequence[Any]) -> None:
        failed = [
            (queued, reply)
            for queued, reply in zip(self.commands, replies, strict=False)
            if isinstance(reply, Exception)
        ]
        if failed:
            for queued, error in failed:
                logger.error("%s failed in a transaction that was applied: %s", queued, error)
            raise PartlyApplied(failed, len(self.commands))

    def discard(self) -> None:
        """Forget what was queued, and give back what was leased."""
        self.ended = True
        session = self._session
        if session is None:
            return
        with session.lock:
            release = self.leases.releasing()
            if not release:
                self._unwatch(session)
                return
            try:
                # WATCH still holds: what is not ours any more is not deleted.
                session.exchange([_MULTI, *release, _EXEC])
                session.is_watching = False
                self.leases.forget()
            except (redis.RedisError, OSError) as error:
                self.leases.abandon()
                logger.warning("leases of the inbox could not be given back: %r", error)

    def close(self) -> None:
        self.ended = True
        self.leases.forget()
        if self._session is not None:
            with self._session.lock:
                self._session.close()


class Acks:
    """Acks that ride in the EXEC, and what to call when they have."""

    __slots__ = ("done", "packed")

    def __init__(self, packed: list[bytes], done: Callable[[], object]) -> None:
        self.packed = packed
        self.done = done


def current(who: str) -> Unit:
    """The innermost transaction; `who` needs it."""
    units = UNITS.get()
    if not units:
        raise HandlerError(
            f"{who} was used outside a Redis transaction; put conquiet.redis.Transaction around"
            " it: router.use(Transaction(client), Inbox(…), Outbox(…))"
        )
    units[-1].check()
    return units[-1]


def find(client: Any) -> Unit | None:
    """The innermost transaction on the database of this client, if there is one."""
    for unit in reversed(UNITS.get()):
        if unit.home.serves(client):
            unit.check()
            return unit
    return None
