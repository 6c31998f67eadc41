"""AmqpSource: consumes queues of RabbitMQ (AMQP 0-9-1), and acks in batches after the commit.

One lock guards the connection, since its client is not made for threads. A read waits for the
socket outside the lock, so that other threads can ack meanwhile. A keeper sends heartbeats and
reads those of the broker while a handler works and no thread reads.
"""

from __future__ import annotations

import select
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any, Literal, Self, Unpack

from conquiet.config import Url, check_timeout, explain, require
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.lease import LeaseKeeper
from conquiet.message import Attributes
from conquiet.relay.sinks.envelope import plain_value, unpack
from conquiet.relay.sinks.kombu import KombuSink, connect, look_for_queue, open_connection
from conquiet.sink import Sink
from conquiet.sources.broker import MAX_ATTEMPTS, BrokerSource, Delivery, Redelivery, logger

QueueType = Literal["quorum", "classic"]

_PREFIXES = ("cloudEvents_", "cloudEvents:")
_FRAME_SECONDS = 5.0
"""How long the rest of a frame may take, once its beginning has arrived."""
_FRAME_HEAD = Struct(">BHI")
_FRAME_END = 0xCE
_PIECE_BYTES = 65_536
_MAX_PREFETCH = 65_535
_MAX_HEARTBEAT_SECONDS = 65_535


class AmqpSource(BrokerSource):
    """Consumes queues of RabbitMQ; messages are acked after the commit, a batch in one command.

        AmqpSource("amqp://app:secret@host/shop", "billing", topics=["orders"])

    A queue that does not exist is created, durable and of `queue_type`, and bound to the exchanges
    `topics`, where a `KombuSink` publishes; without `declare` it must exist. `prefetch` bounds the
    unacked messages of each queue. A failed message stays with this consumer and pauses `backoff`
    seconds, then twice as long, up to `max_backoff`; later messages of its key wait behind it.
    After `max_attempts` deliveries, or a permanent error, it is published to the exchange and queue
    `dead_letters`, by default the name of its queue and `.dead`; a `Sink` may be given instead.

    A quorum queue counts deliveries that were not acked, also across processes; a classic queue
    does not. When the connection is lost, the broker delivers unacked messages again, and acks that
    come too late are dropped: an inbox skips the duplicates.

    `url` is an AMQP URL. Without a frame for `heartbeat` seconds the connection counts as lost;
    connecting and publishing a dead letter may take `timeout` seconds. `tls` takes the settings of
    Python's ssl.
    """

    def __init__(
        self,
        url: str,
        queues: str | Sequence[str],
        *,
        topics: Sequence[str] = (),
        prefetch: int = 1_000,
        declare: bool = True,
        queue_type: QueueType = "quorum",
        heartbeat: float = 30.0,
        timeout: float = 10.0,
        tls: Mapping[str, Any] | None = None,
        **redelivery: Unpack[Redelivery],
    ) -> None:
        names = [queues] if isinstance(queues, str) else list(queues)
        if not names or not all(names):
            raise ConfigError("an AMQP source needs the name of a queue, such as 'orders'")
        if isinstance(prefetch, bool) or not 1 <= prefetch <= _MAX_PREFETCH:
            raise ConfigError(f"prefetch={prefetch}: must be from 1 to {_MAX_PREFETCH}")
        if queue_type not in ("quorum", "classic"):
            raise ConfigError(f"queue_type={queue_type!r}: choose 'quorum' or 'classic'")
        if not 1 <= heartbeat <= _MAX_HEARTBEAT_SECONDS:
            raise ConfigError(f"heartbeat={heartbeat}: must be from 1 to 65535 seconds")
        client = _AmqpClient(
            url,
            names,
            list(topics),
            prefetch,
            queue_type if declare else None,
            heartbeat,
            check_timeout(timeout),
            tls,
        )
        super().__init__(client, ", ".join(names), **redelivery)

    @classmethod
    def from_url(cls, url: str, max_attempts: int | None = None) -> Self:
        """Create one by `amqp://USER:PASSWORD@HOST/VHOST?queue=NAME,NAME`.

        Also `topic=NAME,NAME`, `prefetch=`, `declare=false`, `queue_type=classic`,
        `dead_letters=NAME`, `heartbeat=` and `timeout=` in seconds.
        """
        given = Url(url, "the source")
        queues = given.names("queue")
        if not queues:
            raise ConfigError("the source amqp://…: say which queue, as in ?queue=orders")
        settings: dict[str, Any] = {
            "topics": given.names("topic"),
            "prefetch": given.count("prefetch", 1_000),
            "declare": given.flag("declare", default=True),
            "queue_type": given.text("queue_type") or "quorum",
            "dead_letters": given.text("dead_letters"),
            "heartbeat": given.seconds(30.0, "heartbeat"),
            "timeout": given.seconds(10.0),
        }
        given.end()
        return cls(given.rest, queues, max_attempts=max_attempts or MAX_ATTEMPTS, **settings)


