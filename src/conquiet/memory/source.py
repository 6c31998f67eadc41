"""LogSource: one consumer of a group of a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from conquiet.acking import Acking, Error
from conquiet.errors import Blameless, ConfigError
from conquiet.memory.group import Claim, Group
from conquiet.message import Message
from conquiet.source import EndOfSource

if TYPE_CHECKING:
    from conquiet.memory.log import Log

_SHORTEST_WAIT_SECONDS = 0.001


class LogSource:
    """Reads a log; made by `Log.source`.

    What it hands out is its own for `lease` seconds and then for the next who reads. `late`
    counts settlements that came after the message had gone to somebody else; they do nothing.
    """

    def __init__(self, log: Log, group: Group, lease: float) -> None:
        if not lease > 0:
            raise ConfigError(f"lease={lease}: must be more than 0 seconds")
        self.lease = lease
        self.late = 0
        self._log = log
        self._group = group
        self._closed = False
        self._crashed = False

    def read(self, limit: int, timeout: float) -> Sequence[Message[Any]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        with self._log.changed:
            while not self._closed:
                now = self._log.clock()
                claims = self._group.claim(self, limit, now, now + self.lease)
                left = deadline - time.monotonic()
                if claims or left <= 0:
                    return [self._message(claim) for claim in claims]
                expiry = max(self._group.next_expiry - now, _SHORTEST_WAIT_SECONDS)
                self._log.changed.wait(min(left, expiry))
        raise EndOfSource("the source was closed")

    def _message(self, claim: Claim) -> Message[Any]:
        return claim.entry.message(acking=Acking(self, claim), deliveries=claim.deliveries)

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        with self._log.changed:
            if not self._crashed:
                self._group.renew(_claims(messages), self._log.clock() + self.lease)

    def settle(self, acked: Sequence[Claim], nacked: Sequence[tuple[Claim, Error]]) -> None:
        with self._log.changed:
            if self._crashed:
                return
            for claim in acked:
                self.late += not self._group.ack(claim)
            for claim, error in nacked:
                counts = not isinstance(error, Blameless)
                self.late += not self._group.nack(claim, counts=counts)
            # An ack can matter to others too: in an ordered group it frees its key.
            self._log.changed.notify_all()

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[Any]]:
        """What the log holds from `start` to `end`; see `Log.replay`."""
        topics = self._group.topics
        for message in self._log.replay(start, end):
            if topics is None or message.topic in topics:
                yield message

    def close(self) -> None:
        with self._log.changed:
            if not self._closed:
                self._closed = True
                self._group.release(self)
                self._log.changed.notify_all()

    def crash(self) -> None:
        """End as a killed process does: what it holds is nobody's until its lease ends."""
        with self._log.changed:
            self._closed = self._crashed = True
            self._log.changed.notify_all()


def _claims(messages: Sequence[Message[Any]]) -> list[Claim]:
    tokens = (message.acking.token for message in messages if message.acking is not None)
    return [token for token in tokens if isinstance(token, Claim)]
