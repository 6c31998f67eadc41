"""Leases: the inbox keys that a transaction holds while it runs (R1, R2).

    absent ──SET NX PX──▶ processing:<token> ──EXEC──▶ done ──retention──▶ absent
                              │ handler failed: DEL, if it is still ours
                              │ handler runs long: renewed
                              └ crash: ends by itself

From the first exchange on the keys are watched: if a lease ends or changes hands, EXEC writes
nothing.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import redis

from conquiet.errors import StoreError
from conquiet.redis.session import pack

if TYPE_CHECKING:
    from conquiet.redis.ambient import Unit

logger = logging.getLogger("conquiet.redis")

DONE = b"done"
_PROCESSING = b"processing:"
_RENEWALS = 3
"""How often a lease is renewed before it would end."""


class State(Enum):
    """What an inbox key says about a message."""

    OURS = "ours"
    DONE = "done"
    HELD = "held"


class Terms:
    """How long the leases of one inbox last, and what its process remembers of lost ones."""

    def __init__(self, lease: float, retention: float) -> None:
        self.lease = lease
        self.lease_ms = max(1, round(lease * 1000))
        self.retention_ms = max(1, round(retention * 1000))
        self.renew_every = lease / _RENEWALS
        self._lost: dict[bytes, tuple[bytes, float]] = {}

    def abandon(self, leases: dict[bytes, bytes]) -> None:
        """Remember leases that nobody of this process works under any more.

        Their next taker here need not wait for their end. That an EXEC under one of them is
        still on its way does no harm: whichever comes first changes the key, and the other one,
        which watches it, writes nothing.
        """
        now = time.monotonic()
        self._lost = {key: lost for key, lost in self._lost.items() if lost[1] > now}
        for key, value in leases.items():
            self._lost[key] = value, now + 2 * self.lease

    def recognise(self, key: bytes, value: bytes) -> bool:
        """Whether this is a lease of ours that was abandoned; it is taken over then."""
        if not self._lost:
            return False
        lost = self._lost.pop(key, None)
        return lost is not None and lost[0] == value


class Leases:
    """The inbox keys of one transaction."""

    def __init__(self, unit: Unit) -> None:
        self.confirmed: list[bytes] = []
        """The keys whose messages take effect; in the order in which they were leased."""
        self._unit = unit
        self._values: dict[bytes, bytes] = {}
        self._terms: dict[bytes, Terms] = {}
        self._renew_every = math.inf

    def acquire(self, keys: Sequence[bytes], terms: Terms) -> list[State]:
        """Lease what is free, watch it all, and say what is whose: one exchange."""
        value = _PROCESSING + uuid.uuid4().hex.encode()
        unit = self._unit
        if unit.home.is_cluster:
            for key in keys:
                unit.join_key(key)
        session = unit.session()
        ms = terms.lease_ms
        packed = [pack((b"SET", key, value, b"NX", b"PX", ms)) for key in keys]
        packed.append(pack((b"WATCH", *keys)))
        packed.append(pack((b"MGET", *keys)))
        with session.lock:
            session.is_watching = True
            try:
                replies = session.exchange(packed)
            except BaseException as error:
                terms.abandon(dict.fromkeys(keys, value))
                unit.home.lost()
                if isinstance(error, (redis.RedisError, OSError)):
                    raise StoreError(f"the inbox cannot be reached: {error}") from error
                raise
        refused = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if refused is not None:
            terms.abandon(dict.fromkeys(keys, value))
            unit.home.lost()
            raise StoreError(f"the inbox cannot be used: {refused}") from refused
        states = [
            self._file(key, found, value, terms)
            for key, found in zip(keys, replies[-1], strict=True)
        ]
        if self._values:
            self._renew_every = min(self._renew_every, terms.renew_every)
            unit.home.keeper.add(self, terms.renew_every)
        return states

    def _file(self, key: bytes, found: bytes | None, value: bytes, terms: Terms) -> State:
        if found == DONE:
            return State.DONE
        if found is not None and found == self._values.get(key):
            # Leased before in this transaction: undone with its savepoint, or took effect in it.
            return State.DONE if key in self.confirmed else State.OURS
        if found is None or not (found == value or terms.recognise(key, found)):
            return State.HELD
        self._values[key] = found
        self._terms[key] = terms
        return State.OURS

    # --- the end ----------------------------------------------------------------------------

    def settling(self) -> list[bytes]:
        """What EXEC writes: done, and nothing for what was leased in vain."""
        terms = self._terms
        packed = [
            pack((b"SET", key, DONE, b"PX", terms[key].retention_ms)) for key in self.confirmed
        ]
        if len(self.confirmed) < len(self._values):
            confirmed = set(self.confirmed)
            vain = [key for key in self._values if key not in confirmed]
            packed.append(pack((b"DEL", *vain)))
        return packed

    def releasing(self) -> list[bytes]:
        return [pack((b"DEL", *self._values))] if self._values else []

    def abandon(self) -> None:
        """Leave the keys as they are: whether EXEC took effect may be unknown (R9)."""
        for terms in set(self._terms.values()):
            terms.abandon({k: v for k, v in self._values.items() if self._terms[k] is terms})
        self.forget()

    def forget(self) -> None:
        if self._values:
            self._unit.home.keeper.remove(self)
            self._values.clear()

    # --- renewal ----------------------------------------------------------------------------

    def renew(self) -> float | None:
        """Renew the leases and watch them again; called by the keeper's thread."""
        unit = self._unit
        if unit.watches_data:  # what a handler watches must be watched without a gap
            return self._renew_every
        session = unit.session()
        with session.lock:
            values = dict(self._values)
            if not values or unit.ended or not session.is_watching:
                return None
            longer = [pack((b"PEXPIRE", key, self._terms[key].lease_ms)) for key in values]
            # EXEC ends the WATCH, so the keys are watched again and looked at again.
            again = [pack((b"WATCH", *values)), pack((b"MGET", *values))]
            multi, execute = pack((b"MULTI",)), pack((b"EXEC",))
            replies = session.exchange([multi, *longer, execute, *again])
            if not isinstance(replies[-3], list) or replies[-1] != list(values.values()):
                # A new WATCH must not make good what the old one found out.
                session.drop()
                logger.warning("a lease of the inbox was lost while its handler runs")
        return self._renew_every

    def __repr__(self) -> str:
        return f"<{len(self._values)} leases of an inbox>"