class _Cancelled(Exception):
    """The broker ended a consumer: its queue was deleted, or its leader is gone."""


class _AmqpClient:
    """One connection with one channel, and the deliveries on it that are not acked."""

    def __init__(
        self,
        url: str,
        queues: Sequence[str],
        topics: Sequence[str],
        prefetch: int,
        queue_type: QueueType | None,
        heartbeat: float,
        timeout: float,
        tls: Mapping[str, Any] | None,
    ) -> None:
        require("kombu", "amqp")
        self._url = url
        self._queues = queues
        self._topics = topics
        self._prefetch = prefetch
        self._queue_type = queue_type
        self._timeout = timeout
        self._tls = tls
        self._heartbeat = heartbeat
        try:
            self._link: Any = self._new_link()
            is_amqp = self._link.transport.driver_type == "amqp"
        except (KeyError, ValueError, ImportError) as error:
            raise ConfigError(
                f"Kombu does not understand the URL of the source: {explain(error, url)}"
            ) from None
        if not is_amqp:
            raise ConfigError("an AmqpSource reads AMQP only: amqp://… or amqps://…")
        self._troubles = (
            OSError,
            AttributeError,  # py-amqp raises it when its connection is gone
            _Cancelled,
            require("kombu", "amqp").exceptions.OperationalError,
            *self._link.connection_errors,
            *self._link.channel_errors,
        )
        self._lock = threading.Lock()
        self._connection: Any = None
        self._channel: Any = None
        self._consumers: list[str] = []
        self._frames: Any = None
        self._generation = 0
        self._unacked: dict[int, Delivery] = {}
        self._arrived: deque[Delivery] = deque()
        self._keeper = LeaseKeeper("conquiet-amqp")
        self._closed = False

    def _new_link(self) -> Any:
        return open_connection(self._url, self._timeout, self._tls, heartbeat=self._heartbeat)

    # --- reading ----------------------------------------------------------------------------

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        end = time.monotonic() + timeout
        while not self._closed:
            with self._lock:
                if self._closed:
                    break
                self._connect()
                self._drain(limit)
                taken = [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]
                frames = self._frames
            left = end - time.monotonic()
            if taken or left <= 0:
                return taken
            with suppress(OSError, ValueError):  # another thread closed it; the next round sees it
                frames.wait(left)
        return []

    def _drain(self, limit: int) -> None:
        """Read the frames that have come, until `limit` messages wait."""
        try:
            frames, handle = self._frames, self._connection.on_inbound_frame
            while len(self._arrived) < limit:
                frame = frames.take()
                if frame is not None:
                    handle(frame)
                elif frames.is_readable():
                    frames.receive()
                else:
                    break
        except self._troubles as error:
            self._lose()
            raise StoreError(f"lost the connection to the broker: {error!r:.300}") from error

    def _on_message(self, queue: str, message: Any) -> None:
        info = message.delivery_info
        tag = info["delivery_tag"]
        headers = message.properties.get("application_headers") or {}
        counted = headers.get("x-delivery-count", 0)
        data: bytes = bytes(message.body or b"")  # py-amqp gives an empty body as text
        attributes: Attributes = {}
        error: InvalidMessage | None = None
        try:
            data, attributes = _decode(data, headers, message.properties, info, queue)
        except InvalidMessage as failure:
            error = failure
        delivery = Delivery(
            data,
            attributes,
            topic=info["exchange"] or queue,
            origin=queue,
            place=tag,
            receipt=(self._generation, tag),
            deliveries=1 + (counted if isinstance(counted, int) else 0),
            error=error,
        )
        self._unacked[tag] = delivery
        self._arrived.append(delivery)

    # --- settling ---------------------------------------------------------------------------

    def holds(self, delivery: Delivery) -> bool:
        generation, tag = delivery.receipt
        return generation == self._generation and tag in self._unacked

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        with self._lock:
            tags = sorted(item.receipt[1] for item in deliveries if self.holds(item))
            for tag in tags:
                del self._unacked[tag]
            if len(tags) < len(deliveries):
                logger.warning(
                    "%d acks came after their connection was lost; the broker delivers these"
                    " messages again",
                    len(deliveries) - len(tags),
                )
            if not tags:
                return
            # Tags are given in ascending order: one command acks all below the first unacked one.
            first = next(iter(self._unacked), None)
            together = len(tags) if first is None else bisect_left(tags, first)
            try:
                if together:
                    self._channel.basic_ack(tags[together - 1], multiple=together > 1)
                for tag in tags[together:]:
                    self._channel.basic_ack(tag)
            except self._troubles as error:
                self._lose()
                logger.warning(
                    "%d acks could not be sent (%r); the broker delivers these messages again",
                    *(len(tags), error),
                )

    def open_letters(self, name: str) -> Sink:
        return KombuSink(self._url, name, queues=[name], timeout=self._timeout, tls=self._tls)

    # --- the connection ---------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connection is not None:
            return
        try:
            self._link = self._new_link()
            connect(self._link)
            self._connection = self._link.connection
            for queue in self._queues:
                self._prepare(queue)
            self._connection.sock.settimeout(_FRAME_SECONDS)
            self._channel = self._connection.channel()
            self._channel.auto_decode = False
            self._channel.basic_qos(0, self._prefetch, False)
            self._consumers = [
                self._channel.basic_consume(
                    queue,
                    callback=partial(self._on_message, queue),
                    on_cancel=partial(self._on_cancel, queue),
                )
                for queue in self._queues
            ]
            self._frames = _Frames(self._connection.sock)
        except self._troubles as error:
            self._lose()
            raise StoreError(f"cannot consume {', '.join(self._queues)}: {error!r:.300}") from error
        self._keeper.add(self, every=self._heartbeat / 4)

    def _prepare(self, queue: str) -> None:
        """Create a queue unless it exists, of whatever type; bind it."""
        missing = look_for_queue(self._link, queue)
        if missing is not None and self._queue_type is None:
            raise missing
        channel = self._connection.channel()
        if missing is not None:
            arguments = {"x-queue-type": self._queue_type}
            channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
        if self._queue_type is not None:
            for topic in self._topics:
                channel.exchange_declare(topic, "topic", durable=True, auto_delete=False)
                channel.queue_bind(queue, topic, "#")
        channel.close()

    def _on_cancel(self, queue: str, tag: str) -> None:
        raise _Cancelled(f"the broker ended the consumer of {queue!r}: was the queue deleted?")

    def _lose(self) -> None:
        """Forget the connection and its deliveries; the broker delivers them again."""
        self._generation += 1
        self._unacked.clear()
        self._arrived.clear()
        self._connection = self._channel = None
        with suppress(*self._troubles):
            self._link.collect()

    def renew(self) -> float | None:
        """Send a heartbeat, and read what has come: the broker's own may wait behind messages."""
        with self._lock:
            if self._connection is None or self._closed:
                return None
            try:
                self._drain(len(self._queues) * self._prefetch)
                self._connection.heartbeat_tick()
            except (StoreError, *self._troubles) as error:
                if self._connection is not None:
                    self._lose()
                logger.warning("lost the connection to the broker: %r", error)
                return None
        return self._heartbeat / 4

    def close(self) -> None:
        self._keeper.remove(self)
        with self._lock:
            self._closed = True
            self._generation += 1
            if self._connection is not None:
                with suppress(*self._troubles):
                    self._frames.finish(self._connection.on_inbound_frame)
                    for tag in self._consumers:  # else py-amqp warns of each late message
                        self._channel.basic_cancel(tag)
                    self._channel.close()  # the queue has acks and unacked messages when it returns
                with suppress(*self._troubles):
                    self._link.release()
            self._connection = self._channel = None


