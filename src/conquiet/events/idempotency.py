"""Idempotency: a consumer's side effects of an event happen once, though it may come again.

    absent ──claim──▶ processing:<owner> ──confirm──▶ done:<owner> ──ttl──▶ absent
                          │ handler failed: release, if it is still ours
                          │ handler runs long: renewed
                          └ crash: ends by itself after the lease

Duplicates are possible; consumers must be idempotent. The key is the consumer and the event id.
A duplicate of what is done may be acked; one of what is in progress elsewhere must not.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from importlib.resources import files
from typing import Any, Literal, NamedTuple, cast
from uuid import UUID

import redis

from conquiet.errors import Blameless, ConfigError, StoreError
from conquiet.events.guard import Guard
from conquiet.events.ttl import as_seconds, default_ttl
from conquiet.lease import LeaseKeeper
from conquiet.redis.transaction import InProgress

logger = logging.getLogger("conquiet.events")

PREFIX = "pf:evt:processed"
LEASE_SECONDS = 30.0

Answer = Literal["ours", "done", "held", "gone"]

_RENEWALS = 3
"""How often a lease is renewed before it would end."""
_CONFIRMS = 3
_PAUSE_SECONDS = 0.1
_name = re.compile(r"[A-Za-z0-9_.\-]{1,100}")
_script = files(__package__).joinpath("idempotency.lua").read_text()


class LeaseLost(Blameless):
    """The handler ran, but its lease had ended and somebody else took the event meanwhile."""


class Idempotency:
    """Remembers in Redis which consumer has handled which event.

    >>> idempotency = Idempotency(client)
    >>> event_id = "01900000-0000-7000-8000-000000000001"
    >>> for delivery in (1, 2):
    ...     with idempotency.guard("mailer", event_id) as fresh:
    ...         print("sent" if fresh else "seen before")
    sent
    seen before

    `client` is a plain `redis.Redis`, for `async` too. `lease` is what a crash costs: how long an
    event waits until another may take it. `ttl` is how long one is remembered, in seconds or as a
    timedelta; a delivery later than that takes effect again. It is 7 days, unless the environment
    says otherwise: CONQUIET_OUTBOX_IDEMPOTENCY_TTL_HOURS.
    """

    def __init__(
        self,
        client: Any,
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
        if not isinstance(client, (redis.Redis, redis.RedisCluster)):
            raise ConfigError(
                f"Idempotency takes a redis.Redis, not {type(client).__module__}."
                f"{type(client).__name__}; its guard can be used by coroutines all the same"
            )
        self.prefix = prefix
        self.keeper = LeaseKeeper("conquiet-idempotency")
        self._run: Callable[..., Any] = client.register_script(_script)

    def key(self, consumer: str, event_id: UUID | str) -> str:
        """`pf:evt:processed:<consumer>:<event_id>`."""
        if not isinstance(consumer, str) or not _name.fullmatch(consumer):
            raise ConfigError(f"consumer {consumer!r:.60}: use letters, digits, '_', '-' and '.'")
        try:
            plain = event_id if isinstance(event_id, UUID) else UUID(event_id)
        except (ValueError, AttributeError, TypeError):
            raise ConfigError(f"event id {event_id!r:.60} is not a UUID") from None
        return f"{self.prefix}:{consumer}:{plain}"

    def check_and_mark_processed(
        self, consumer: str, event_id: UUID | str, ttl: float | timedelta | None = None
    ) -> bool:
        """Whether it was processed already; if not, it counts as processed from now on.

        One call, before the side effects: **a crash after the mark drops the event**. Use
        `guard`, which marks after success, unless that is what you want. Raises `InProgress`
        while a guard elsewhere is at it.
        """
        key = self.key(consumer, event_id)
        seconds = self.ttl if ttl is None else as_seconds("ttl", ttl)
        answer = self._ask(key, "mark", uuid.uuid4().hex, seconds)
        if answer == "held":
            raise InProgress(f"{key}: somebody else is at it; do not ack")
        return answer == "done"

    def claim(self, consumer: str, event_id: UUID | str) -> Claim | None:
        """Ours to handle, under a lease; None if it is done. Raises `InProgress` if it is held.

        The parts of `guard`, for those who need them apart: confirm it or release it.
        """
        claim = Claim(self, self.key(consumer, event_id), uuid.uuid4().hex)
        answer = self._ask(claim.key, "claim", claim.owner, self.lease)
        if answer == "held":
            raise InProgress(f"{claim.key}: somebody else is at it; do not ack")
        if answer == "done":
            return None
        self.keeper.add(claim, claim.every)
        return claim

    def guard(
        self,
        consumer: str,
        event_id: UUID | str | Callable[..., UUID | str],
        *,
        ttl: float | timedelta | None = None,
    ) -> Guard:
        """Context manager and decorator around side effects.

        As a context manager it tells whether the event is fresh; a body that raises releases it.
        As a decorator, `event_id` is a function of the arguments, and a duplicate returns None
        without running. Both know `async`.
        """
        if not callable(event_id):
            self.key(consumer, event_id)
        return Guard(self, consumer, event_id, None if ttl is None else as_seconds("ttl", ttl))

    def _ask(self, key: str, does: str, owner: str, seconds: float) -> Answer:
        ms = max(1, round(seconds * 1000)) if seconds else 0
        try:
            answer = self._run(keys=[key], args=[does, owner, ms])
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"{key}: Redis could not {does}: {error}") from error
        return cast(Answer, answer.decode() if isinstance(answer, bytes) else answer)


class Claim(NamedTuple):
    """An event that is ours while the lease lasts, which is renewed."""

    idempotency: Idempotency
    key: str
    owner: str

    @property
    def every(self) -> float:
        """The seconds between two renewals."""
        return self.idempotency.lease / _RENEWALS

    def renew(self) -> float | None:
        """Renew the lease, for the keeper; None if it is not ours any more."""
        answer = self._ask("renew", self.idempotency.lease)
        if answer == "held":
            logger.warning("%s: the lease was lost while its handler runs", self.key)
        return self.every if answer == "ours" else None

    def confirm(self, ttl: float | None = None) -> None:
        """It took effect: remember it for long. Raises `LeaseLost` if another has taken it."""
        self.idempotency.keeper.remove(self)
        answer = self._confirm(self.idempotency.ttl if ttl is None else ttl)
        if answer != "ours":
            raise LeaseLost(
                f"{self.key}: its lease ended and another took the event; its effects may have"
                " happened twice. Give it a longer lease"
            )

    def release(self) -> None:
        """It took no effect: the next delivery may try at once. Does nothing if it is not ours."""
        self.idempotency.keeper.remove(self)
        try:
            self._ask("release", 0)
        except StoreError as error:
            logger.warning("not released, ends with its lease: %s", error)

    def _confirm(self, ttl: float) -> Answer:
        """Again if the reply was lost: the effects are there, and confirming twice does no harm."""
        for left in reversed(range(_CONFIRMS)):
            try:
                return self._ask("confirm", ttl)
            except StoreError:
                if not left:
                    raise
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _ask(self, does: str, seconds: float) -> Answer:
        return self.idempotency._ask(self.key, does, self.owner, seconds)

    def __repr__(self) -> str:
        return f"<Claim {self.key}>"
