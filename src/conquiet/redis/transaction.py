"""Transaction over a redis-py client: the writes of a batch in one MULTI … EXEC, or none of them.

EXEC ──▶ a list, no error in it      applied
   │ ──▶ a list with errors          applied in part: `PartialExecError`
   │ ──▶ nil                         fenced: a watched key changed, nothing applied
   │ ──▶ an error                    refused: nothing applied
   └ no reply                        unknown: `UnknownOutcome`

A `Unit` is one running transaction. It is ambient, in a ContextVar: each thread has its own, and a
coroutine that runs in a copied context finds the one of its worker.
"""

from __future__ import annotations

import logging
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import redis

from conquiet import bridge, transaction
from conquiet.errors import (
    Blameless,
    ConfigError,
    ConquietError,
    HandlerError,
    PermanentError,
    StoreError,
)
from conquiet.handler import AROUND, NOTHING, Process, Result
from conquiet.inbox import Entry
from conquiet.message import Message, describe
from conquiet.redis.connection import (
    Connection,
    CrossSlot,
    Database,
    NotSent,
    describe_place,
    pack,
)
from conquiet.redis.consumer import Delivery
from conquiet.redis.group import GroupStream
from conquiet.redis.lease import KeyState, Leases, LeaseTerms
from conquiet.redis.wire import TROUBLE, is_unwilling

logger = logging.getLogger("conquiet.redis")


# --- outcomes -------------------------------------------------------------------------------


class UnknownOutcome(Blameless):
    """The reply of EXEC was lost, so that it is unknown whether it took effect. The inbox decides
    at the next delivery."""


class InProgress(Blameless):
    """Another process handles the message, or died while handling it; its lease has not ended."""


class Fenced(Blameless):
    """A watched key changed before EXEC, so that nothing was written: a lease of the batch ended,
    or data that was read has changed. Its messages run again, one by one."""


class ExecRefused(ConquietError):
    """Redis refused a command when it was queued, so that nothing was written."""


class TransactionEnded(HandlerError):
    """Commands were queued, or read, through a transaction that has ended."""


class PartialExecError(PermanentError):
    """Redis ran the transaction, and some of its commands failed while the others took effect.

    Trying again would repeat those that took effect. `failed` names the commands and their errors,
    `total` is how many there were; the text begins with `about`, the message.
    """

    def __init__(self, about: str, failed: Sequence[tuple[str, str]], total: int) -> None:
        what = "; ".join(f"{command}: {error}" for command, error in failed[:5])
        super().__init__(
            f"{about}: {len(failed)} of {total} commands of its transaction failed when Redis ran"
            f" it, and the others took effect; the inbox holds the message as done. {what}"
        )
        self.failed = tuple(failed)


class _PartlyApplied(Exception):
    """Names the failed commands of a transaction, before they are assigned to messages."""

    def __init__(self, failed: Sequence[tuple[Queued, Exception]], total: int) -> None:
        super().__init__(f"{len(failed)} of {total} commands failed")
        self.failed = failed
        self.total = total

    def results(self, batch: Sequence[Message[Any]]) -> list[Result]:
        """Return an error for each message with a failed command; for all, if its message is
        unknown."""
        errors: dict[int, list[tuple[str, str]]] = {}
        for queued, error in self.failed:
            for message in queued.messages or batch:
                errors.setdefault(id(message), []).append((queued.title, str(error)))
        results: list[Result] = []
        for message in batch:
            failed = errors.get(id(message))
            if failed:
                about = describe(message.attributes)
                results.append(PartialExecError(about, failed, self.total))
            else:
                results.append(NOTHING)
        return results


def _refusal(
    commands: Iterable[Queued | None], queued: Iterable[Any], reply: Exception
) -> Exception:
    """Return why EXEC was refused: the first command that was refused, if there is one."""
    for command, answer in zip(commands, queued, strict=False):
        if isinstance(answer, Exception):
            what = "a command of conquiet" if command is None else command.title
            text = f"Redis refused {what}, and nothing was written: {answer}"
            is_ours = command is None or is_unwilling(answer)
            return StoreError(text) if is_ours else ExecRefused(text)
    return StoreError(f"Redis refused the transaction, and nothing was written: {reply}")


