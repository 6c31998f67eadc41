"""Inbox in Redis: leased while a message is handled, done when it took effect (R1).

`SET key processing:<token> NX PX lease` before the handler; `SET key done PX retention` in the
same EXEC as its effects and its events. See `lease` for the states in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeAlias, get_args

from conquiet import inbox
from conquiet.errors import ConfigError, InvalidMessage
from conquiet.gate import following
from conquiet.handler import NOTHING, Process, Result
from conquiet.message import Message, describe
from conquiet.ordering import Turns
from conquiet.redis.acks import ack_with_commit
from conquiet.redis.ambient import current
from conquiet.redis.lease import State, Terms
from conquiet.redis.outcome import InProgress
from conquiet.redis.setnx import Claims
from conquiet.stage import Stage

Mode = Literal["leased", "setnx"]
KeyOf: TypeAlias = Callable[[Message[Any]], str]

PREFIX = "conquiet:inbox:"
LEASE_SECONDS = 30.0
RETENTION_SECONDS = 24 * 3600.0


class Inbox(inbox.Inbox):
    """Middleware: remembers in the Redis of the transaction around it.

    `lease` is what a crash costs: how long a message waits until another may take it. It is
    renewed while a handler runs. After `retention` seconds a message is forgotten, and a
    delivery later than that takes effect again.

    A duplicate of what is done is skipped and acked. A duplicate of what is being handled
    elsewhere is given back, with `InProgress`.

    `key` tells messages apart by something else than source and id. `tag` is the hash tag of
    the keys, for a cluster: all keys of a transaction must have it. It is the subscriber, or a
    text, or a function of the message.

    `mode="setnx"` says done before the handler runs, and takes it back when that fails. It
    stands outside the transaction and needs the `client`. **It loses messages**: after a crash
    between the two, the next delivery is taken for a duplicate and acked.
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
            _checked_tag(self._tag)
        self._terms = Terms(lease, retention)
        self._heads: dict[str, bytes] = {}
        self._claims: Claims | None = None
        if mode == "setnx":
            if client is None:
                raise ConfigError("mode='setnx' works outside the transaction: give it client=…")
            self._claims = Claims(client, self.redis_key, self._terms.retention_ms)
            self.stage = Stage.CLAIM
        elif client is not None:
            raise ConfigError("the inbox uses the client of the transaction around it")

    # --- keys -------------------------------------------------------------------------------

    def entry(self, message: Message[Any]) -> inbox.Entry:
        if self._key is None:
            return super().entry(message)
        return super().entry(message)[0], self._key(message)

    def redis_key(self, message: Message[Any]) -> bytes:
        """`conquiet:inbox:{tag}:subscriber/handler:source id` (R11)."""
        return self._redis_key(message, self.entry(message))

    def _redis_key(self, message: Message[Any], entry: inbox.Entry) -> bytes:
        name, identity = entry
        try:
            if isinstance(self._tag, str):
                head = self._heads.get(name)
                if head is None:
                    head = self._heads[name] = self._head(self._tag, name)
            else:
                head = self._head(_checked_tag(self._tag(message)), name)
            return head + identity.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"{describe(message.attributes)}: source and id must be text: {error}"
            ) from error

    def _head(self, tag: str, name: str) -> bytes:
        # Without colons of its own the name ends at one, and two keys cannot be alike.
        plain = name.replace("%", "%25").replace(":", "%3A")
        return f"{self.prefix}{{{tag}}}:{plain}:".encode()

    # --- the chain --------------------------------------------------------------------------

    def remember(self, entries: Sequence[inbox.Entry]) -> Collection[inbox.Entry]:
        """Those that were leased when the batch came in."""
        fresh = current("the inbox").fresh
        return [entry for entry in entries if entry in fresh]

    def __call__(self, next: Process) -> Process:
        if self._claims is not None:
            return self._claims.around(next)
        process = super().__call__(next)

        def leased(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            passing = self._lease(batch)
            if len(passing) == len(batch):
                return process(batch)
            held = current("the inbox").held
            results = iter(process(passing) if passing else ())
            # What is held has no part in this transaction; its error is its result afterwards.
            return [NOTHING if id(m) in held else following(results) for m in batch]

        return leased

    def _lease(self, batch: Sequence[Message[Any]]) -> Sequence[Message[Any]]:
        """Lease the messages that are free; says which are ours to settle, now or before."""
        unit = current("the inbox")
        entries = [self.entry(message) for message in batch]
        keys = [self._redis_key(*pair) for pair in zip(batch, entries, strict=True)]
        unique = list(dict.fromkeys(keys))
        states = dict(zip(unique, unit.leases.acquire(unique, self._terms), strict=True))
        turns = Turns()
        passing: list[Message[Any]] = []
        unit.fresh.clear()  # a part of a transaction that was undone may have left its own
        for message, key, entry in zip(batch, keys, entries, strict=True):
            state = states[key]
            error = turns.lost(message) or (_in_progress(message) if state is State.HELD else None)
            if error is not None:
                turns.failed(message)
                unit.held[id(message)] = error
                continue
            unit.held.pop(id(message), None)
            passing.append(message)
            if state is State.OURS:
                unit.leases.confirmed.append(key)
                unit.fresh.add(entry)
                states[key] = State.DONE  # for its twin in this batch
        ack_with_commit(unit, passing)
        return passing


def _in_progress(message: Message[Any]) -> InProgress:
    return InProgress(
        f"{describe(message.attributes)}: somebody else handles it, or died doing so; its lease"
        " ends by itself"
    )


def _checked_tag(tag: str) -> str:
    if not tag or "{" in tag or "}" in tag:
        raise ConfigError(
            f"tag={tag!r}: the hash tag of inbox keys is a text without braces; by default it is"
            " the subscriber"
        )
    return tag
