"""Leases: the inbox keys that a transaction holds while its handlers run.

    absent ──SET NX PX──▶ processing:<token> ──EXEC──▶ done ──retention──▶ absent
                              │ handler failed: DEL, if it is still ours
                              │ handler runs long: renewed
                              └ crash: ends by itself

The keys are watched from the first exchange on: if a lease ends or changes hands, EXEC writes
nothing.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import redis

from conquiet.errors import StoreError
from conquiet.redis.connection import pack

if TYPE_CHECKING:
    from conquiet.redis.transaction import Unit

logger = logging.getLogger("conquiet.redis")

DONE = b"done"
_PROCESSING = b"processing:"
_RENEWALS = 3
"""How often a lease is renewed before it would end."""


class KeyState(Enum):
    """What an inbox key says about its message."""

    OURS = "ours"
    DONE = "done"
    HELD = "held"


class LeaseTerms:
    """How long the leases of one inbox last, and which of them this process has abandoned."""

    def __init__(self, lease: float, retention: float) -> None:
        self.lease = lease
        self.lease_ms = max(1, round(lease * 1000))
        self.retention_ms = max(1, round(retention * 1000))
        self.renew_every = lease / _RENEWALS
        self._abandoned: dict[bytes, tuple[bytes, float]] = {}

    def abandon(self, leases: dict[bytes, bytes]) -> None:
        """Remember leases that no transaction of this process uses any more.

        The next transaction here takes them over instead of waiting for their end. An EXEC under
        one of them may still be on its way: the one that comes first changes the key, and the
        other, which watches it, writes nothing.
        """
        now = time.monotonic()
        self._abandoned = {key: lost for key, lost in self._abandoned.items() if lost[1] > now}
        for key, value in leases.items():
            self._abandoned[key] = value, now + 2 * self.lease

    def take_over(self, key: bytes, value: bytes) -> bool:
        """Take over an abandoned lease of this process; return whether it is one."""
        if not self._abandoned:
            return False
        lost = self._abandoned.pop(key, None)
        return lost is not None and lost[0] == value


class Leases:
    """The inbox keys that one transaction has leased.

    A key is confirmed when its message takes effect in this transaction; EXEC turns confirmed keys
    to `done` and deletes the others. Leases are renewed by the keeper of the database until
    `forget`.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._values: dict[bytes, bytes] = {}
        self._terms: dict[bytes, LeaseTerms] = {}
        self._confirmed: list[bytes] = []
        self._renew_every = math.inf

    def acquire(self, keys: Sequence[bytes], terms: LeaseTerms) -> list[KeyState]:
        """Lease free keys, watch all of them and return their states, in one exchange."""
        value = _PROCESSING + uuid.uuid4().hex.encode()
        unit = self._unit
        if unit.database.is_cluster:
            for key in keys:
                unit.join_key(key)
        connection = unit.connection()
        ms = terms.lease_ms
        packed = [pack((b"SET", key, value, b"NX", b"PX", ms)) for key in keys]
        packed.append(pack((b"WATCH", *keys)))
        packed.append(pack((b"MGET", *keys)))
        with connection.lock:
            try:
                replies = connection.watch(packed)
            except BaseException as error:
                terms.abandon(dict.fromkeys(keys, value))
                unit.database.learn_topology()
                if isinstance(error, (redis.RedisError, OSError)):
                    raise StoreError(f"the inbox cannot be reached: {error}") from error
                raise
        refused = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if refused is not None:
            terms.abandon(dict.fromkeys(keys, value))
            unit.database.learn_topology()
            raise StoreError(f"the inbox cannot be used: {refused}") from refused
        states = [
            self._state(key, found, value, terms)
            for key, found in zip(keys, replies[-1], strict=True)
        ]
        if self._values:
            self._renew_every = min(self._renew_every, terms.renew_every)
            unit.database.keeper.add(self, terms.renew_every)
        return states

    def _state(self, key: bytes, found: bytes | None, value: bytes, terms: LeaseTerms) -> KeyState:
        if found == DONE:
            return KeyState.DONE
        if found is not None and found == self._values.get(key):
            # Leased before in this transaction: undone with its savepoint, or took effect in it.
            return KeyState.DONE if key in self._confirmed else KeyState.OURS
        if found is None or not (found == value or terms.take_over(key, found)):
            return KeyState.HELD
        self._values[key] = found
        self._terms[key] = terms
        return KeyState.OURS

    def confirm(self, keys: Iterable[bytes]) -> None:
        """Let leased keys become `done` with EXEC."""
        self._confirmed.extend(keys)

    @property
    def confirmed(self) -> int:
        return len(self._confirmed)

    def undo_confirms(self, keep: int) -> None:
        """Undo all but the first `keep` confirms; the keys stay leased."""
        del self._confirmed[keep:]

    # --- the end ----------------------------------------------------------------------------

    def pack_settlement(self) -> list[bytes]:
        """Pack the commands for EXEC: `done` for confirmed keys, DEL for the others."""
        terms = self._terms
        packed = [
            pack((b"SET", key, DONE, b"PX", terms[key].retention_ms)) for key in self._confirmed
        ]
        if len(self._confirmed) < len(self._values):
            confirmed = set(self._confirmed)
            unused = [key for key in self._values if key not in confirmed]
            packed.append(pack((b"DEL", *unused)))
        return packed

    def pack_release(self) -> list[bytes]:
        """Pack the commands that give the leases back after a failure."""
        return [pack((b"DEL", *self._values))] if self._values else []

    def abandon(self) -> None:
        """Leave the keys as they are: EXEC may have taken effect, then they say `done`."""
        for terms in set(self._terms.values()):
            terms.abandon({k: v for k, v in self._values.items() if self._terms[k] is terms})
        self.forget()

    def forget(self) -> None:
        """Stop renewing."""
        if self._values:
            self._unit.database.keeper.remove(self)
            self._values.clear()

    # --- renewal ----------------------------------------------------------------------------

    def renew(self) -> float | None:
        """Renew the leases and watch them again; called by the keeper's thread."""
        unit = self._unit
        if unit.watches_data:  # what a handler watches must be watched without a gap
            return self._renew_every
        connection = unit.connection()
        with connection.lock:
            values = dict(self._values)
            if not values or unit.ended or not connection.is_watching:
                return None
            longer = [pack((b"PEXPIRE", key, self._terms[key].lease_ms)) for key in values]
            # EXEC ends the WATCH, so the keys are watched again and compared again.
            again = [pack((b"WATCH", *values)), pack((b"MGET", *values))]
            replies = connection.watch([pack((b"MULTI",)), *longer, pack((b"EXEC",)), *again])
            if not isinstance(replies[-3], list) or replies[-1] != list(values.values()):
                # The new WATCH would not notice what the old one did.
                connection.drop()
                logger.warning("a lease of the inbox was lost while its handler runs")
        return self._renew_every

    def __repr__(self) -> str:
        return f"<{len(self._values)} leases of an inbox>"