# --- queued commands ------------------------------------------------------------------------


class Queued:
    """A command that waits for EXEC. It has no result yet: to use it as one raises.

    Its text raises too, also its repr: text is where a result would get into the key of another
    command.
    """

    __slots__ = ("arguments", "messages", "packed")

    def __init__(
        self, arguments: tuple[Any, ...], packed: bytes, messages: Sequence[Message[Any]]
    ) -> None:
        self.arguments = arguments
        self.packed = packed
        self.messages = messages
        """The messages whose handler queued it; empty if that is unknown."""

    @property
    def title(self) -> str:
        """Name and key, not the values: those may be secret."""
        return " ".join(map(_shorten, self.arguments[:2]))

    def _refuse(self, *_: object) -> NoReturn:
        raise HandlerError(
            f"the result of {self.title} is not known before the transaction ends; to decide by"
            " what is stored, read with commands(client).reader"
        )

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __float__ = __index__ = __len__ = __iter__ = __contains__ = _refuse
    __getitem__ = __add__ = __sub__ = _refuse
    __str__ = __format__ = __repr__ = __bytes__ = _refuse
    __hash__ = object.__hash__

    def __await__(self) -> NoReturn:
        raise HandlerError(
            f"{self.title} waits for EXEC, and there is nothing to await; call it without await"
        )