class _Frames:
    """Reads the frames of a connection in large pieces.

    The transport of py-amqp makes three calls to the kernel for each frame, and a message has
    three. `finish` must be called before py-amqp waits for an answer by itself.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        # Two, since one that waits in a thread refuses another thread. And not select.select, which
        # refuses descriptors above 1023.
        self._now, self._wait = select.poll(), select.poll()
        for poll in (self._now, self._wait):
            poll.register(sock, select.POLLIN)
        self._pending = getattr(sock, "pending", None)
        """What TLS has decrypted, which poll cannot see."""
        self._buffer = b""
        self._at = 0

    def is_readable(self) -> bool:
        """Return whether bytes have come; other threads may wait meanwhile."""
        return bool(self._pending is not None and self._pending()) or bool(self._now.poll(0))

    def wait(self, seconds: float) -> None:
        """Wait for bytes after all were read; other threads may read or write meanwhile."""
        self._wait.poll(seconds * 1000)

    def take(self) -> tuple[int, int, bytes] | None:
        """Return type, channel and payload of the next frame; None until it has arrived."""
        buffer, at = self._buffer, self._at
        if len(buffer) - at < _FRAME_HEAD.size:
            return None
        kind, channel, size = _FRAME_HEAD.unpack_from(buffer, at)
        at += _FRAME_HEAD.size
        end = at + size
        if end >= len(buffer):
            return None
        if buffer[end] != _FRAME_END:
            raise OSError(f"a frame ends with {buffer[end]:#x}: this is not AMQP 0-9-1")
        self._at = end + 1
        return kind, channel, buffer[at:end]

    def receive(self, limit: int = _PIECE_BYTES) -> None:
        piece = self._sock.recv(limit)
        if not piece:
            raise OSError("the broker closed the connection")
        self._buffer = self._buffer[self._at :] + piece
        self._at = 0

    def finish(self, handle: Callable[[tuple[int, int, bytes]], object]) -> None:
        """Handle all frames that have begun to arrive, and read no byte more."""
        while len(self._buffer) > self._at:
            frame = self.take()
            if frame is not None:
                handle(frame)
                continue
            there = len(self._buffer) - self._at
            if there < _FRAME_HEAD.size:
                self.receive(_FRAME_HEAD.size - there)
            else:
                size = _FRAME_HEAD.unpack_from(self._buffer, self._at)[2]
                self.receive(_FRAME_HEAD.size + size + 1 - there)


def _decode(
    body: bytes,
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    info: Mapping[str, Any],
    queue: str,
) -> tuple[bytes, Attributes]:
    """Decode a CloudEvent; name the attributes of any other message by its AMQP properties."""
    content_type = properties.get("content_type")
    event = unpack(body, headers, content_type, *_PREFIXES)
    if event is not None:
        return event
    found = {
        "id": properties.get("message_id"),
        "type": properties.get("type") or info["routing_key"],
        "source": properties.get("app_id") or f"amqp:{info['exchange'] or queue}",
        "time": properties.get("timestamp"),
        "correlationid": properties.get("correlation_id"),
        "datacontenttype": content_type,
    }
    return body, {
        name: plain_value(name, value) for name, value in found.items() if value not in (None, "")
    }
