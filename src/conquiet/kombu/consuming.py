"""Consuming: fetch messages ahead, hand them over, and give back what was not handed over."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty
from typing import Any, NamedTuple

import redis
from kombu.utils.json import loads

from conquiet.kombu import scripts
from conquiet.kombu.keys import BACK, GROUP
from conquiet.kombu.lease import Lease, keeper
from conquiet.kombu.publishing import Publishing
from conquiet.kombu.qos import MOST_AT_ONCE, tag_of
from conquiet.kombu.settlement import Acks, Settlement, arguments

logger = logging.getLogger(__name__)

_LONGEST_BLOCK = 10.0  # seconds; what is given back does not wake a blocked reader
_RETRY_AFTER = 0.2  # seconds

# Redis says so for a while; a ResponseError that got out would end a Celery worker.
_PASSING = ("LOADING", "BUSY", "MISCONF", "OOM", "NOREPLICAS", "MASTERDOWN", "TRYAGAIN")


class Entry(NamedTuple):
    """A message that was fetched and not handed over yet."""

    queue: str
    stream: str
    id: str
    redelivered: bool
    payload: bytes | None


class Taker(NamedTuple):
    """Who takes the messages of a queue."""

    tag: str
    no_ack: bool
    callback: Callable[[Any], Any]


class Consuming(Publishing):
    """The two halves of a read, as Kombu's poller wants them: start sends, read parses."""

    slow_start = 1  # how many to fetch where no prefetch count limits it
    settlement: Settlement
    lease: Lease | None

    def forget_consuming(self) -> None:
        """Begin anew: a new channel, or a copy of one in a forked process."""
        self._buffer: deque[Entry] = deque()
        self._takers: dict[str, list[Taker]] = {}
        self._streams: dict[str, str] = {}
        self._watched: set[str] = set()
        self._order: list[str] = []
        self._in_flight: Acks = {}
        self._is_drained = False  # the last fetch took all there was
        self._blocks = False  # the read under way ends when something comes
        self._wanted = 0
        self._prepare_streams = True
        self._send_whole = False
        self._retry_at = 0.0
        self._client_id: int | None = None
        self.settlement = Settlement(self.keys)
        self.lease = None

    # What Kombu's channels do

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        self._watch(queue)
        taker = Taker(consumer_tag, no_ack, callback)
        self._takers.setdefault(queue, []).append(taker)
        self._prepare_streams = True
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
            self._end_read()
        self._give_back_buffered(queue)
        self._unwatch(queue)
        if queue in self.auto_delete_queues:
            self._delete_unused(queue)
        return result

    def _delete_unused(self, queue: str) -> None:
        try:
            is_deleted = self._delete_queue(queue, if_unused=True)
        except self.connection_errors as error:
            logger.warning("queue %r could not be deleted with its last consumer: %r", queue, error)
            return
        if is_deleted:
            self.auto_delete_queues.discard(queue)
            self.state.queue_bindings_delete(queue)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        self._watch(queue)
        while (entry := self._next_of(queue)) is not None:
            message = self._decode(entry)
            if message is None:
                continue
            if no_ack:
                self.settle(entry.stream, entry.id)
            else:
                self.qos.append(message, message.delivery_tag)
            return message
        return None

    def _next_of(self, queue: str) -> Entry | None:
        for entry in self._buffer:
            if entry.queue == queue:
                self._buffer.remove(entry)
                return entry
        streams = self._streams_of([queue])
        acks = self.settlement.take_acks()
        try:
            reply = self.call(scripts.fetch, *self._fetch_arguments(streams, 1, acks, True))
        except BaseException:
            self.settlement.put_back(acks)
            raise
        entries = self._entries(reply, streams)
        return entries[0] if entries else None

    # The read

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Send the next fetch, or the read that blocks; never wait for an answer."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        now = time.monotonic()
        if not queues or now < self._retry_at:
            return
        wanted = self.qos.credit() - len(self._buffer)
        if wanted <= 0:
            return
        connection = self.client.connection
        if self.lease is None:  # in a forked child
            for queue in queues:
                self._watch(queue)
        self._order = self._streams_of(queues)
        # While there are acks to send, a fetch takes them along; a read that blocks could not.
        self._blocks, self._wanted = self._is_drained and not self.settlement, wanted
        if self._blocks:
            command = self._blocking_read(self.brpop_timeout if timeout is None else timeout)
        else:
            self._in_flight = self.settlement.take_acks()
            args = self._fetch_arguments(
                self._order, wanted, self._in_flight, self._prepare_streams
            )
            build = scripts.fetch.whole if self._send_whole else scripts.fetch.by_hash
            command = build(*args)
        self._in_poll = connection
        self._brpop_sent_at = now
        try:
            # No health check: it would wait for its answer on what may be half-open.
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
        except BaseException:
            self._lose_read()
            raise

    def _blocking_read(self, timeout: float) -> tuple[Any, ...]:
        block = max(int(min(timeout or _LONGEST_BLOCK, _LONGEST_BLOCK) * 1000), 1)
        news = [">"] * len(self._order)
        group = ("XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", 1, "BLOCK", block)
        return *group, "STREAMS", *self._order, *news

    def _brpop_read(self, **options: Any) -> bool:
        """Parse the answer and hand over: one message if called by `drain_events`, else all."""
        self._receive_answer()
        if self._in_one_go():
            handed = 0
            while self._buffer and (not handed or self.qos.can_consume()):
                handed += self.hand_over()
        else:
            handed = self.hand_over()
        if not handed:
            raise Empty()
        return True

    def _in_one_go(self) -> bool:
        return not self.connection.cycle._in_protected_read

    def _receive_answer(self) -> None:
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
            self._lose_read()
            self._recover(error)
            return
        finally:
            self._in_poll = None
            flush = getattr(self, "_flush_brpop_reauth", None)  # since Kombu 5.7
            if flush is not None:
                flush()
        self._in_flight = {}
        self._send_whole = False
        if self._blocks:
            self._is_drained = False
            self._keep(self._blocked_entries(reply))
        else:
            self._prepare_streams = False
            entries = self._entries(reply, self._order)
            self._is_drained = len(entries) < self._wanted and not reply[0]
            self._keep(entries)

    def _keep(self, entries: list[Entry]) -> None:
        """Into the buffer; more than there is credit for goes back, since others may be idle."""
        if not entries:
            self.slow_start = 1
            return
        self.slow_start = min(max(self.slow_start, len(entries)) * 2, MOST_AT_ONCE)
        for queue in dict.fromkeys(entry.queue for entry in entries):
            self._queue_cycle.rotate(queue)
        room = max(self.qos.credit() - len(self._buffer), 0)
        if self.qos.prefetch_count and len(entries) > room:
            entries, excess = entries[:room], entries[room:]
            for entry in excess:
                self.settlement.give_back(entry.stream, entry.id)
            keeper.hurry()
        self._buffer.extend(entries)

    def _lose_read(self) -> None:
        self._in_poll = None
        self.settlement.put_back(self._in_flight)
        self._in_flight = {}

    def _recover(self, error: redis.ResponseError) -> None:
        text = str(error)
        if isinstance(error, redis.exceptions.NoScriptError):
            self._send_whole = True
        elif text.startswith(("NOGROUP", "UNBLOCKED")) or "consumer group" in text:
            self._is_drained, self._prepare_streams = False, True
        elif isinstance(error, redis.exceptions.ReadOnlyError):
            # The master became a replica; Kombu connects anew, and Sentinel knows where to.
            self.client.connection.disconnect()
            raise redis.ConnectionError(text) from error
        elif text.startswith(_PASSING):
            self._try_later(error)
        else:
            raise error

    def _try_later(self, error: Exception) -> None:
        logger.warning("Redis cannot serve now, trying again: %s", error)
        self._retry_at = time.monotonic() + _RETRY_AFTER
        if not self._in_one_go():
            time.sleep(_RETRY_AFTER)

    def _poll_error(self, type: str, **options: Any) -> None:
        self._brpop_read()

    def _end_read(self) -> None:
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
                self._receive_answer()
            else:  # half-open: whatever is in it, the server has it as ours, and takes it back
                self._in_poll.disconnect()
        except (*self.connection_errors, redis.ResponseError):
            logger.debug("the connection was lost with a read", exc_info=True)
        self._lose_read()
        for entry in self._buffer:
            self.settlement.give_back(entry.stream, entry.id)
        self._buffer.clear()
        keeper.hurry()

    # Arguments and answers

    def _streams_of(self, queues: Iterable[str]) -> list[str]:
        stream, known = self.keys.stream, self._streams
        found = []
        for priority in self.priority_steps:
            for queue in queues:
                key = stream(queue, priority)
                known[key] = queue
                found.append(key)
        return found

    def _fetch_arguments(
        self, streams: list[str], wanted: int, acks: Acks, prepare: bool
    ) -> tuple[list[str], list[scripts.Argument]]:
        lease = self.lease
        assert lease is not None
        keys = [self.keys.leases, *streams, *acks]
        expires = [self._expires.get(self._streams[stream], "") for stream in streams]
        args = arguments(
            acks,
            GROUP,
            self.consumer,
            BACK,
            lease.milliseconds,
            wanted,
            self.delivery_limit,
            self.keys.namespace,
            "1" if prepare else "",
            len(streams),
            *expires,
        )
        return keys, args

    def _entries(self, reply: list[Any], streams: list[str]) -> list[Entry]:
        found = []
        for at in range(1, len(reply), 4):
            stream = streams[reply[at] - 1]
            entry, redelivered, payload = reply[at + 1 : at + 4]
            found.append(
                Entry(self._streams[stream], stream, entry.decode(), bool(redelivered), payload)
            )
        return found

    def _blocked_entries(self, reply: Any) -> list[Entry]:
        found = []
        pairs = reply.items() if isinstance(reply, dict) else reply or ()  # RESP3 or RESP2
        for key, entries in pairs:
            stream = key.decode()
            for entry, fields in entries:
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                found.append(
                    Entry(
                        self._streams[stream],
                        stream,
                        entry.decode(),
                        b"n" in named,
                        named.get(b"m"),
                    )
                )
        return found

    # Handing over

    @property
    def has_buffered(self) -> bool:
        return bool(self._buffer)

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
            taker = takers[-1]
            if taker.no_ack:
                self.settle(entry.stream, entry.id)
            else:
                self.qos.append(message, message.delivery_tag)
            taker.callback(message)
            return 1
        return 0

    def _decode(self, entry: Entry) -> Any:
        """The message, or None if it cannot be one: then it is a dead letter."""
        try:
            payload = loads(entry.payload)
            properties = payload["properties"]
            properties["delivery_tag"] = tag_of(entry.stream, entry.id)
            if entry.redelivered:
                payload.setdefault("headers", {})["redelivered"] = True
                properties.setdefault("delivery_info", {})["redelivered"] = True
            return self.Message(payload, channel=self)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, the next one may be right
            logger.error(
                "entry %s of queue %r is no message, and becomes a dead letter: %r",
                entry.id,
                entry.queue,
                error,
            )
            self.settlement.bury(entry.stream, entry.id, f"it cannot be decoded: {error!r}")
            keeper.hurry()
            return None

    def _give_back_buffered(self, queue: str) -> None:
        kept = [entry for entry in self._buffer if entry.queue != queue]
        if len(kept) < len(self._buffer):
            self.give_back(
                [(entry.stream, entry.id) for entry in self._buffer if entry.queue == queue]
            )
            self._buffer = deque(kept)

    # Settling

    def _watch(self, queue: str) -> None:
        """Before the first fetch there must be a lease, and somebody to renew it."""
        lease = self.lease
        if lease is None:
            lease = self.lease = Lease(
                self.connection.background_client(self),
                self.keys,
                self.consumer,
                self.settlement,
                self.lease_seconds,
                self.autoclaim_interval,
            )
            weakref.finalize(self, lease.end).atexit = False
        streams = self._streams_of([queue])
        if queue in self._watched:
            return
        self._watched.add(queue)
        expires = self._subscribe_to(queue, lease)
        lease.streams |= frozenset(streams)
        if expires:
            lease.expires = {**lease.expires, **dict.fromkeys(streams, expires)}
        keeper.add(lease)

    def _subscribe_to(self, queue: str, lease: Lease) -> int | None:
        """Be known as a consumer; answers the milliseconds of x-expires, whoever declared them."""
        settings = self.call(
            scripts.subscribe,
            [self.keys.leases, self.keys.queues, self.keys.stream(queue, 0)],
            [GROUP, self.consumer, lease.milliseconds, queue],
        )
        expires = settings.partition(b"|")[0]
        if not expires:
            self._expires.pop(queue, None)
            return None
        self._expires[queue] = int(expires)
        return int(expires)

    def _unwatch(self, queue: str) -> None:
        self._watched.discard(queue)
        streams = self.keys.streams(queue)
        if self.lease:
            self.lease.expires = {
                stream: ms for stream, ms in self.lease.expires.items() if stream not in streams
            }
        try:
            self.settle_now()
            self.call(scripts.unsubscribe, streams, [GROUP, self.consumer])
        except self.connection_errors as error:
            logger.debug("%s could not unsubscribe: %r", self.consumer, error)

    def settle(self, stream: str, entry: str) -> None:
        """It is done with; Redis is told with the next fetch, or by the keeper soon."""
        self.settlement.ack(stream, entry)
        if self.closed:
            self.settle_now()
        else:
            keeper.hurry()

    def settle_now(self) -> None:
        if self.settlement and self.lease:
            self.settlement.send(self.lease.client, self.consumer)

    def requeue(self, stream: str, entry: str) -> None:
        """To the end of its queue, at once."""
        args: list[scripts.Argument] = [GROUP, self.consumer, entry]
        script_keys = [stream]
        self.call(scripts.requeue, script_keys, [*args, self.delivery_limit, self.keys.namespace])

    def give_back(self, places: Iterable[tuple[str, str]]) -> None:
        """To where they were, at once."""
        by_stream: dict[str, list[str]] = {}
        for stream, entry in places:
            by_stream.setdefault(stream, []).append(entry)
        for stream, entries in by_stream.items():
            self.call(scripts.giveback, [stream], [GROUP, self.consumer, BACK, *entries])

    def leave(self) -> None:
        """Give back all that this channel holds, known to us or still in the socket."""
        lease, self.lease = self.lease, None
        if lease is None:
            return
        self._buffer.clear()
        try:
            self.settlement.send(lease.client, self.consumer)
            scripts.leave.call(
                lease.client,
                [self.keys.leases, *self._streams],
                [GROUP, self.consumer, BACK, "1"],
            )
        except (redis.RedisError, OSError) as error:
            logger.warning(
                "%s could not give back its messages: %r; they come back when its lease ends",
                self.consumer,
                error,
            )
        finally:
            self.lease = lease  # for acks that come late
            keeper.remove(lease)