class AwaitableQueued(Queued):
    """A command of a `redis.asyncio` client that waits for EXEC; it may be awaited."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Queued]:  # type: ignore[override]
        return self
        yield


def _shorten(word: object) -> str:
    text = word.decode(errors="backslashreplace") if isinstance(word, bytes) else str(word)
    return text if len(text) <= 80 else f"{text[:77]}…"


# --- the running transaction ----------------------------------------------------------------


class _CommitAcks(NamedTuple):
    """The XACK of one stream that rides in the EXEC, and the deliveries that it acks."""

    packed: bytes
    deliveries: Sequence[Delivery]


class Unit:
    """One running transaction: all that waits for its EXEC, and why some messages have no part.

    Owns the queued commands, the leased inbox keys, the acks that ride in the EXEC, the connection
    and the slot. Middlewares change it by methods only. It ends once, by `commit` or `discard`;
    after that every use raises `TransactionEnded`.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.ended = False
        self._commands: list[Queued] = []
        self._leases = Leases(self)
        self._held_back: dict[int, Exception] = {}
        """By the id of the message: why it has no part in this transaction."""
        self._fresh: set[Entry] = set()
        """The entries that were admitted last and whose messages were not seen before."""
        self._acks: list[_CommitAcks] = []
        self._connection: Connection | None = None
        self._slot: int | None = None
        self._watches_data = False
        self._handling: Sequence[Message[Any]] = ()

    # --- commands ---------------------------------------------------------------------------

    def queue(self, name: str, arguments: tuple[Any, ...], kind: type[Queued] = Queued) -> Queued:
        """Queue a command for EXEC; raises at once for arguments that Redis cannot take."""
        self.check()
        if self.database.is_cluster:
            self._join_slot(self.database.slot_of(name, arguments), name)
        queued = kind(arguments, self.database.pack(arguments), self._handling)
        self._commands.append(queued)
        return queued

    def watch(self, keys: Sequence[bytes]) -> None:
        """WATCH now: if a key changes before EXEC, nothing is written and the batch runs again."""
        self.check()
        for key in keys:
            self.join_key(key)
        connection = self.connection()
        with connection.lock:
            self._watches_data = True
            try:
                [reply] = connection.watch([pack((b"WATCH", *keys))])
            except TROUBLE as error:
                raise StoreError(f"WATCH failed: {error}") from error
        if isinstance(reply, Exception):
            raise StoreError(f"WATCH failed: {reply}") from reply

    @property
    def watches_data(self) -> bool:
        """Return whether a handler watches keys of its own."""
        return self._watches_data

    def handle(
        self, messages: Sequence[Message[Any]], call: Callable[[], Sequence[Result]]
    ) -> Sequence[Result]:
        """Call a handler; commands that it queues belong to these messages."""
        self._handling = messages
        try:
            return call()
        finally:
            self._handling = ()

    def check(self) -> None:
        """Raise if the transaction has ended.

        A thread that copied the context may outlive the handler; its writes would be lost silently.
        """
        if self.ended:
            raise TransactionEnded(
                "Redis was used through a transaction that has ended; finish all work before the"
                " handler returns, and call conquiet.redis.commands(client) again each time"
            )

    # --- inbox and acks ---------------------------------------------------------------------

    def lease(self, keys: Sequence[bytes], terms: LeaseTerms) -> list[KeyState]:
        """Lease inbox keys and return their states."""
        return self._leases.acquire(keys, terms)

    def admit(self, messages: Sequence[Message[Any]], fresh: Mapping[bytes, Entry]) -> None:
        """Let messages take part: their acks ride in the EXEC, and fresh keys become `done`.

        The rest of the messages are duplicates of messages that took effect. An earlier try may
        have held some back, and an inner transaction that was undone may have left fresh entries.
        """
        if self._held_back:
            for message in messages:
                self._held_back.pop(id(message), None)
        self._leases.confirm(fresh)
        self._fresh = set(fresh.values())
        self._ack_with_commit(messages)

    def hold_back(self, message: Message[Any], error: Exception) -> None:
        """Keep a message out of this transaction; the error is its result after the commit."""
        self._held_back[id(message)] = error

    def fresh(self, entries: Sequence[Entry]) -> Collection[Entry]:
        """Return those of the entries that were fresh in the last `admit`."""
        return [entry for entry in entries if entry in self._fresh]

    def with_held_back(
        self, results: Sequence[Result], batch: Sequence[Message[Any]]
    ) -> Sequence[Result]:
        """Return the results, with the errors of the messages that were held back."""
        held = self._held_back
        if not held:
            return results
        return [held.get(id(m), result) for m, result in zip(batch, results, strict=True)]

    def _ack_with_commit(self, messages: Sequence[Message[Any]]) -> None:
        """Ack messages of streams on the same server in the EXEC; their source sends nothing then.

        Only for messages that are in the inbox: it says `done` from the same EXEC on, so a later
        delivery could have no effect but this ack, however the router acks. A message that several
        handlers take has a share of an acking here, and no delivery. Not for streams whose acked
        entries are deleted: a crash before the deletion would leave them there for ever.
        """
        by_stream: dict[GroupStream, list[Delivery]] = {}
        for message in messages:
            delivery = message.acking.token if message.acking is not None else None
            if type(delivery) is Delivery and not delivery.stream.deletes:
                by_stream.setdefault(delivery.stream, []).append(delivery)
        for stream, deliveries in by_stream.items():
            if self.database.serves(stream.client) and self._shares_slot(stream.key):
                ack = (b"XACK", stream.key, stream.group, *[item.id for item in deliveries])
                self._acks.append(_CommitAcks(pack(ack), deliveries))

    # --- slots and the connection -----------------------------------------------------------

    def join_key(self, key: bytes) -> None:
        """Make a key part of the transaction; raises `CrossSlot` if its slot is another."""
        if self.database.is_cluster:
            slot = self.database.slot(key)
            self._join_slot(slot, key.decode(errors="backslashreplace"))

    def _join_slot(self, slot: int | None, what: str) -> None:
        if slot is None or slot == self._slot:
            return
        if self._slot is not None:
            raise CrossSlot(
                f"{what} lies in slot {slot} of the cluster and the transaction in slot"
                f" {self._slot}; give the keys of one transaction the same hash tag, such as"
                " order:{billing}:17 for Inbox('billing'), or name one by Inbox(…, tag=…)"
            )
        self._slot = slot

    def _shares_slot(self, key: bytes) -> bool:
        return not self.database.is_cluster or self.database.slot(key) == self._slot

    def connection(self) -> Connection:
        """Return the connection of this transaction, opened when it is first needed."""
        if self._connection is None:
            self._connection = self.database.connect(self._slot)
        return self._connection

    # --- the end ----------------------------------------------------------------------------

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo commands, confirms and acks that were added inside if an exception passes."""
        self.check()
        commands, confirmed, acks = len(self._commands), self._leases.confirmed, len(self._acks)
        try:
            yield
        except BaseException:
            del self._commands[commands:], self._acks[acks:]
            self._leases.undo_confirms(confirmed)
            raise

    def commit(self) -> None:
        """Send MULTI … EXEC, and raise unless all of it was applied."""
        self.ended = True
        packed = [queued.packed for queued in self._commands]
        packed += self._leases.pack_settlement()
        ours = len(packed)
        packed += [ack.packed for ack in self._acks]
        if not packed and self._connection is None:
            return
        connection = self.connection()
        with connection.lock:
            if not packed:
                connection.unwatch()
                return
            replies = self._execute(connection, packed)
        applied = replies[-1]
        if applied is None:
            self._leases.abandon()
            raise Fenced(
                "a lease of the inbox ended before EXEC, or watched data changed; nothing was"
                " written"
            )
        if isinstance(applied, Exception):
            self._leases.abandon()
            refused = _refusal([*self._commands, *[None] * len(packed)], replies[1:-1], applied)
            if isinstance(refused, StoreError):
                self.database.learn_topology()
                connection.drop()  # after a failover the next connection may reach the new master
            raise refused from applied
        self._leases.forget()
        for ack, reply in zip(self._acks, applied[ours:], strict=False):
            if not isinstance(reply, Exception):
                for delivery in ack.deliveries:
                    delivery.mark_acked()
        self._raise_failures(applied)

    def _execute(self, connection: Connection, packed: list[bytes]) -> list[Any]:
        try:
            return connection.execute(packed)
        except BaseException as error:
            self._leases.abandon()
            self.database.learn_topology()
            if isinstance(error, NotSent):
                raise StoreError(f"the transaction could not be sent: {error}") from error
            if isinstance(error, TROUBLE):
                raise UnknownOutcome(
                    f"the reply of EXEC was lost, so that it is unknown whether"
                    f" {len(self._commands)} commands took effect; the inbox will know: {error}"
                ) from error
            raise

    def _raise_failures(self, replies: Sequence[Any]) -> None:
        failed = [
            (queued, reply)
            for queued, reply in zip(self._commands, replies, strict=False)
            if isinstance(reply, Exception)
        ]
        if failed:
            for queued, error in failed:
                logger.error("%s failed in a transaction that was applied: %s", queued.title, error)
            raise _PartlyApplied(failed, len(self._commands))

    def discard(self) -> None:
        """Give the leases back; queued commands are not sent."""
        self.ended = True
        connection = self._connection
        if connection is None:
            return
        with connection.lock:
            release = self._leases.pack_release()
            if not release:
                connection.unwatch()
                return
            try:
                # The keys are still watched: a lease that is not ours any more is not deleted.
                connection.execute(release)
                self._leases.forget()
            except (redis.RedisError, OSError) as error:
                self._leases.abandon()
                logger.warning(
                    "could not give leases of the inbox back, they end by themselves: %r", error
                )

    def close(self) -> None:
        """Stop renewing and return the connection to its pool."""
        self.ended = True
        self._leases.forget()
        if self._connection is not None:
            with self._connection.lock:
                self._connection.close()


# --- the ambient transaction ----------------------------------------------------------------

_units: ContextVar[tuple[Unit, ...]] = ContextVar("conquiet.redis.units", default=())
"""The transactions around the running code, innermost last."""

_running: dict[Unit, str] = {}
"""All transactions of this process, and the names of their threads or tasks."""


def is_inside() -> bool:
    """Return whether a transaction is around the running code, on whichever database."""
    return bool(_units.get())


def warn_of_other_thread(client: Any) -> None:
    """Log that code outside any transaction uses a database on which another thread runs one.

    It may be a thread of that handler: a new thread does not inherit the transaction.
    """
    for unit, place in list(_running.items()):
        if unit.database.has_address_of(client):
            unit.database.warn_of_use_outside(place)


def current_unit(who: str) -> Unit:
    """Return the innermost transaction; raises if `who` is used outside one."""
    units = _units.get()
    if not units:
        raise HandlerError(
            f"{who} was used outside a Redis transaction; put conquiet.redis.Transaction around"
            " it: router.use(Transaction(client), Inbox(…), Outbox(…))"
        )
    units[-1].check()
    return units[-1]


def find_unit(client: Any) -> Unit | None:
    """Return the innermost transaction on the database of this client, if there is one."""
    for unit in reversed(_units.get()):
        if unit.database.serves(client):
            unit.check()
            return unit
    return None


class Transaction(transaction.Transaction):
    """Middleware: writes of a batch go to Redis in one MULTI … EXEC, or not at all.

    Adapters queue by `conquiet.redis.commands(client)`. Inside another transaction on the same
    database it is a part of that one, and undone alone if it fails. One connection of the pool is
    in use from the inbox to EXEC; reads of handlers need another.

    A client of `redis.asyncio` is for an async worker, `await worker.run_async()`. With any client
    such a worker uses two fifths of `max_connections`, and keeps the rest for reads of handlers and
    sources.

    EXEC is no rollback: see `PartialExecError`.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._database = Database(client)
        self.is_async = self._database.is_async
        self.blocks = not self.is_async

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        # Each handler may read by one more, and sources read and settle; a pool of redis-py refuses
        # a connection too many.
        return max(1, self._database.max_connections * 2 // 5)

    @property
    def pool(self) -> object:  # type: ignore[override]
        return getattr(self.client, "connection_pool", self.client)  # a cluster has several

    def check_chain(self, middlewares: Sequence[object]) -> None:
        """Refuse a client of `redis.asyncio` where no event loop can be waited for."""
        if self._database.is_async and not bridge.is_inside():
            raise ConfigError(
                "Transaction has a client of redis.asyncio, which needs the event loop of an async"
                " worker: use await worker.run_async(), or async with worker; a worker of threads"
                " takes a redis.Redis"
            )

    def scope(self, batch: Sequence[Message[Any]]) -> AbstractContextManager[object]:
        """Begin a transaction, or a savepoint inside one on the same database."""
        self.check_chain(())
        outer = find_unit(self.client)
        return self._run_unit(batch) if outer is None else outer.savepoint()

    def commit(self, next: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run a batch in one MULTI … EXEC; a command that failed fails its own message."""
        last: Unit | None = None

        def run(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            nonlocal last
            results = next(batch)
            last = find_unit(self.client)  # each try has a unit of its own
            return results

        try:
            results = self._try(run, batch)
        except _PartlyApplied as partly:
            results = partly.results(batch)
        except UnknownOutcome as error:
            # To run it again now might repeat it; the inbox decides at the next delivery.
            return [error] * len(batch)
        return results if last is None else last.with_held_back(results, batch)

    def _try(self, run: Process, batch: Sequence[Message[Any]]) -> Sequence[Result]:
        """Run a single message that was fenced again; a batch of several runs one by one."""
        for _ in range(self.max_store_attempts - 1 if len(batch) == 1 else 0):
            try:
                return super().commit(run, batch)
            except Fenced:
                pass
        return super().commit(run, batch)

    @contextmanager
    def _run_unit(self, batch: Sequence[Message[Any]]) -> Iterator[None]:
        unit = Unit(self._database)
        _running[unit] = describe_place()
        entered = _units.set((*_units.get(), unit))
        around = AROUND.set((*AROUND.get(), unit.handle)) if len(batch) > 1 else None
        try:
            yield
            unit.commit()
        except Exception as error:
            unit.discard()
            if _is_trouble(error):
                raise StoreError(f"Redis failed inside the transaction: {error}") from error
            raise
        except BaseException:
            unit.discard()
            raise
        finally:
            if around is not None:
                AROUND.reset(around)
            _units.reset(entered)
            _running.pop(unit, None)
            unit.close()


def _is_trouble(error: Exception) -> bool:
    """Return whether a read of a handler failed because of the server, not of its message."""
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return True
    return isinstance(error, redis.ResponseError) and is_unwilling(error)
