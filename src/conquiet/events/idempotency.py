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
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from functools import wraps
from importlib.resources import files
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload
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


class _Rules:
    """Keys, times and the meaning of answers; the base of both classes."""

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


def _arguments(does: str, owner: str, seconds: float) -> list[str | int]:
    return [does, owner, max(1, round(seconds * 1000)) if seconds else 0]


def _is_done(key: str, answer: bytes | str) -> bool:
    """Return whether an event was done before; raise if it is in progress elsewhere."""
    if answer in (b"held", "held"):
        raise InProgress(f"{key}: in progress elsewhere; do not ack")
    return answer in (b"done", "done")


def _is_ours(key: str, answer: bytes | str) -> bool:
    """Return whether a renewal kept the lease."""
    if answer in (b"held", "held"):
        logger.warning("%s: the lease was lost while its handler is running", key)
    return answer in (b"ours", "ours")


def _check_confirmed(key: str, answer: bytes | str) -> None:
    if answer not in (b"ours", "ours"):
        raise LeaseLost(
            f"{key}: its lease expired and another consumer took the event; its effects"
            " may have happened twice. Use a longer lease"
        )


def _unreachable(key: str, does: str, error: Exception) -> StoreError:
    return StoreError(f"{key}: Redis could not {does}: {error}")


