"""What the contracts of source and worker share: how to open a source, and how to read it out."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from conquiet.message import Message
from conquiet.source import Source
from conquiet.testing.contracts.contract import Contract
from conquiet.testing.contracts.samples import ids, numbered

LONG = 60.0
"""A lease that does not end during a test."""


class Consuming(Contract):
    """Binds a source.

    Must be given: `open`, `publish`. As needed: `lease`, `redelivery_within`,
    `returns_at_once`, `keeps_place`, `crash`.
    """

    bindings = frozenset(
        ("open", "publish", "crash", "lease", "redelivery_within", "returns_at_once", "keeps_place")
    )

    lease: float | None = 0.5
    """Seconds of the short leases that tests wait for; None if your source knows no leases."""

    redelivery_within: float = 5.0
    """By when at most, after a nack, a close, a crash or the end of a lease, a message is back."""

    returns_at_once: bool = True
    """False if what was nacked, or held at close, returns only when its lease ends."""

    keeps_place: bool = True
    """False if a message that returns may come after later ones of its key; such a source
    cannot serve an ordered worker."""

    @abstractmethod
    def open(self, lease: float) -> Source:
        """Another consumer of one and the same group; the group starts at the beginning."""

    @abstractmethod
    def publish(self, messages: Sequence[Message[Any]]) -> None:
        """Put messages where the source finds them, in this order."""

    def crash(self, source: Source) -> None:
        """End the source as `kill -9` would. As it is: nobody touches it again, which is enough
        for a source that has no connection or thread that keeps its messages."""

    # --- for the tests ----------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _close_sources(self) -> Iterator[None]:
        self._opened: list[Source] = []
        yield
        for source in self._opened:
            with suppress(Exception):  # it may be crashed, or its server gone
                source.close()

    def consumer(self, lease: float = LONG) -> Source:
        source = self.open(lease)
        self._opened.append(source)
        return source

    @property
    def short(self) -> float:
        """A lease for tests in which it ends."""
        return LONG if self.lease is None else self.lease

    @property
    def returning(self) -> float:
        """A lease for tests in which messages are given back: it need not end if that is enough."""
        return LONG if self.returns_at_once else self.short

    @property
    def quiet(self) -> float:
        """How long to listen before believing that nothing comes back."""
        return 0.2 if self.lease is None else 1.5 * self.lease

    def send(self, count: int, prefix: str = "m", **attributes: str) -> list[str]:
        messages = numbered(count, prefix, **attributes)
        self.publish(messages)
        return ids(messages)

    def take(self, source: Source, count: int, limit: int = 100) -> list[Message[Any]]:
        """Read exactly `count` messages, or fail."""
        taken: list[Message[Any]] = []
        end = time.monotonic() + self.redelivery_within + self.quiet
        while len(taken) < count and time.monotonic() < end:
            taken.extend(source.read(min(limit, count - len(taken)), 0.1))
        assert len(taken) == count, f"read {ids(taken)}, expected {count} messages"
        return taken

    def expect_nothing(self, source: Source, seconds: float | None = None) -> None:
        """Nothing comes, also not when a short lease has ended."""
        end = time.monotonic() + (self.quiet if seconds is None else seconds)
        while (left := end - time.monotonic()) > 0:
            assert ids(source.read(100, left)) == []

    def expect_rest(self, expected: list[str]) -> None:
        """A new consumer gets these, and nothing else ever; acks them."""
        source = self.consumer(LONG)
        rest = self.take(source, len(expected))
        assert sorted(ids(rest)) == sorted(expected)
        for message in rest:
            message.ack()
        self.expect_nothing(source)
