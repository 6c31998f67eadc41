"""Guard: claim before, confirm after, release on failure; around a block or a function."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from conquiet.errors import ConfigError

if TYPE_CHECKING:
    from conquiet.events.idempotency import Claim, Idempotency

Function = Callable[..., Any]


class Guard:
    """What `Idempotency.guard` gives; made for one event, or for one function.

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
            # The thread goes on and may claim: whoever of the two comes last lets go of it.
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
        # Shielded: a task that is cancelled must still settle what it has claimed.
        await asyncio.shield(asyncio.to_thread(self.__exit__, kind, error, trace))

    def __call__(self, function: Function) -> Function:
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
        """A guard of its own for each call: calls may run side by side."""
        given = self._event_id
        event_id = given(*args, **kwargs) if callable(given) else given
        return Guard(self._idempotency, self._consumer, event_id, self._ttl)
