"""Make a consumer idempotent: remember in Redis which events it has handled.

    absent ──claim──▶ processing:<owner> ──confirm──▶ done:<owner> ──ttl──▶ absent
                          │ handler failed: released, if the lease is still ours
                          │ handler runs long: the lease is renewed
                          └ crash: the lease expires

Relays may publish duplicates, so consumers must be idempotent. The key is the consumer and the
event id. A duplicate of a done event may be acked; one that is in progress elsewhere must not.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import timedelta
from functools import partial, wraps
from importlib.resources import files
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast, overload
from uuid import UUID

import redis
import redis.asyncio

from conquiet.errors import Blameless, ConfigError, StoreError
from conquiet.events.ttl import as_seconds, default_ttl
from conquiet.lease import LeaseKeeper, LoopLeaseKeeper
from conquiet.redis.transaction import InProgress

logger = logging.getLogger("conquiet.events")

PREFIX = "pf:evt:processed"
LEASE_SECONDS = 30.0

_RENEWALS = 3
"""How many renewals a lease has time for before it expires."""
_CONFIRMS = 3
_PAUSE_SECONDS = 0.1
_name = re.compile(r"[A-Za-z0-9_.\-]{1,100}")
_script = files(__package__).joinpath("idempotency.lua").read_text()


class LeaseLost(Blameless):
    """The lease expired while the handler ran, and another consumer took the event."""


class Ask(NamedTuple):
    """One step of the script: what to do with a key, for which owner, for how long."""

    key: str
    does: str
    owner: str
    seconds: float = 0.0

    @property
    def arguments(self) -> list[str | int]:
        milliseconds = max(1, round(self.seconds * 1000)) if self.seconds else 0
        return [self.does, self.owner, milliseconds]

    def error(self, error: Exception) -> StoreError:
        return StoreError(f"{self.key}: Redis could not {self.does}: {error}")


P = ParamSpec("P")
T = TypeVar("T")
Steps: TypeAlias = Generator[Ask | float, Any, T]
"""Yields steps of the script, receives their answers, or their StoreErrors, and returns a result.
A number is a pause in seconds. Both classes run the same steps."""


class _Rules:
    """Keys, times, and the steps of a claim; the base of both classes."""

    def __init__(
        self,
        *,
        lease: float | timedelta = LEASE_SECONDS,
        ttl: float | timedelta | None = None,
        prefix: str = PREFIX,
    ) -> None:
        self.lease = as_seconds("lease", lease)
        self.ttl = default_ttl() if ttl is None else as_seconds("ttl", ttl)
        if self.ttl < self.lease:
            raise ConfigError(f"ttl={self.ttl:g} is shorter than lease={self.lease:g}")
        if not isinstance(prefix, str) or not prefix:
            raise ConfigError(f"prefix={prefix!r:.60}: must be text, such as {PREFIX!r}")
        self.prefix = prefix

    @property
    def renew_every(self) -> float:
        """Return the seconds between two renewals of a lease."""
        return self.lease / _RENEWALS

    def key(self, consumer: str, event_id: UUID | str) -> str:
        """Return the key `pf:evt:processed:<consumer>:<event_id>`."""
        if not isinstance(consumer, str) or not _name.fullmatch(consumer):
            raise ConfigError(f"consumer {consumer!r:.60}: use letters, digits, '_', '-' and '.'")
        try:
            plain = event_id if isinstance(event_id, UUID) else UUID(event_id)
        except (ValueError, AttributeError, TypeError):
            raise ConfigError(f"event id {event_id!r:.60} is not a UUID") from None
        return f"{self.prefix}:{consumer}:{plain}"

    def _mark_steps(self, key: str, ttl: float | timedelta | None) -> Steps[bool]:
        seconds = self.ttl if ttl is None else as_seconds("ttl", ttl)
        answer = yield Ask(key, "mark", uuid.uuid4().hex, seconds)
        return _is_done(key, answer)

    def _claim_steps(self, key: str, owner: str) -> Steps[bool]:
        """Return whether the event is ours now; False if it is done."""
        answer = yield Ask(key, "claim", owner, self.lease)
        return not _is_done(key, answer)

    def _renew_steps(self, key: str, owner: str) -> Steps[float | None]:
        answer = _as_text((yield Ask(key, "renew", owner, self.lease)))
        if answer == "held":
            logger.warning("%s: the lease was lost while its handler is running", key)
        return self.renew_every if answer == "ours" else None

    def _confirm_steps(self, key: str, owner: str, ttl: float | None) -> Steps[None]:
        """Confirm, with retries if the reply was lost; confirming twice is harmless."""
        ask = Ask(key, "confirm", owner, self.ttl if ttl is None else ttl)
        for left in reversed(range(_CONFIRMS)):
            try:
                answer = yield ask
                break
            except StoreError:
                if not left:
                    raise
            yield _PAUSE_SECONDS
        if _as_text(answer) != "ours":
            raise LeaseLost(
                f"{key}: its lease expired and another consumer took the event; its effects"
                " may have happened twice. Use a longer lease"
            )

    def _release_steps(self, key: str, owner: str) -> Steps[None]:
        try:
            yield Ask(key, "release", owner)
        except StoreError as error:
            logger.warning(
                "could not release an event, it waits for its lease to expire: %s", error
            )


def _as_text(answer: bytes | str) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def _is_done(key: str, answer: bytes | str) -> bool:
    """Return whether an event was done before; raise if it is in progress elsewhere."""
    if _as_text(answer) == "held":
        raise InProgress(f"{key}: in progress elsewhere; do not ack")
    return _as_text(answer) == "done"


class Idempotency(_Rules):
    """Remembers in Redis which consumer has handled which event.

    >>> idempotency = Idempotency(client)
    >>> event_id = "01900000-0000-7000-8000-000000000001"
    >>> for delivery in (1, 2):
    ...     with idempotency.guard("mailer", event_id) as fresh:
    ...         print("sent" if fresh else "seen before")
    sent
    seen before

    `client` is a plain `redis.Redis`; coroutines may use its guards too, in a thread each, and
    `AsyncIdempotency` takes a client of `redis.asyncio`. After a crash, an event waits for `lease`
    seconds until another consumer may take it. A handled event is remembered for `ttl` seconds (or
    a timedelta); a later delivery takes effect again. The default is 7 days, or
    CONQUIET_OUTBOX_IDEMPOTENCY_TTL_HOURS of the environment.

    Keys begin with `prefix`.
    """

    def __init__(
        self,
        client: Any,
        *,
        lease: float | timedelta = LEASE_SECONDS,
        ttl: float | timedelta | None = None,
        prefix: str = PREFIX,
    ) -> None:
        super().__init__(lease=lease, ttl=ttl, prefix=prefix)
        if not isinstance(client, (redis.Redis, redis.RedisCluster)):
            raise ConfigError(
                f"Idempotency takes a redis.Redis, not {_kind(client)}; AsyncIdempotency takes a"
                " redis.asyncio.Redis"
            )
        self.keeper = LeaseKeeper("conquiet-idempotency")
        self._script: Callable[..., Any] = client.register_script(_script)

    def check_and_mark_processed(
        self, consumer: str, event_id: UUID | str, ttl: float | timedelta | None = None
    ) -> bool:
        """Return whether the event was processed before; mark it as processed if not.

        It marks before the side effects: **a crash after the mark drops the event**. Prefer
        `guard`, which marks after success. Raises `InProgress` while another consumer holds it.
        """
        return self.run(self._mark_steps(self.key(consumer, event_id), ttl))

    def claim(self, consumer: str, event_id: UUID | str) -> Claim | None:
        """Claim an event under a lease; None if it is done. Raises `InProgress` if it is held.

        Use it instead of `guard` to confirm or release the claim yourself.
        """
        claim = Claim(self, self.key(consumer, event_id), uuid.uuid4().hex)
        if not self.run(self._claim_steps(claim.key, claim.owner)):
            return None
        self.keeper.add(claim, self.renew_every)
        return claim

    def guard(
        self,
        consumer: str,
        event_id: EventId,
        *,
        ttl: float | timedelta | None = None,
    ) -> Guard:
        """Return a context manager and decorator around side effects, sync or async.

        As a context manager it returns whether the event is fresh; an exception in its body
        releases the event. As a decorator, `event_id` is a function of the arguments, and a
        duplicate returns None without a call.
        """
        if not callable(event_id):
            self.key(consumer, event_id)
        return Guard(self, consumer, event_id, None if ttl is None else as_seconds("ttl", ttl))

    def run(self, steps: Steps[T]) -> T:
        """Run steps to their end."""
        send: Callable[[], Ask | float] = partial(next, steps)
        try:
            while True:
                step = send()
                try:
                    send = partial(steps.send, self._take(step))
                except StoreError as error:
                    send = partial(steps.throw, error)
        except StopIteration as end:
            return cast("T", end.value)

    def _take(self, step: Ask | float) -> Any:
        if not isinstance(step, Ask):
            return time.sleep(step)
        try:
            return self._script(keys=[step.key], args=step.arguments)
        except (redis.RedisError, OSError) as error:
            raise step.error(error) from error


class Claim(NamedTuple):
    """Holds an event under a lease, which is renewed."""

    idempotency: Idempotency
    key: str
    owner: str

    def renew(self) -> float | None:
        """Renew the lease and return when to renew it next; None if it was lost."""
        return self.idempotency.run(self.idempotency._renew_steps(self.key, self.owner))

    def confirm(self, ttl: float | None = None) -> None:
        """Mark the event as done for the TTL; raise `LeaseLost` if another consumer took it."""
        self.idempotency.keeper.remove(self)
        self.idempotency.run(self.idempotency._confirm_steps(self.key, self.owner, ttl))

    def release(self) -> None:
        """Release the event, so that the next delivery is handled; does nothing if it was lost."""
        self.idempotency.keeper.remove(self)
        self.idempotency.run(self.idempotency._release_steps(self.key, self.owner))

    def __repr__(self) -> str:
        return f"<Claim {self.key}>"


EventId: TypeAlias = UUID | str | Callable[..., UUID | str]


def _id_of_block(event_id: EventId) -> UUID | str:
    if callable(event_id):
        raise ConfigError("guard(…, function) is a decorator; a block needs the event's id")
    return event_id


def _id_of_call(event_id: EventId, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UUID | str:
    return event_id(*args, **kwargs) if callable(event_id) else event_id


def _guard_coroutines(
    guard_of: Callable[[tuple[Any, ...], dict[str, Any]], Guard | AsyncGuard],
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T | None]]:
    """Wrap a coroutine function; each call has a guard of its own, since calls may overlap."""

    @wraps(function)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        async with guard_of(args, kwargs) as fresh:
            return await function(*args, **kwargs) if fresh else None

    return guarded


class Guard:
    """Guards the side effects of one event, or of each call of one function.

    `claim` is None for a duplicate.
    """

    def __init__(
        self,
        idempotency: Idempotency,
        consumer: str,
        event_id: EventId,
        ttl: float | None,
    ) -> None:
        self.claim: Claim | None = None
        self._idempotency = idempotency
        self._consumer = consumer
        self._event_id = event_id
        self._ttl = ttl
        self._handover = threading.Lock()
        self._entered = self._cancelled = False

    def __enter__(self) -> bool:
        event_id = _id_of_block(self._event_id)
        self.claim = self._idempotency.claim(self._consumer, event_id)
        return self.claim is not None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        claim, self.claim = self.claim, None
        if claim is None:
            return
        if error is None:
            claim.confirm(self._ttl)
        else:
            claim.release()

    async def __aenter__(self) -> bool:
        self._entered = self._cancelled = False
        try:
            return await asyncio.to_thread(self._enter_unless_cancelled)
        except asyncio.CancelledError:
            # The thread goes on and may claim: the later of the two releases the claim.
            with self._handover:
                self._cancelled = True
                entered = self._entered
            if entered:
                asyncio.get_running_loop().run_in_executor(None, self._abandon)
            raise

    def _enter_unless_cancelled(self) -> bool:
        fresh = self.__enter__()
        with self._handover:
            self._entered = True
            cancelled = self._cancelled
        if cancelled:
            self._abandon()
        return fresh

    def _abandon(self) -> None:
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.release()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shielded: a cancelled task must still settle its claim.
        await asyncio.shield(asyncio.to_thread(self.__exit__, kind, error, trace))

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]]
    ) -> Callable[P, Coroutine[Any, Any, T | None]]: ...

    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):
            return _guard_coroutines(self._for, function)

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._for(args, kwargs) as fresh:
                return function(*args, **kwargs) if fresh else None

        return guarded

    def _for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guard:
        event_id = _id_of_call(self._event_id, args, kwargs)
        return Guard(self._idempotency, self._consumer, event_id, self._ttl)


class AsyncIdempotency(_Rules):
    """Does what `Idempotency` does on an event loop, with a client of `redis.asyncio`.

    >>> import asyncio
    >>> event_id = "01900000-0000-7000-8000-000000000002"
    >>> async def main():
    ...     async with async_client:
    ...         idempotency = AsyncIdempotency(async_client)
    ...         for delivery in (1, 2):
    ...             async with idempotency.guard("mailer", event_id) as fresh:
    ...                 print("sent" if fresh else "seen before")
    >>> asyncio.run(main())
    sent
    seen before

    Leases are renewed on the loop: a handler that blocks it for longer than `lease` loses its
    event.

    `lease`, `ttl` and `prefix` are those of `Idempotency`.
    """

    def __init__(
        self,
        client: Any,
        *,
        lease: float | timedelta = LEASE_SECONDS,
        ttl: float | timedelta | None = None,
        prefix: str = PREFIX,
    ) -> None:
        super().__init__(lease=lease, ttl=ttl, prefix=prefix)
        if not isinstance(client, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
            raise ConfigError(
                f"AsyncIdempotency takes a redis.asyncio.Redis, not {_kind(client)}; Idempotency"
                " takes a redis.Redis"
            )
        self.keeper = LoopLeaseKeeper("conquiet-idempotency", AsyncClaim.renew)
        self._script: Callable[..., Awaitable[bytes | str]] = client.register_script(_script)
        self._settling: set[asyncio.Task[None]] = set()

    async def check_and_mark_processed(
        self, consumer: str, event_id: UUID | str, ttl: float | timedelta | None = None
    ) -> bool:
        """Return whether the event was processed before; mark it as processed if not.

        It marks before the side effects: **a crash after the mark drops the event**. Prefer
        `guard`, which marks after success. Raises `InProgress` while another consumer holds it.
        """
        return await self.run(self._mark_steps(self.key(consumer, event_id), ttl))

    async def claim(self, consumer: str, event_id: UUID | str) -> AsyncClaim | None:
        """Claim an event under a lease; None if it is done. Raises `InProgress` if it is held.

        Use it instead of `guard` to confirm or release the claim yourself. If it is cancelled, the
        event is released. Each `consumer` claims an event by itself.
        """
        claim = AsyncClaim(self, self.key(consumer, event_id), uuid.uuid4().hex)
        asked = asyncio.create_task(self.run(self._claim_steps(claim.key, claim.owner)))
        try:
            is_ours = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self.settle(claim.release_after(asked))
            raise
        if not is_ours:
            return None
        self.keeper.add(claim, self.renew_every)
        return claim

    def guard(
        self,
        consumer: str,
        event_id: EventId,
        *,
        ttl: float | timedelta | None = None,
    ) -> AsyncGuard:
        """Return an async context manager and a decorator of coroutine functions.

        A done event is remembered for `ttl` seconds, for each `consumer` by itself. As a context
        manager it returns whether the event is fresh; an exception in its body, also a
        cancellation, releases the event. As a decorator, `event_id` is a function of the arguments,
        and a duplicate returns None without a call.
        """
        if not callable(event_id):
            self.key(consumer, event_id)
        return AsyncGuard(self, consumer, event_id, None if ttl is None else as_seconds("ttl", ttl))

    async def run(self, steps: Steps[T]) -> T:
        """Run steps to their end."""
        send: Callable[[], Ask | float] = partial(next, steps)
        while True:
            try:
                step = send()
            except StopIteration as end:
                return cast("T", end.value)
            try:
                send = partial(steps.send, await self._take(step))
            except StoreError as error:
                send = partial(steps.throw, error)

    async def _take(self, step: Ask | float) -> Any:
        if not isinstance(step, Ask):
            return await asyncio.sleep(step)
        try:
            return await self._script(keys=[step.key], args=step.arguments)
        except (redis.RedisError, OSError) as error:
            raise step.error(error) from error

    def settle(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a step that goes on if the task that waits for it is cancelled."""
        task = asyncio.create_task(step)
        self._settling.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._settling.discard)
        return task


