"""Claims: the inbox of seed 000. One SET NX before the transaction says that a message is done.

absent ──SET NX PX retention──▶ done ──the handler failed: DEL──▶ absent
                                  └ a crash before EXEC: stays done, and the message is lost
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import redis

from conquiet.errors import InvalidMessage, StoreError
from conquiet.gate import following
from conquiet.handler import SKIPPED, Process, Result
from conquiet.message import Message
from conquiet.redis.lease import DONE
from conquiet.redis.outcome import PartialExecError, UnknownOutcome
from conquiet.redis.wire import Command, Wire

logger = logging.getLogger("conquiet.redis")

_MAY_HAVE_TAKEN_EFFECT = (UnknownOutcome, PartialExecError)


class Claims:
    """SET NX for what comes in, DEL for what failed."""

    def __init__(
        self, client: Any, key_of: Callable[[Message[Any]], bytes], retention_ms: int
    ) -> None:
        self._wire = Wire(client)
        self._key_of = key_of
        self._retention_ms = retention_ms

    def around(self, next: Process) -> Process:
        def claimed(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            keys = [self._key(message) for message in batch]
            seen = self._seen(keys)
            passing = [message for index, message in enumerate(batch) if index not in seen]
            if not passing:
                return [SKIPPED] * len(batch)
            ours = [key for index, key in enumerate(keys) if index not in seen]
            try:
                results = next(passing)
            except BaseException:
                self._release(ours)
                raise
            self._release([k for k, r in zip(ours, results, strict=True) if _has_failed(r)])
            rest = iter(results)
            return [SKIPPED if i in seen else following(rest) for i in range(len(batch))]

        return claimed

    def _key(self, message: Message[Any]) -> bytes | None:
        """None for what has no id: the gate, which stands further in, refuses it."""
        try:
            return self._key_of(message) if message.id else None
        except InvalidMessage:
            return None

    def _seen(self, keys: Sequence[bytes | None]) -> set[int]:
        """Which of the messages were claimed before, in this batch or earlier."""
        claims: list[tuple[bytes, Command]] = []
        places: list[int] = []
        for index, key in enumerate(keys):
            if key is not None:
                claims.append((key, (b"SET", key, DONE, b"NX", b"PX", self._retention_ms)))
                places.append(index)
        try:
            replies = self._wire.send(claims) if claims else []
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"the inbox cannot be reached: {error}") from error
        failed = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failed is not None:
            self._release([k for (k, _), r in zip(claims, replies, strict=True) if r == b"OK"])
            raise StoreError(f"the inbox cannot be used: {failed}") from failed
        return {place for place, reply in zip(places, replies, strict=True) if reply is None}

    def _release(self, keys: Sequence[bytes | None]) -> None:
        """Let the next delivery try again; best effort, as in the seed."""
        failed: list[tuple[bytes, Command]] = [(k, (b"DEL", k)) for k in keys if k is not None]
        try:
            if failed:
                self._wire.send(failed)
        except (redis.RedisError, OSError) as error:
            logger.error("%d messages stay claimed, and are lost: %r", len(failed), error)


def _has_failed(result: Result) -> bool:
    return isinstance(result, Exception) and not isinstance(result, _MAY_HAVE_TAKEN_EFFECT)