def _log_not_released(error: Exception) -> None:
    logger.warning("could not release an event, it waits for its lease to expire: %s", error)


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
        self._run: Callable[..., Any] = client.register_script(_script)

    def check_and_mark_processed(
        self, consumer: str, event_id: UUID | str, ttl: float | timedelta | None = None
    ) -> bool:
        """Return whether the event was processed before; mark it as processed if not.

        It marks before the side effects: **a crash after the mark drops the event**. Prefer
        `guard`, which marks after success. Raises `InProgress` while another consumer holds it.
        """
        key = self.key(consumer, event_id)
        seconds = self.ttl if ttl is None else as_seconds("ttl", ttl)
        return _is_done(key, self.ask(key, "mark", uuid.uuid4().hex, seconds))

    def claim(self, consumer: str, event_id: UUID | str) -> Claim | None:
        """Claim an event under a lease; None if it is done. Raises `InProgress` if it is held.

        Use it instead of `guard` to confirm or release the claim yourself.
        """
        claim = Claim(self, self.key(consumer, event_id), uuid.uuid4().hex)
        if _is_done(claim.key, self.ask(claim.key, "claim", claim.owner, self.lease)):
            return None
        self.keeper.add(claim, self.renew_every)
        return claim

    def guard(
        self,
        consumer: str,
        event_id: UUID | str | Callable[..., UUID | str],
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

    def ask(self, key: str, does: str, owner: str, seconds: float) -> bytes | str:
        """Run one step of the script; return its answer."""
        try:
            answer: bytes | str = self._run(keys=[key], args=_arguments(does, owner, seconds))
        except (redis.RedisError, OSError) as error:
            raise _unreachable(key, does, error) from error
        return answer


class Claim(NamedTuple):
    """Holds an event under a lease, which is renewed."""

    idempotency: Idempotency
    key: str
    owner: str

    def renew(self) -> float | None:
        """Renew the lease and return when to renew it next; None if it was lost."""
        is_ours = _is_ours(self.key, self._ask("renew", self.idempotency.lease))
        return self.idempotency.renew_every if is_ours else None

    def confirm(self, ttl: float | None = None) -> None:
        """Mark the event as done for the TTL; raise `LeaseLost` if another consumer took it."""
        self.idempotency.keeper.remove(self)
        _check_confirmed(self.key, self._confirm(self.idempotency.ttl if ttl is None else ttl))

    def release(self) -> None:
        """Release the event, so that the next delivery is handled; does nothing if it was lost."""
        self.idempotency.keeper.remove(self)
        try:
            self._ask("release", 0)
        except StoreError as error:
            _log_not_released(error)

    def _confirm(self, ttl: float) -> bytes | str:
        """Confirm, with retries if the reply was lost; confirming twice is harmless."""
        for left in reversed(range(_CONFIRMS)):
            try:
                return self._ask("confirm", ttl)
            except StoreError:
                if not left:
                    raise
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _ask(self, does: str, seconds: float) -> bytes | str:
        return self.idempotency.ask(self.key, does, self.owner, seconds)

    def __repr__(self) -> str:
        return f"<Claim {self.key}>"


P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Guards the side effects of one event, or of each call of one function.

    `claim` is None for a duplicate.
    """

    def __init__(
        self,
        idempotency: Idempotency,
        consumer: str,
        event_id: UUID | str | Callable[..., UUID | str],
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
        if callable(self._event_id):
            raise ConfigError("guard(…, function) is a decorator; a block needs the event's id")
        self.claim = self._idempotency.claim(self._consumer, self._event_id)
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

            @wraps(function)
            async def guarded_async(*args: Any, **kwargs: Any) -> Any:
                async with self._for(args, kwargs) as fresh:
                    return await function(*args, **kwargs) if fresh else None

            return guarded_async

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._for(args, kwargs) as fresh:
                return function(*args, **kwargs) if fresh else None

        return guarded

    def _for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guard:
        """Create a guard for one call: calls may run concurrently."""
        given = self._event_id
        event_id = given(*args, **kwargs) if callable(given) else given
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
        self._run: Callable[..., Awaitable[bytes | str]] = client.register_script(_script)
        self._settling: set[asyncio.Task[None]] = set()

    async def check_and_mark_processed(
        self, consumer: str, event_id: UUID | str, ttl: float | timedelta | None = None
    ) -> bool:
        """Return whether the event was processed before; mark it as processed if not.

        It marks before the side effects: **a crash after the mark drops the event**. Prefer
        `guard`, which marks after success. Raises `InProgress` while another consumer holds it.
        """
        key = self.key(consumer, event_id)
        seconds = self.ttl if ttl is None else as_seconds("ttl", ttl)
        return _is_done(key, await self.ask(key, "mark", uuid.uuid4().hex, seconds))

    async def claim(self, consumer: str, event_id: UUID | str) -> AsyncClaim | None:
        """Claim an event under a lease; None if it is done. Raises `InProgress` if it is held.

        Use it instead of `guard` to confirm or release the claim yourself. If it is cancelled, the
        event is released.
        """
        claim = AsyncClaim(self, self.key(consumer, event_id), uuid.uuid4().hex)
        asked = asyncio.create_task(self.ask(claim.key, "claim", claim.owner, self.lease))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self.settle(claim.release_after(asked))
            raise
        if _is_done(claim.key, answer):
            return None
        self.keeper.add(claim, self.renew_every)
        return claim

    def guard(
        self,
        consumer: str,
        event_id: UUID | str | Callable[..., UUID | str],
        *,
        ttl: float | timedelta | None = None,
    ) -> AsyncGuard:
        """Return an async context manager and a decorator of coroutine functions.

        As a context manager it returns whether the event is fresh; an exception in its body, also
        a cancellation, releases the event. As a decorator, `event_id` is a function of the
        arguments, and a duplicate returns None without a call.
        """
        if not callable(event_id):
            self.key(consumer, event_id)
        return AsyncGuard(self, consumer, event_id, None if ttl is None else as_seconds("ttl", ttl))

    async def ask(self, key: str, does: str, owner: str, seconds: float) -> bytes | str:
        """Run one step of the script; return its answer."""
        try:
            return await self._run(keys=[key], args=_arguments(does, owner, seconds))
        except (redis.RedisError, OSError) as error:
            raise _unreachable(key, does, error) from error

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
        is_ours = _is_ours(self.key, await self._ask("renew", self.idempotency.lease))
        return self.idempotency.renew_every if is_ours else None

    async def confirm(self, ttl: float | None = None) -> None:
        """Mark the event as done for the TTL; raise `LeaseLost` if another consumer took it."""
        self.idempotency.keeper.remove(self)
        seconds = self.idempotency.ttl if ttl is None else ttl
        _check_confirmed(self.key, await self._confirm(seconds))

    async def release(self) -> None:
        """Release the event, so that the next delivery is handled; does nothing if it was lost."""
        self.idempotency.keeper.remove(self)
        try:
            await self._ask("release", 0)
        except StoreError as error:
            _log_not_released(error)

    async def release_after(self, asked: asyncio.Task[bytes | str]) -> None:
        """Release the event once the answer to its claim is known."""
        await asyncio.wait([asked])
        if not asked.cancelled() and asked.exception() is None:
            await self.release()

    async def _confirm(self, ttl: float) -> bytes | str:
        """Confirm, with retries if the reply was lost; confirming twice is harmless."""
        for left in reversed(range(_CONFIRMS)):
            try:
                return await self._ask("confirm", ttl)
            except StoreError:
                if not left:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    async def _ask(self, does: str, seconds: float) -> bytes | str:
        return await self.idempotency.ask(self.key, does, self.owner, seconds)

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
        event_id: UUID | str | Callable[..., UUID | str],
        ttl: float | None,
    ) -> None:
        self.claim: AsyncClaim | None = None
        self._idempotency = idempotency
        self._consumer = consumer
        self._event_id = event_id
        self._ttl = ttl

    async def __aenter__(self) -> bool:
        if callable(self._event_id):
            raise ConfigError("guard(…, function) is a decorator; a block needs the event's id")
        self.claim = await self._idempotency.claim(self._consumer, self._event_id)
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

        @wraps(function)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            given = self._event_id
            event_id = given(*args, **kwargs) if callable(given) else given
            async with AsyncGuard(self._idempotency, self._consumer, event_id, self._ttl) as fresh:
                return await function(*args, **kwargs) if fresh else None

        return guarded


def _kind(client: object) -> str:
    return f"{type(client).__module__}.{type(client).__name__}"
