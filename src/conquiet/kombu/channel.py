"""Give Kombu a channel over Redis Streams.

The channel implements what Kombu calls, and leaves the work to its parts: a topology, a publisher,
a consumer with its settlement, a reader and a delivery. The parts know nothing of the channel.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

import redis
from amqp.protocol import queue_declare_ok_t  # type: ignore[import-untyped]  # amqp has none
from kombu.exceptions import ChannelError
from kombu.transport import redis as lists
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.json import loads
from kombu.utils.url import url_to_parts
from kombu.utils.uuid import uuid
from redis import sentinel

from conquiet.kombu.connection import (
    REPLY_TIMEOUT,
    UNREACHABLE,
    Commands,
    background_client,
    close_idle,
    is_replica,
    limit_waits,
)
from conquiet.kombu.consumer import Consumer
from conquiet.kombu.layout import Keys, place_of
from conquiet.kombu.lease import Lease
from conquiet.kombu.options import DEFAULT_LEASE, OptionError
from conquiet.kombu.publisher import Publisher
from conquiet.kombu.reader import LONGEST_BLOCK, MOST_AT_ONCE, Delivery, Reader, Subscriber
from conquiet.kombu.settlement import Settlement
from conquiet.kombu.topology import Binding, Topology

logger = logging.getLogger(__name__)

# Options of Kombu's Redis transport that mean nothing here, or would switch off acks.
_IGNORED_OPTIONS = {"ack_emulation", "sep", "fanout_prefix"}

_living: weakref.WeakSet[Channel] = weakref.WeakSet()


class QoS(lists.QoS):  # type: ignore[misc]  # Kombu has no types
    """Limit the messages that a channel holds, and settle them.

    Redis itself remembers what is unacked, so nothing is written when a message arrives.
    """

    append = virtual.QoS.append

    def credit(self, slow_start: int) -> int:
        """Return how many messages may be unacked or buffered besides those that are unacked.

        Without a prefetch count it is `slow_start`.
        """
        if not self.can_consume():
            return 0
        if "can_consume" in self.__dict__:
            return 1  # Celery's worker_disable_prefetch replaces it, to take one at a time
        allowed: int | None = self.can_consume_max_estimate()
        return slow_start if allowed is None else min(allowed, MOST_AT_ONCE)

    def ack(self, delivery_tag: str) -> None:
        confirm = self.channel.confirm_acks
        if confirm is None:
            confirm = _acks_early(self._delivered.get(delivery_tag))
        self._quick_ack(delivery_tag)
        self.channel.settle(delivery_tag, confirm)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self.channel.requeue(delivery_tag)
        else:
            self.channel.settle(delivery_tag)
        self._quick_ack(delivery_tag)

    def list_unacked(self) -> list[str]:
        """List the tags of the messages that were handed over and not settled."""
        return [tag for tag in list(self._delivered) if tag not in self._dirty]

    def lose(self, tags: Iterable[str]) -> None:
        """Hold messages no more that other consumers have; they may still be acked."""
        for tag in tags:
            self._delivered.pop(tag, None)

    def restore_unacked(self, client: Any = None) -> list[Any]:
        """Give back everything that was delivered and not acked; it keeps its place."""
        self._flush()
        self.channel.give_back(self._delivered)
        self._delivered.clear()
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Give back everything when the channel closes, or when the process ends without that."""
        self._on_collect.cancel()
        if not self._delivered.restored:
            self._delivered.restored = True
            self._delivered.clear()
            self.channel.consumer.leave()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a message of a living process is never given to others; see `lease`."""

    def forget(self) -> None:
        """Drop the messages of the parent process, in a forked child."""
        self._delivered.clear()
        self._dirty.clear()


def _acks_early(message: Any) -> bool:
    """Return whether a Celery worker acks a message before its task runs, not after it."""
    state: Any = sys.modules.get("celery.worker.state")
    if state is None or message is None:
        return False
    request = state.requests.get(message.headers.get("id"))
    return request is not None and not request.task.acks_late


class Channel(lists.Channel):  # type: ignore[misc]  # Kombu has no types
    """Implement Kombu's channel with streams in place of lists."""

    QoS = QoS

    lease_seconds = DEFAULT_LEASE
    delivery_limit = 0
    consumer_id: str | None = None
    autoclaim_interval: float | None = None
    confirm_acks: bool | None = None
    prefetch_count = 0
    _closing: bool

    from_transport_options = (
        *(name for name in lists.Channel.from_transport_options if name not in _IGNORED_OPTIONS),
        "delivery_limit",
        "consumer_id",
        "autoclaim_interval",
        "confirm_acks",
        "prefetch_count",
    )

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        options = connection.client.transport_options
        self.lease_seconds = options.get("lease") or DEFAULT_LEASE
        self.commands = Commands(self._create_client)
        super().__init__(connection, **kwargs)
        # Kombu's own is one for all channels of the process, and would take streams for PUB/SUB.
        self._fanout_queues: dict[str, Any] = {}
        self.keys = Keys(self.global_keyprefix or "")
        self.topology = Topology(
            self.commands,
            self.keys,
            self.state,
            self.typeof,
            connection.broadcasts,
            self._prepare_virtual_host(connection.client.virtual_host),
            deadletter_queue=self.deadletter_queue,
            fanout_patterns=self.fanout_patterns,
        )
        self.publisher = Publisher(
            self.commands,
            self.keys,
            self.topology,
            lambda message: self.priority(self._get_message_priority(message)),
        )
        self.leases = connection.leases
        self._join()
        try:
            connection.check_server_once(self)
        except BaseException:
            self.close()
            raise
        if self.prefetch_count:
            self.qos.prefetch_count = int(self.prefetch_count)
        _living.add(self)

    def _join(self, subscribers: dict[str, list[Subscriber]] | None = None) -> None:
        """Create the parts that belong to one process: a consumer and all that it holds."""
        # A name that was never used: entries of another consumer must not look like ours.
        name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        name = f"{self.consumer_id}:{name}" if self.consumer_id else name
        leases = self.leases
        settlement = self.settlement = Settlement(self.keys, name, leases.hurry)

        def open_lease() -> Lease:
            client = leases.client(self._background_client)
            args = (client, self.keys, name, settlement)
            return Lease(*args, self.lease_seconds, self.autoclaim_interval, leases.pulse)

        self._client_id: int | None = None
        self.consumer = Consumer(
            name,
            self.commands,
            self.keys,
            self.topology,
            settlement,
            leases,
            open_lease,
            self.priority_steps,
        )
        self.reader = Reader(
            self.commands,
            self.keys,
            self.topology,
            self.consumer,
            settlement,
            qos=lambda: self.qos,
            rotate=self._queue_cycle.rotate,
            in_event_loop=self._in_event_loop,
            delivery_limit=self.delivery_limit,
        )
        self.delivery = Delivery(
            self.reader,
            settlement,
            qos=lambda: self.qos,
            new_message=lambda payload: self.Message(payload, channel=self),
            confirm_lease=self.confirm_lease,
            pulse=leases.pulse,
            subscribers=subscribers,
        )

    # --- connections ------------------------------------------------------------------------

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        yield client or self.commands.client

    def _background_client(self) -> Any:
        return background_client(self._get_pool(), self.lease_seconds)

    def _get_client(self) -> Any:
        super()._get_client()  # refuses a redis-py that is too old
        return redis.Redis  # Kombu's prefixing client knows no command of streams

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        conninfo = self.connection.client
        wants_tls = conninfo.transport_cls == "rediss-streams" or conninfo.ssl is True
        if wants_tls and not isinstance(conninfo.ssl, dict):
            conninfo.ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        params: dict[str, Any] = super()._connparams(asynchronous=asynchronous)
        limit_waits(params)
        return params

    def _disconnect_pools(self) -> None:
        self.commands.reset()
        super()._disconnect_pools()

    # --- topology ---------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            self._new_queue(queue, **kwargs)
        elif not self._has_queue(queue):
            vhost = self.connection.client.virtual_host or "/"
            raise ChannelError(
                f"NOT_FOUND - no queue {queue!r} in vhost {vhost!r}",
                (50, 10),
                "Channel.queue_declare",
                "404",
            )
        # No number of consumers, as in all virtual transports of Kombu.
        return queue_declare_ok_t(queue, self._size(queue), 0)

    def _new_queue(
        self, queue: str, auto_delete: bool = False, durable: bool = True, **kwargs: Any
    ) -> None:
        self.topology.declare(queue, kwargs.get("arguments"), auto_delete, durable)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.topology.has(queue)

    def _size(self, queue: str) -> int:
        return self.topology.size(queue)

    def _purge(self, queue: str) -> int:
        return self.topology.purge(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        asker = self.consumer.name
        if self.topology.delete(queue, asker=asker, if_unused=if_unused, if_empty=if_empty):
            self.topology.forget(queue)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        self.topology.delete_exchange(exchange, if_unused)

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        self.topology.bind(queue, exchange or "amq.direct", routing_key, arguments)

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Any = None,
        **kwargs: Any,
    ) -> None:
        self.topology.unbind(queue, exchange or "amq.direct", routing_key, arguments)

    def get_table(self, exchange: str) -> list[Binding]:
        return self.topology.table(exchange)

    # Kombu 5.7 keeps the bindings of expiring queues alive by these; ours go with their queue.

    def maybe_refresh_binding_expiry(self) -> None:
        pass

    def sweep_bindings(self, limit: int = 100) -> int:
        return 0

    # --- publish ----------------------------------------------------------------------------

    def basic_publish(self, message: Any, exchange: str, routing_key: str, **kwargs: Any) -> Any:
        self._inplace_augment_message(message, exchange, routing_key)
        return self.publisher.publish(message, exchange, routing_key, **kwargs)

    def create_publish_batch(self, max_size: int) -> Any:
        self.publisher.begin_batch()
        return super().create_publish_batch(max_size)

    # Exchange types that the application registered call these.

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        self.publisher.send((queue,), message, **kwargs)

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **kwargs: Any) -> None:
        self.publisher.publish_fanout(message, exchange, routing_key, **kwargs)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[Any]:
        return self.topology.route(exchange, routing_key, default)

    # --- consume ----------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        is_broadcast = queue in self.topology.broadcasts
        if is_broadcast:
            self.active_fanout_queues.add(queue)
        else:
            self.consumer.consume(queue)
        self.delivery.subscribe(queue, Subscriber(consumer_tag, no_ack, callback))
        self.reader.read_again()
        result = super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if is_broadcast:
            self.connection.cycle.listen(self)
        return result

    def _basic_cancel(self, consumer_tag: str) -> Any:
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is None:
            return None
        is_broadcast = queue in self.active_fanout_queues
        result = super()._basic_cancel(consumer_tag)
        if self.delivery.unsubscribe(queue, consumer_tag):
            if is_broadcast:
                self.active_fanout_queues.add(queue)
                self.connection.cycle.listen(self)
            return result
        if not self.delivery.subscribers:
            self._end_read()
        self.reader.give_back(queue)
        if is_broadcast:
            channels = self.connection.channels or ()
            if not any(queue in channel.active_fanout_queues for channel in channels):
                self.topology.forget(queue)
            return result
        if self.consumer.unsubscribe(queue) and queue in self.topology.auto_delete:
            self._delete_unused(queue)
        return result

    def _delete_unused(self, queue: str) -> None:
        try:
            self.queue_delete(queue, if_unused=True)
        except UNREACHABLE as error:
            logger.warning("could not delete queue %r with its last consumer: %r", queue, error)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        return self.delivery.get(queue, no_ack)

    def settle(self, delivery_tag: str, confirm: bool = False) -> None:
        """Ack a message, also if another consumer has it by now: the work is done.

        With `confirm` return when Redis has the ack; so does a channel that reads no queue.
        """
        stream, entry = place_of(delivery_tag)
        if not stream:  # a broadcast
            return
        self.settlement.ack(stream, entry)
        if self.consumer.lease is None:
            self.settlement.send(self.commands.client)
        elif self.closed:
            self.consumer.settle_after_close()
        elif confirm:
            self.settlement.send(self.commands.client)

    def requeue(self, delivery_tag: str) -> None:
        """Move a message to the end of its queue; a broadcast, which has none, is dropped."""
        place = place_of(delivery_tag)
        if place[0]:
            self.settlement.requeue(self.commands.client, *place, self.delivery_limit)

    def give_back(self, delivery_tags: Any) -> None:
        """Return messages to their places in the queues."""
        places = [place for tag in delivery_tags if (place := place_of(tag))[0]]
        self.settlement.give_back_now(self.commands.client, places)

    def _restore(self, message: virtual.Message, leftmost: bool = False) -> None:
        self.qos.reject(message.delivery_tag, requeue=True)

    # --- read: Kombu's poller sends in one step and parses in another -------------------------

    def confirm_lease(self) -> None:
        """Check after a pause longer than the lease which messages are still ours.

        Raise `redis.ConnectionError` if the application has some that others got: Celery connects
        again, and forgets what it has prefetched and not started.
        """
        lease = self.consumer.lease
        if lease is None or not lease.is_in_doubt:
            return
        lost = 0
        try:
            lease.renew(self.commands.client)
            if lease.has_lapsed:
                lost = self.reader.drop_taken()
                lease.forget_lapse()
        except redis.ResponseError as error:
            if is_replica(error):
                raise redis.ConnectionError(str(error)) from error
            lease.doubt_later(error)  # it is full, or busy, and can still be read
        if lost:
            raise redis.ConnectionError(
                f"the lease of {self.consumer.name} ended during a pause, and other consumers got "
                f"{lost} of its messages"
            )

    def _in_event_loop(self) -> bool:
        """Return False in a call of `drain_events`."""
        return not self.connection.cycle._in_protected_read

    def on_connect(self, execute: Any) -> None:
        """Prepare a new connection for reads; `execute` sends a command over it."""
        try:
            self._client_id = execute("CLIENT", "ID")
        except redis.ResponseError:  # an ACL without it: a cancelled read then ends by itself
            self._client_id = None
        if self.reader.has_strays:
            self.reader.find_strays(execute)

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Send the next read; never wait for a reply."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        connection = self.client.connection
        command = self.reader.next_command(
            queues, self.brpop_timeout if timeout is None else timeout
        )
        if command is None:
            return
        self._in_poll, self._brpop_sent_at = connection, time.monotonic()
        try:
            # No health check: it would wait for a reply on a connection that may be half-open.
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
        except BaseException:
            self._lose_read()
            raise

    def _brpop_read(self, **options: Any) -> bool:
        """Parse the reply and hand over: one message if `drain_events` called."""
        self._receive_reply()
        return self._hand_over()

    def _hand_over(self) -> bool:
        delivery = self.delivery
        handed = delivery.hand_over_in_turn() if self._in_event_loop() else delivery.hand_over()
        if not handed:
            raise Empty()
        return True

    def _poll_error(self, type: str, **options: Any) -> None:
        self.handlers[type]()

    def _receive_reply(self) -> None:
        connection = self._in_poll
        try:
            reply = connection.read_response()
        except self.connection_errors as error:
            self._lose_read()
            if isinstance(error, redis.BusyLoadingError):
                self.reader.pause(error)
                return
            connection.disconnect()
            raise
        except redis.ResponseError as error:
            self._in_poll = None
            self._recover(error)
            return
        finally:
            self._in_poll = None
            flush = getattr(self, "_flush_brpop_reauth", None)  # since Kombu 5.7
            if flush is not None:
                flush()
        self.reader.accept(reply)

    def _recover(self, error: redis.ResponseError) -> None:
        try:
            self.reader.recover(error, self.active_queues)
        except redis.ConnectionError:
            self.client.connection.disconnect()
            raise

    def _lose_read(self) -> None:
        self._in_poll = None
        self.reader.lose()

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_poll is connection:
            self._lose_read()
        super()._on_connection_disconnect(connection)

    def _end_read(self) -> None:
        """End the read under way, since there is no subscriber, and give back what it brings."""
        connection = self._in_poll
        if not connection:
            return
        try:
            if connection.can_read(timeout=self._unblock_read()):
                self._receive_reply()
            else:  # half-open: the server counts the entries in it as ours, and takes them back
                connection.disconnect()
        except (*self.connection_errors, redis.ResponseError):
            logger.debug("the connection was lost during a read", exc_info=True)
        self.reader.give_back_all()

    def _unblock_read(self) -> float:
        """End the read in Redis, and return the seconds in which the reply must come."""
        client_id = self._client_id if self.reader.is_blocking else None
        try:
            # Over another connection, and also if nothing blocks: it shows that the server answers.
            self.leases.reach(lambda client: client.client_unblock(client_id or 0))
        except UNREACHABLE:
            return 0.0
        except redis.RedisError:  # not allowed; then it ends by itself, within the block time
            logger.debug("CLIENT UNBLOCK failed", exc_info=True)
            return LONGEST_BLOCK + 1
        return REPLY_TIMEOUT / 2

    # --- broadcasts: Kombu's poller listens by PUB/SUB -----------------------------------------

    def _subscribe(self) -> None:
        """Subscribe to the broadcasts of all queues that are consumed; never wait for a reply."""
        channels = self._subscriptions(self.active_fanout_queues)
        connection = self.subclient.connection
        if connection._sock is None:
            connection.connect()
        self._in_listen = connection
        self.subclient.subscribe(*channels)

    def _unsubscribe_from(self, queue: str) -> None:
        """Listen no more for a queue, which is no longer among those that are consumed."""
        others = self._subscriptions(self.active_fanout_queues)
        unused = [one for one in self._subscriptions([queue]) if one not in others]
        connection = self.subclient.connection
        if unused and connection and connection._sock:
            try:
                self.subclient.unsubscribe(*unused)
            except UNREACHABLE:  # then the subscription is gone, too
                connection.disconnect()

    def _subscriptions(self, queues: Iterable[str]) -> list[str]:
        found = (channel for queue in queues for channel in self.topology.subscriptions_of(queue))
        return list(dict.fromkeys(found))

    def _receive(self) -> bool:
        """Parse the broadcasts that have arrived, and hand over."""
        client = self.subclient
        self._receive_one(client)
        while client.connection is not None and client.connection.can_read(timeout=0):
            self._receive_one(client)
        return self._hand_over()

    def _receive_one(self, client: Any) -> None:
        try:
            response = client.parse_response()
        except self.connection_errors:
            self._in_listen = None
            raise
        if not isinstance(response, list | tuple):
            return
        kind, _, payload = response[:3]
        if kind == b"unsubscribe":
            client.handle_message(response)
        if kind != b"message":
            return
        try:
            info = loads(payload)["properties"]["delivery_info"]
            exchange, routing_key = info["exchange"], info["routing_key"]
        except Exception as error:  # noqa: BLE001 - any error condemns this broadcast, not the next
            logger.error("a broadcast cannot be decoded, and is dropped: %r", error)
            return
        queues = self.topology.receivers(self.active_fanout_queues, exchange, routing_key)
        self.reader.accept_broadcast(payload, queues)

    # --- end --------------------------------------------------------------------------------

    def close(self) -> None:
        if not self.closed and not self._closing:
            self._closing = True
            for tag in list(self._consumers):
                self._basic_cancel(tag)
            self._end_read()
            if self._qos is not None:
                self._qos.restore_unacked_once()
            else:
                self.consumer.leave()
        super().close()

    def _after_fork(self) -> None:
        """Start over in a forked child: sockets, poller and fetched messages are the parent's."""
        self._registered = False  # so that closing our copies does not reach the parent's poller
        super()._after_fork()
        self.__dict__.pop("client", None)
        self.__dict__.pop("subclient", None)
        self._in_poll = self._in_listen = None
        # The subscribers stay: a child that goes on consuming takes a lease of its own then.
        self._join(self.delivery.subscribers)
        if self._qos is not None:
            self._qos.forget()
        if self.connection is not None:
            self.connection.start_over_in_child()
            self.connection.cycle.add(self)
            self._registered = True


