"""QoS: how many messages a channel may hold, and what becomes of each."""

from __future__ import annotations

import logging
from typing import Any

from kombu.transport import redis as lists
from kombu.transport import virtual

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 100
"""Messages in one fetch, however large the prefetch count is."""


def tag_of(stream: str, entry: str) -> str:
    """The delivery tag: it says where the message lies, so any channel can ack it, at any time."""
    return f"{entry} {stream}"


def place_of(tag: str) -> tuple[str, str]:
    """The stream and the entry of a delivery tag."""
    entry, _, stream = tag.partition(" ")
    return stream, entry


class QoS(lists.QoS):  # type: ignore[misc]  # Kombu has no types
    """Redis itself remembers what is unacked, so there is nothing to write when a message comes."""

    append = virtual.QoS.append

    def credit(self) -> int:
        """How many more messages may be taken, those that wait to be handed over included."""
        if not self.can_consume():
            return 0
        if "can_consume" in self.__dict__:
            return 1  # Celery's worker_disable_prefetch replaces it, to take one at a time
        allowed: int | None = self.can_consume_max_estimate()
        return int(self.channel.slow_start) if allowed is None else min(allowed, MOST_AT_ONCE)

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(*place_of(delivery_tag))
        self._quick_ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self.channel.requeue(*place_of(delivery_tag))
        else:
            self.channel.settle(*place_of(delivery_tag))
        self._quick_ack(delivery_tag)

    def restore_unacked(self, client: Any = None) -> list[Any]:
        """Give back all that was delivered and not acked; it keeps its place."""
        self._flush()
        self.channel.give_back([place_of(tag) for tag in self._delivered])
        self._delivered.clear()
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """When the channel closes, or when the process ends without closing it."""
        self._on_collect.cancel()
        if not self._delivered.restored:
            self._delivered.restored = True
            self._delivered.clear()
            self.channel.leave()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a message of a living process is never given to others; see `lease`."""
