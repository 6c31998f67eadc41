"""Inbox in Redis: a key per message, leased while it is handled, `done` when it took effect.

`SET key processing:<token> NX PX lease` before the handler; `SET key done PX retention` in the
same EXEC as its effects and its events. `lease` has the states in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeAlias, get_args

import redis

from conquiet import inbox
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.gate import FailedKeys, next_result
from conquiet.handler import NOTHING, SKIPPED, Process, Result
from conquiet.message import Message, describe
from conquiet.redis.lease import DONE, KeyState, LeaseTerms
from conquiet.redis.transaction import (
    InProgress,
    PartialExecError,
    UnknownOutcome,
    current_unit,
)
from conquiet.redis.wire import Command, Wire
from conquiet.stage import Stage

logger = logging.getLogger("conquiet.redis")

Mode = Literal["leased", "setnx"]
KeyOf: TypeAlias = Callable[[Message[Any]], str]

PREFIX = "conquiet:inbox:"
LEASE_SECONDS = 30.0
RETENTION_SECONDS = 24 * 3600.0

_MAY_HAVE_TAKEN_EFFECT = (UnknownOutcome, PartialExecError)


class Inbox(inbox.Inbox):
    """Middleware: remembers messages in the Redis of the transaction around it.

    `lease` is the cost of a crash: how long a message waits until another consumer may take it. It
    is renewed while a handler runs. After `retention` seconds a message is forgotten, and a later
    delivery takes effect again.

    A duplicate of a message that took effect is skipped and acked. A duplicate of a message that is
    in progress elsewhere is given back, with `InProgress`.

    `key` returns the identity of a message, by default source and id. `tag` is the hash tag of the
    keys, which all keys of a transaction share in a cluster: the subscriber by default, a text, or
    a function of the message.

    `mode="setnx"` writes `done` before the handler runs, and deletes it if the handler fails. It
    works outside the transaction and needs the `client`. **It loses messages**: after a crash in
    between, the next delivery is taken for a duplicate and acked.

    `subscriber` names the consumer: what one has handled is new to another. Keys begin with
    `prefix`.
    """

    def __init__(
        self,
        subscriber: str,
        *,
        lease: float = LEASE_SECONDS,
        retention: float = RETENTION_SECONDS,
        key: KeyOf | None = None,
        tag: str | KeyOf | None = None,
        prefix: str = PREFIX,
        mode: Mode = "leased",
        client: Any = None,
    ) -> None:
        super().__init__(subscriber)
        if mode not in get_args(Mode):
            raise ConfigError(f"mode={mode!r}: choose one of {', '.join(get_args(Mode))}")
        for name, seconds in (("lease", lease), ("retention", retention)):
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{name}={seconds}: must be more than 0 seconds")
        self.mode: Mode = mode
        self.prefix = prefix
        self._key = key
        self._tag = subscriber if tag is None else tag
        if isinstance(self._tag, str):
            _check_tag(self._tag)
        self._terms = LeaseTerms(lease, retention)
        self._heads: dict[str, bytes] = {}
        self._setnx: _SetnxMarks | None = None
        if mode == "setnx":
            if client is None:
                raise ConfigError("mode='setnx' works outside the transaction: give it client=…")
            self._setnx = _SetnxMarks(client, self.redis_key, self._terms.retention_ms)
            self.blocks = self._setnx.blocks
            self.stage = Stage.CLAIM
        elif client is not None:
            raise ConfigError("the inbox uses the client of the transaction around it")

    # --- keys -------------------------------------------------------------------------------

    def entry(self, message: Message[Any]) -> inbox.Entry:
        """Return subscriber and identity of a message."""
        if self._key is None:
            return super().entry(message)
        return super().entry(message)[0], self._key(message)

    def redis_key(self, message: Message[Any]) -> bytes:
        """Return `conquiet:inbox:{tag}:subscriber/handler:source id`.

        The subscriber is part of it: two services on one Redis must not swallow each other's
        messages.
        """
        return self._redis_key(message, self.entry(message))

    def _redis_key(self, message: Message[Any], entry: inbox.Entry) -> bytes:
        name, identity = entry
        try:
            if isinstance(self._tag, str):
                head = self._heads.get(name)
                if head is None:
                    head = self._heads[name] = self._head(self._tag, name)
            else:
                head = self._head(_check_tag(self._tag(message)), name)
            return head + identity.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"{describe(message.attributes)}: source and id must be text: {error}"
            ) from error

    def _head(self, tag: str, name: str) -> bytes:
        # Colons of the name are escaped, so that two names cannot make the same key.
        plain = name.replace("%", "%25").replace(":", "%3A")
        return f"{self.prefix}{{{tag}}}:{plain}:".encode()

    # --- the chain --------------------------------------------------------------------------

    def remember(self, entries: Sequence[inbox.Entry]) -> Collection[inbox.Entry]:
        """Return the entries that were leased when the batch came in."""
        return current_unit("the inbox").fresh(entries)

    def __call__(self, next: Process) -> Process:
        if self._setnx is not None:
            return self._setnx.around(next)
        process = super().__call__(next)

        def process_leased(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            passing = self._lease(batch)
            if len(passing) == len(batch):
                return process(batch)
            passed = set(map(id, passing))
            results = iter(process(passing) if passing else ())
            # A message that is held back gets its error as its result after the commit.
            return [next_result(results) if id(m) in passed else NOTHING for m in batch]

        return process_leased

    def _lease(self, batch: Sequence[Message[Any]]) -> Sequence[Message[Any]]:
        """Lease the keys of a batch; return the messages that are fresh or done before."""
        unit = current_unit("the inbox")
        entries = [self.entry(message) for message in batch]
        keys = [self._redis_key(*pair) for pair in zip(batch, entries, strict=True)]
        unique = list(dict.fromkeys(keys))
        states = dict(zip(unique, unit.lease(unique, self._terms), strict=True))
        failed_keys = FailedKeys()
        passing: list[Message[Any]] = []
        fresh: dict[bytes, inbox.Entry] = {}
        for message, key, entry in zip(batch, keys, entries, strict=True):
            state = states[key]
            is_held = state is KeyState.HELD
            error = failed_keys.blocking_error(message) or (
                _in_progress(message) if is_held else None
            )
            if error is not None:
                failed_keys.add(message)
                unit.hold_back(message, error)
                continue
            passing.append(message)
            if state is KeyState.OURS:
                fresh[key] = entry
                states[key] = KeyState.DONE  # for a duplicate in this batch
        unit.admit(passing, fresh)
        return passing


def _in_progress(message: Message[Any]) -> InProgress:
    return InProgress(
        f"{describe(message.attributes)}: another process handles it, or died doing so; it is"
        " delivered again when the lease has ended"
    )


def _check_tag(tag: str) -> str:
    if not tag or "{" in tag or "}" in tag:
        raise ConfigError(
            f"tag={tag!r}: the hash tag of inbox keys is a text without braces; by default it is"
            " the subscriber"
        )
    return tag


class _SetnxMarks:
    """The inbox of one SET NX before the transaction, which loses messages.

    absent ──SET NX PX retention──▶ done ──the handler failed: DEL──▶ absent
                                      └ a crash before EXEC: stays done, the message is lost
    """

    def __init__(
        self, client: Any, key_of: Callable[[Message[Any]], bytes], retention_ms: int
    ) -> None:
        self._wire = Wire(client, allows_async=True)
        self.is_async = self._wire.is_async
        self.blocks = not self.is_async
        self._key_of = key_of
        self._retention_ms = retention_ms

    def around(self, next: Process) -> Process:
        """Mark a batch before it is processed; unmark the messages that failed."""

        def process_marked(batch: Sequence[Message[Any]]) -> Sequence[Result]:
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
            return [SKIPPED if i in seen else next_result(rest) for i in range(len(batch))]

        return process_marked

    def _key(self, message: Message[Any]) -> bytes | None:
        """Return the key; None for a message without an id, which the gate refuses later."""
        try:
            return self._key_of(message) if message.id else None
        except InvalidMessage:
            return None

    def _seen(self, keys: Sequence[bytes | None]) -> set[int]:
        """Mark the messages; return the places of those that were marked before."""
        marks: list[tuple[bytes, Command]] = []
        places: list[int] = []
        for index, key in enumerate(keys):
            if key is not None:
                marks.append((key, (b"SET", key, DONE, b"NX", b"PX", self._retention_ms)))
                places.append(index)
        try:
            replies = self._wire.send(marks) if marks else []
        except (redis.RedisError, OSError) as error:
            raise StoreError(f"the inbox cannot be reached: {error}") from error
        failed = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failed is not None:
            self._release([k for (k, _), r in zip(marks, replies, strict=True) if r == b"OK"])
            raise StoreError(f"the inbox cannot be used: {failed}") from failed
        return {place for place, reply in zip(places, replies, strict=True) if reply is None}

    def _release(self, keys: Sequence[bytes | None]) -> None:
        """Delete marks, so that the next delivery tries again; a failure is logged only."""
        failed: list[tuple[bytes, Command]] = [(k, (b"DEL", k)) for k in keys if k is not None]
        try:
            if failed:
                self._wire.send(failed)
        except (redis.RedisError, OSError) as error:
            logger.error("%d messages stay marked as done and are lost: %r", len(failed), error)


def _has_failed(result: Result) -> bool:
    return isinstance(result, Exception) and not isinstance(result, _MAY_HAVE_TAKEN_EFFECT)
