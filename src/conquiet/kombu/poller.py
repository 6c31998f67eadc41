"""Poller: Kombu's own, which also knows the messages that were fetched ahead."""

from __future__ import annotations

import time
from typing import Any

import redis
from kombu.transport import redis as lists

_LONGEST_POLL = 1.0  # seconds; an ack from another thread frees credit and wakes nobody


class Poller(lists.MultiChannelPoller):  # type: ignore[misc]
    """Hands over what waits in a channel before it asks the server for more."""

    _turn = 0

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        if self._hand_over_one():
            return None
        return super().get(
            callback, _LONGEST_POLL if timeout is None else min(timeout, _LONGEST_POLL)
        )

    def _hand_over_one(self) -> bool:
        waiting = [
            channel
            for channel in self._channels
            if channel.has_buffered and channel.qos.can_consume()
        ]
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

    def on_poll_start(self) -> None:
        """For the event loop: what a smaller prefetch count kept back, then the next reads."""
        if not self._in_protected_read:
            for channel in list(self._channels):
                while channel.has_buffered and channel.qos.can_consume():
                    channel.hand_over()
        super().on_poll_start()

    def _register(self, channel: Any, client: Any, type: str) -> None:
        super()._register(channel, client, type)
        connection = client.connection
        try:
            connection.send_command("CLIENT", "ID")
            channel._client_id = connection.read_response()
        except redis.ResponseError:  # an ACL without it: a cancelled read then ends by itself
            channel._client_id = None

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
