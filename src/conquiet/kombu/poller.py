"""Poller: Kombu's own, which also knows the messages that were fetched ahead."""

from __future__ import annotations

import time
from typing import Any

import redis
from kombu.transport import redis as lists

from conquiet.kombu.bell import Bell

_LONGEST_POLL = 1.0  # seconds
_WITHOUT_CREDIT = 0.05  # seconds; an ack from another thread or greenlet frees it and wakes nobody


class Poller(lists.MultiChannelPoller):  # type: ignore[misc]  # Kombu has no types
    """Hands over what waits in a channel before it asks the server for more."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0
        self._bell = Bell()
        self._loop: Any = None

    # For drain_events

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        if self._hand_over_one():
            return None
        longest = _WITHOUT_CREDIT if self._lacks_credit() else _LONGEST_POLL
        return super().get(callback, longest if timeout is None else min(timeout, longest))

    def _lacks_credit(self) -> bool:
        return any(
            channel._active_queues and not channel.qos.can_consume() for channel in self._channels
        )

    def _hand_over_one(self) -> bool:
        waiting = [channel for channel in self._channels if channel.can_hand_over]
        if not waiting:
            return False
        self._turn += 1
        self._in_protected_read = True
        try:
            return bool(waiting[self._turn % len(waiting)].hand_over())
        finally:
            self._in_protected_read = False
            while self.after_read:
                self.after_read.pop()()

    # For the event loop

    def use(self, loop: Any) -> None:
        self._loop = loop

    def on_poll_start(self) -> None:
        super().on_poll_start()
        if self._loop is not None and not self._in_protected_read:
            self._ring_if_any_waits()

    def _ring_if_any_waits(self) -> None:
        """The loop must not sleep while there is a message that may be handed over."""
        waits = any(channel.can_hand_over for channel in self._channels)
        if waits and not self._bell.is_rung:
            self._bell.ring()
            self._loop.add_reader(self._bell.fd, self._hand_over_in_turn)
        elif not waits and self._bell.is_rung:
            self._stop_ringing()

    def _hand_over_in_turn(self) -> None:
        for channel in list(self._channels):
            if channel.can_hand_over:
                channel.hand_over_in_turn()

    def _stop_ringing(self) -> None:
        self._loop.remove(self._bell.fd)
        self._bell.silence()

    def close(self) -> None:
        if self._bell.is_rung:
            self._stop_ringing()
        self._bell.close()
        super().close()

    # For both

    def _register(self, channel: Any, client: Any, type: str) -> None:
        super()._register(channel, client, type)

        def execute(*command: Any) -> Any:
            # On this connection, which is new; the others may be half-open.
            client.connection.send_command(*command)
            return client.connection.read_response()

        try:
            channel._client_id = execute("CLIENT", "ID")
        except redis.ResponseError:  # an ACL without it: a cancelled read then ends by itself
            channel._client_id = None
        if channel._has_strays:
            channel.find_strays(execute)

    def check_reads(self) -> None:
        """Drop a connection whose answer is overdue; Kombu does it itself since 5.7.

        Before, its loop reconnects only if it is told so by an error.
        """
        now = time.monotonic()
        for channel in list(self._channels):
            connection, sent = channel._in_poll, channel._brpop_sent_at
            if not connection or sent is None or not channel.health_check_interval:
                continue
            if now - sent > channel.brpop_timeout + channel.health_check_interval:
                connection.disconnect()
                raise redis.ConnectionError(f"no answer for {now - sent:.0f} seconds")