class SentinelChannel(Channel, lists.SentinelChannel):  # type: ignore[misc]  # Kombu has no types
    """Connect to the server that the sentinels name as the master."""

    from_transport_options = (
        *Channel.from_transport_options,
        "master_name",
        "min_other_sentinels",
        "sentinel_kwargs",
    )
    connection_class = lists.SentinelChannel.connection_class
    connection_class_ssl = lists.SentinelChannel.connection_class_ssl

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any:
        name = getattr(self, "master_name", None)
        if not name:
            raise OptionError(
                "the transport option master_name is missing: set it to the name under which the "
                "sentinels watch the master"
            )
        params = self._connparams(asynchronous)
        first = params.pop("host", None), params.pop("port", None)
        sentinels = sentinel.Sentinel(  # type: ignore[no-untyped-call]  # redis-py gives it none
            self._addresses() or [first],
            min_other_sentinels=getattr(self, "min_other_sentinels", 0),
            sentinel_kwargs=getattr(self, "sentinel_kwargs", None),
            **params,
        )
        manager = "_async_sentinel_manager" if asynchronous else "_sentinel_manager"
        setattr(self, manager, sentinels)
        own = {key: params[key] for key in ("username", "password") if key in params}
        return sentinels.master_for(  # type: ignore[no-untyped-call]  # nor this
            name, redis.Redis, **own
        ).connection_pool

    def _disconnect_pools(self) -> None:
        """Close the connections to the sentinels of both pools; Kombu closes those of the last."""
        pools = [pool for pool in (self._pool, self._async_pool) if pool is not None]
        super()._disconnect_pools()
        for pool in pools:
            close_idle(pool)

    def _addresses(self) -> list[tuple[str, int]]:
        """List the sentinels of the URL; their scheme is ours, not Kombu's."""
        parts = [url_to_parts(url) for url in self.connection.client.alt or ()]
        return [
            (part.hostname, part.port or self.connection.default_port)
            for part in parts
            if part.scheme in ("sentinel", "sentinel-streams")
        ]


def _start_over_in_child() -> None:
    for channel in list(_living):
        if not channel.closed:
            channel._after_fork()


os.register_at_fork(after_in_child=_start_over_in_child)