class AsyncClaim(NamedTuple):
    """Holds an event under a lease, which is renewed on the event loop."""

    idempotency: AsyncIdempotency
    key: str
    owner: str

    async def renew(self) -> float | None:
        """Renew the lease and return when to renew it next; None if it was lost."""
        return await self.idempotency.run(self.idempotency._renew_steps(self.key, self.owner))

    async def confirm(self, ttl: float | None = None) -> None:
        """Mark the event as done for the TTL; raise `LeaseLost` if another consumer took it."""
        self.idempotency.keeper.remove(self)
        await self.idempotency.run(self.idempotency._confirm_steps(self.key, self.owner, ttl))

    async def release(self) -> None:
        """Release the event, so that the next delivery is handled; does nothing if it was lost."""
        self.idempotency.keeper.remove(self)
        await self.idempotency.run(self.idempotency._release_steps(self.key, self.owner))

    async def release_after(self, asked: asyncio.Task[bool]) -> None:
        """Release the event once the answer to its claim is known."""
        await asyncio.wait([asked])
        if not asked.cancelled() and asked.exception() is None:
            await self.release()

    def __repr__(self) -> str:
        return f"<AsyncClaim {self.key}>"


class AsyncGuard:
    """Guards the side effects of one event, or of each call of one coroutine function.

    `claim` is None for a duplicate.
    """

    def __init__(
        self,
        idempotency: AsyncIdempotency,
        consumer: str,
        event_id: EventId,
        ttl: float | None,
    ) -> None:
        self.claim: AsyncClaim | None = None
        self._idempotency = idempotency
        self._consumer = consumer
        self._event_id = event_id
        self._ttl = ttl

    async def __aenter__(self) -> bool:
        event_id = _id_of_block(self._event_id)
        self.claim = await self._idempotency.claim(self._consumer, event_id)
        return self.claim is not None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        claim, self.claim = self.claim, None
        if claim is None:
            return
        step = claim.confirm(self._ttl) if error is None else claim.release()
        # Shielded: a cancelled task must still settle its claim.
        await asyncio.shield(self._idempotency.settle(step))

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]]
    ) -> Callable[P, Coroutine[Any, Any, T | None]]:
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{function!r} is not a coroutine function: guard it by Idempotency, with a"
                " redis.Redis"
            )
        return _guard_coroutines(self._for, function)

    def _for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncGuard:
        event_id = _id_of_call(self._event_id, args, kwargs)
        return AsyncGuard(self._idempotency, self._consumer, event_id, self._ttl)


def _kind(client: object) -> str:
    return f"{type(client).__module__}.{type(client).__name__}"
