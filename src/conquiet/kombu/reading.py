"""Reading: the two halves of a read, as Kombu's poller wants them: start sends, read parses."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import redis

from conquiet.kombu import entries, scripts
from conquiet.kombu.entries import Entry
from conquiet.kombu.keys import BACK, GROUP
from conquiet.kombu.lease import keeper
from conquiet.kombu.qos import MOST_AT_ONCE, place_of
from conquiet.kombu.settlement import Acks, arguments
from conquiet.kombu.settling import Place, Settling

logger = logging.getLogger(__name__)

_LONGEST_BLOCK = 10.0  # seconds; what is given back does not wake a blocked reader
_RETRY_AFTER = 0.2  # seconds

# Redis says so for a while; a ResponseError that got out would end a Celery worker.
_PASSING = ("BUSY ", "MISCONF ", "NOREPLICAS ")
_PASSING_CLASSES = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.MasterDownError,
    redis.exceptions.TryAgainError,
)


class Reading(Settling):
    """Fetches ahead into a buffer, as many messages as there is credit for.

    A fetch is a script that takes what there is and settles what was acked. When it has taken all,
    the next read is an XREADGROUP that blocks until a message comes.
    """

    slow_start = 1  # how many to fetch where no prefetch count limits it

    def forget_reading(self) -> None:
        self._buffer: deque[Entry] = deque()
        self._order: list[str] = []
        self._in_flight: Acks = {}
        self._is_drained = False  # the last fetch took all there was
        self._blocks = False  # the read under way ends when something comes
        self._wanted = 0
        self._prepares = True  # the next fetch sees to it that streams and groups are there
        self._sends_whole = False
        self._has_strays = False
        self._retry_at = 0.0
        self._client_id: int | None = None

    # Start

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Send the next fetch, or the read that blocks; never wait for an answer."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        now = time.monotonic()
        wanted = self.qos.credit() - len(self._buffer)
        if not queues or now < self._retry_at or wanted <= 0:
            return
        self._order = self.streams_of(queues)
        # While there are acks to send, a fetch takes them along; a read that blocks could not.
        self._blocks, self._wanted = self._is_drained and not self.settlement, wanted
        if self._blocks:
            command = self._blocking_read(self.brpop_timeout if timeout is None else timeout)
        else:
            command = self._fetch(queues)
        connection = self.client.connection
        self._in_poll, self._brpop_sent_at = connection, now
        try:
            # No health check: it would wait for its answer on what may be half-open.
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
        except BaseException:
            self._lose_read()
            raise

    def _fetch(self, queues: list[str]) -> tuple[Any, ...]:
        if self.lease is None:  # in a forked child that goes on consuming
            for queue in queues:
                self.watch(queue)
        self._in_flight = self.settlement.take_acks()
        build = scripts.fetch.whole if self._sends_whole else scripts.fetch.by_hash
        return build(*self._arguments(self._order, self._wanted, self._in_flight, self._prepares))

    def _arguments(
        self, streams: list[str], wanted: int, acks: Acks, prepares: bool
    ) -> tuple[list[str], list[scripts.Argument]]:
        expires = [self._expires.get(self.queue_of(stream), "") for stream in streams]
        args = arguments(
            acks,
            GROUP,
            self.consumer,
            BACK,
            self.lease.milliseconds if self.lease else 0,
            wanted,
            self.delivery_limit,
            self.keys.namespace,
            "1" if prepares else "",
            len(streams),
            *expires,
        )
        return [self.keys.leases, *streams, *acks], args

    def _blocking_read(self, timeout: float) -> tuple[Any, ...]:
        block = max(int(min(timeout or _LONGEST_BLOCK, _LONGEST_BLOCK) * 1000), 1)
        news = [">"] * len(self._order)
        group = ("XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", 1, "BLOCK", block)
        return *group, "STREAMS", *self._order, *news

    def fetch_one(self, queue: str) -> Entry | None:
        """Of one queue, at once."""
        if self._has_strays:
            self.find_strays(self.commands.execute_command)
        self.join(queue)
        streams = self.streams_of([queue])
        acks = self.settlement.take_acks()
        try:
            reply = self.call(scripts.fetch, *self._arguments(streams, 1, acks, True))
        except BaseException:
            self._has_strays = True
            self.settlement.put_back(acks)
            raise
        found = entries.of_fetch(reply, streams, self.queue_of)
        return found[0] if found else None

    # Read

    def receive(self) -> None:
        """Take what the server has sent into the buffer."""
        connection = self._in_poll
        try:
            reply = connection.read_response()
        except self.connection_errors as error:
            self._lose_read()
            if isinstance(error, redis.BusyLoadingError):
                self._try_later(error)
                return
            connection.disconnect()
            raise
        except redis.ResponseError as error:
            self._lose_read(has_strays=False)
            self._recover(error)
            return
        finally:
            self._in_poll = None
            flush = getattr(self, "_flush_brpop_reauth", None)  # since Kombu 5.7
            if flush is not None:
                flush()
        self._in_flight, self._sends_whole = {}, False
        if self._blocks:
            self._is_drained = False
            self._keep(entries.of_read(reply, self.queue_of))
        else:
            self._prepares = False
            found = entries.of_fetch(reply, self._order, self.queue_of)
            self._is_drained = len(found) < self._wanted and not reply[0]
            self._keep(found)

    def _keep(self, found: list[Entry]) -> None:
        """Into the buffer; more than there is credit for goes back, since others may be idle."""
        if not found:
            self.slow_start = 1
            return
        self.slow_start = min(max(self.slow_start, len(found)) * 2, MOST_AT_ONCE)
        for queue in dict.fromkeys(entry.queue for entry in found):
            self._queue_cycle.rotate(queue)
        room = max(self.qos.credit() - len(self._buffer), 0)
        if self.qos.prefetch_count and len(found) > room:
            found, excess = found[:room], found[room:]
            for entry in excess:
                self.settlement.give_back(entry.stream, entry.id)
            keeper.hurry()
        self._buffer.extend(found)

    def _lose_read(self, has_strays: bool = True) -> None:
        self._in_poll, self._is_drained = None, False
        if has_strays:
            self._has_strays = True
            # Also of queues that were cancelled since it was sent.
            self._streams.update((stream, self.queue_of(stream)) for stream in self._order)
        self.settlement.put_back(self._in_flight)
        self._in_flight = {}

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_poll is connection:
            self._lose_read()
        super()._on_connection_disconnect(connection)

    def find_strays(self, execute: Callable[..., Any]) -> None:
        """What a lost reply held is given back; the server counts it as ours."""
        self.give_back_strays(self._held(), execute)
        self._has_strays = False

    def _held(self) -> Iterator[Place]:
        yield from self.settlement.places()
        yield from ((entry.stream, entry.id) for entry in self._buffer)
        yield from (place_of(tag) for tag in list(self.qos._delivered))

    def _recover(self, error: redis.ResponseError) -> None:
        text = str(error)
        if isinstance(error, redis.exceptions.NoScriptError):
            self._sends_whole = True
        elif text.startswith(("NOGROUP", "UNBLOCKED")) or "consumer group" in text:
            self._is_drained, self._prepares = False, True
            for queue in self.active_queues:
                self.declare_if_lost(queue)
        elif isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY" in text:
            # The master became a replica; Kombu connects anew, and Sentinel knows where to.
            self.client.connection.disconnect()
            raise redis.ConnectionError(text) from error
        elif isinstance(error, _PASSING_CLASSES) or text.startswith(_PASSING):
            self._try_later(error)
        else:
            raise error

    def _try_later(self, error: Exception) -> None:
        logger.warning("Redis cannot serve now, trying again: %s", error)
        self._retry_at = time.monotonic() + _RETRY_AFTER
        if not self.in_event_loop():
            time.sleep(_RETRY_AFTER)

    def in_event_loop(self) -> bool:
        """Not called by `drain_events`."""
        return not self.connection.cycle._in_protected_read

    # End

    def end_read(self) -> None:
        """Nobody takes messages any more: what the read brings goes back."""
        if not self._in_poll:
            return
        if self._blocks and self._client_id:
            try:
                self.commands.client_unblock(self._client_id)
            except redis.RedisError:  # not allowed; then it ends by itself, within the block time
                logger.debug("CLIENT UNBLOCK failed", exc_info=True)
        try:
            if self._in_poll.can_read(timeout=_LONGEST_BLOCK + 1):
                self.receive()
            else:  # half-open: whatever is in it, the server has it as ours, and takes it back
                self._in_poll.disconnect()
        except (*self.connection_errors, redis.ResponseError):
            logger.debug("the connection was lost with a read", exc_info=True)
        for entry in self._buffer:
            self.settlement.give_back(entry.stream, entry.id)
        self._buffer.clear()
        keeper.hurry()
