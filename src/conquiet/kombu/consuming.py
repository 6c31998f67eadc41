"""Consuming: messages are handed over to those who take them, or given back."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Any, NamedTuple

from kombu.utils.json import loads

from conquiet.kombu.entries import Entry
from conquiet.kombu.lease import keeper
from conquiet.kombu.qos import tag_of
from conquiet.kombu.reading import Reading

logger = logging.getLogger(__name__)

_REASON_CHARS = 500

TURN = 0.02
"""Seconds of callbacks after which the event loop gets its turn, with messages still waiting.

On Celery's solo pool a callback is a whole task: control commands and a shutdown come between two.
"""


class Taker(NamedTuple):
    """Who takes the messages of a queue."""

    tag: str
    no_ack: bool
    callback: Callable[[Any], Any]


class Consuming(Reading):
    """Consumers, and what they are given."""

    def forget_consuming(self) -> None:
        """Begin anew: a new channel, or a copy of one in a forked process."""
        self.forget_settling()
        self.forget_reading()
        self._takers: dict[str, list[Taker]] = {}

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        self.watch(queue)
        taker = Taker(consumer_tag, no_ack, callback)
        self._takers.setdefault(queue, []).append(taker)
        self._is_drained, self._prepares = False, True
        return super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)

    def _basic_cancel(self, consumer_tag: str) -> Any:
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is None:
            return None
        left = [taker for taker in self._takers.get(queue, ()) if taker.tag != consumer_tag]
        result = super()._basic_cancel(consumer_tag)
        if left:
            self._takers[queue] = left
            return result
        self._takers.pop(queue, None)
        if not self._takers:
            self.end_read()
        self._give_back_buffered(queue)
        self.unwatch(queue)
        if queue in self.auto_delete_queues:
            self._delete_unused(queue)
        return result

    def _give_back_buffered(self, queue: str) -> None:
        kept = deque(entry for entry in self._buffer if entry.queue != queue)
        for entry in self._buffer:
            if entry.queue == queue:
                self.settlement.give_back(entry.stream, entry.id)
        self._buffer = kept

    def _delete_unused(self, queue: str) -> None:
        try:
            is_deleted = self._delete_queue(queue, if_unused=True)
        except self.connection_errors as error:
            logger.warning("queue %r could not be deleted with its last consumer: %r", queue, error)
            return
        if is_deleted:
            self.forget_queue(queue)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        while (entry := self._buffered(queue) or self.fetch_one(queue)) is not None:
            message = self._decode(entry)
            if message is not None:
                self._own(entry, message, no_ack)
                return message
        return None

    def _buffered(self, queue: str) -> Entry | None:
        for entry in self._buffer:
            if entry.queue == queue:
                self._buffer.remove(entry)
                return entry
        return None

    # Handing over

    def _brpop_read(self, **options: Any) -> bool:
        """Parse the answer and hand over: one message if called by `drain_events`."""
        self.receive()
        handed = self.hand_over_in_turn() if self.in_event_loop() else self.hand_over()
        if not handed:
            raise Empty()
        return True

    def _poll_error(self, type: str, **options: Any) -> None:
        self._brpop_read()

    @property
    def can_hand_over(self) -> bool:
        return bool(self._buffer) and self.qos.can_consume()

    def hand_over_in_turn(self) -> int:
        """All that may be, or what there is time for."""
        handed, end = 0, time.monotonic() + TURN
        while self.can_hand_over and (not handed or time.monotonic() < end):
            handed += self.hand_over()
        return handed

    def hand_over(self) -> int:
        """Give the next message to its taker; 0 if none could be."""
        while self._buffer:
            entry = self._buffer.popleft()
            takers = self._takers.get(entry.queue)
            if not takers:
                self.settlement.give_back(entry.stream, entry.id)
                keeper.hurry()
                continue
            message = self._decode(entry)
            if message is None:
                continue
            self._own(entry, message, takers[-1].no_ack)
            takers[-1].callback(message)
            return 1
        return 0

    def _own(self, entry: Entry, message: Any, no_ack: bool) -> None:
        if no_ack:
            self.settle(entry.stream, entry.id)
        else:
            self.qos.append(message, message.delivery_tag)

    def _decode(self, entry: Entry) -> Any:
        """The message, or None if it cannot be one: then it is a dead letter."""
        try:
            payload = loads(entry.payload)
            properties = payload["properties"]
            properties["delivery_tag"] = tag_of(entry.stream, entry.id)
            if entry.redelivered:
                payload["headers"] = {**(payload.get("headers") or {}), "redelivered": True}
                properties.setdefault("delivery_info", {})["redelivered"] = True
            return self.Message(payload, channel=self)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, the next one may be right
            reason = f"{error!r:.{_REASON_CHARS}}"  # some errors show the whole message
            logger.error(
                "entry %s of queue %r is no message, and becomes a dead letter: %s",
                entry.id,
                entry.queue,
                reason,
            )
            self.settlement.bury(entry.stream, entry.id, f"it cannot be decoded: {reason}")
            keeper.hurry()
            return None
