"""KafkaSource: consumes topics as a member of a consumer group; offsets are committed after acks.

An offset says "all before it is done". Messages behind an unacked one that are done already are
listed in the metadata of the commit, so that the next owner of the partition does not get them
again: `1:` and their distances from the offset, as `1:2-5,9`.

With `positions`, offsets are kept in a database (`conquiet.sources.offsets`), and those count.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

from conquiet.config import Url, check_timeout, require
from conquiet.errors import ConfigError, InvalidMessage, StoreError
from conquiet.lease import LeaseKeeper
from conquiet.message import Attributes
from conquiet.relay.sinks.envelope import plain_value, unpack
from conquiet.relay.sinks.kafka import KafkaSink, explain_kafka, quiet
from conquiet.sink import Sink
from conquiet.sources.broker import MAX_ATTEMPTS, BrokerSource, Delivery, Redelivery, logger

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

    from conquiet.sources.offsets import StoredOffsets
    from conquiet.sql.log_group import PartitionRow
    from conquiet.sql.log_source import PositionInbox

Start = Literal["beginning", "now"]

_PREFIX = "ce_"
_STRATEGY = "partition.assignment.strategy"
_COOPERATIVE = "cooperative-sticky"
_REFRESH = "topic.metadata.refresh.interval.ms"
_REFRESH_MILLISECONDS = 30_000
_KEEP_SECONDS = 1.0
"""How often a consumer whose handlers work takes part in the rebalances of its group."""
_FLUSH_SECONDS = 5.0
_LOOK_SECONDS = 1.0
"""How long brokers that were away may take to answer, when a read asks whether they are back."""
_MAX_METADATA_CHARS = 3_500
"""A broker takes 4096 bytes by default (`offset.metadata.max.bytes`)."""
_MAX_ACKED = 1_000_000
_OURS = frozenset(
    """bootstrap.servers group.id enable.auto.commit enable.auto.offset.store auto.offset.reset
    enable.partition.eof error_cb on_commit""".split()  # noqa: SIM905 - it reads better
)
_OF_CONSUMERS = (
    *("auto.", "check.", "fetch.", "group.", "heartbeat.", "isolation.", "max.partition."),
    *("max.poll.", "partition.assignment.", "queued.", "session."),
)
"""The settings that a producer of dead letters does not know."""

Place = tuple[str, int]
"""A topic and a partition."""


class KafkaSource(BrokerSource):
    """Consumes topics of Kafka; offsets are committed after the handlers' effects.

        KafkaSource("host:9092", "orders", group="billing")

    `start` says where a new group begins. `max_in_flight` bounds the messages that are read and not
    acked; beyond it the partitions are paused. A failed message waits in this process and pauses
    `backoff` seconds, then twice as long, up to `max_backoff`; later ones of its key wait behind
    it. After `max_attempts` deliveries, or a permanent error, it goes to the topic `dead_letters`,
    by default the name of its topic and `.dead`; a `Sink` may be given instead. Kafka counts no
    deliveries: after a crash the count begins again. `settings` are librdkafka's.

    When a partition is revoked, what is acked by then is committed; later acks of its messages are
    dropped, and its new owner gets them again: an inbox skips those whose effects are there. With
    `positions`, the engine of the effects, offsets are kept in that database. Then
    `exactly_once="position"` lets a worker add a `PositionInbox` to the chain, which moves them in
    the transaction of the effects, in place of an inbox; `producers_repeat=False` says that no
    event is written to the topic twice.

    `servers` are librdkafka's bootstrap servers. Requests, and publishing a dead letter, may take
    `timeout` seconds.
    """

    delivery_type = Delivery

    def __init__(
        self,
        servers: str,
        topics: str | Sequence[str],
        group: str,
        *,
        start: Start = "beginning",
        positions: Engine | str | URL | None = None,
        exactly_once: Literal["inbox", "position"] = "inbox",
        producers_repeat: bool = True,
        max_in_flight: int = 10_000,
        timeout: float = 10.0,
        settings: Mapping[str, Any] | None = None,
        **redelivery: Unpack[Redelivery],
    ) -> None:
        names = [topics] if isinstance(topics, str) else list(topics)
        if not servers:
            raise ConfigError("a Kafka source needs servers, such as 'localhost:9092'")
        if not names or not all(names) or not group:
            raise ConfigError("a Kafka source needs a topic and a group, such as 'billing'")
        if start not in get_args(Start):
            raise ConfigError(f"start={start!r}: a group starts at the 'beginning' or 'now'")
        if isinstance(max_in_flight, bool) or max_in_flight < 1:
            raise ConfigError(f"max_in_flight={max_in_flight}: must be at least 1")
        given = dict(settings or {})
        taken = sorted(_OURS & given.keys())
        if taken:
            raise ConfigError(f"the setting {taken[0]!r} is the Kafka source's own; leave it out")
        if exactly_once not in ("inbox", "position"):
            raise ConfigError(f"exactly_once={exactly_once!r:.40}: choose 'inbox' or 'position'")
        if exactly_once == "position" and (positions is None or producers_repeat):
            raise ConfigError(
                "exactly_once=position needs positions, the database of the effects, and"
                " producers_repeat=false: an event that a producer wrote twice is handled twice"
            )
        if positions is not None and given.get(_STRATEGY, _COOPERATIVE) != _COOPERATIVE:
            raise ConfigError(f"positions=… needs the setting {_STRATEGY}={_COOPERATIVE}")
        self._client = _KafkaClient(
            *(servers, names, group, start, max_in_flight, check_timeout(timeout), given),
            positions,
        )
        super().__init__(self._client, f"{', '.join(names)} group={group}", **redelivery)
        self.inbox: PositionInbox | None = None
        """The middleware that a worker adds to its router."""
        if exactly_once == "position":
            room = require("conquiet.sql.log_source", "sql")
            self.inbox = room.PositionInbox(self, producers_repeat=producers_repeat)

    @classmethod
    def from_url(cls, url: str, max_attempts: int | None = None) -> Self:
        """Create one by `kafka://HOST:PORT,HOST:PORT?topic=NAME,NAME&group=NAME`.

        Also `start=now`, `positions=` with the URL of a database, `exactly_once=position` with
        `producers_repeat=false`, `max_in_flight=`, `dead_letters=NAME` and `timeout=` in seconds;
        others are librdkafka's.
        """
        given = Url(url, "the source")
        topics = given.names("topic") or [name for name in [given.path] if name]
        group = given.text("group")
        for name, value in (("topic", topics), ("group", group)):
            if not value:
                raise ConfigError(
                    f"the source kafka://…: say which {name}, as in ?topic=orders&group=billing"
                )
        settings: dict[str, Any] = {
            "start": given.text("start") or "beginning",
            "positions": given.text("positions"),
            "exactly_once": given.text("exactly_once") or "inbox",
            "producers_repeat": given.flag("producers_repeat", default=True),
            "max_in_flight": given.count("max_in_flight", 10_000),
            "dead_letters": given.text("dead_letters"),
            "timeout": given.seconds(10.0),
            "max_attempts": max_attempts or MAX_ATTEMPTS,
        }
        return cls(given.place, topics, group or "", settings=given.others(), **settings)

    def lag(self) -> dict[Place, int]:
        """Return how many messages of each of our partitions are not acked, as of the last read."""
        return self._client.lag()

    # --- in the transaction of the effects --------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of `positions`."""
        return self._stored.engine

    @property
    def positions(self) -> str:
        """The table of positions."""
        return self._stored.table

    def find_done(self, connection: Connection, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Return which deliveries a transaction has committed whose end is not known here."""
        return self._stored.find_done(connection, deliveries)

    def confirm(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """Move the stored offsets past deliveries, in the caller's transaction."""
        self._stored.confirm(connection, deliveries)

    @property
    def _stored(self) -> StoredOffsets:
        if self._client.stored is None:
            raise ConfigError(
                "this KafkaSource keeps its offsets in Kafka; give it positions=engine, the engine"
                " of the Transaction, or use Inbox(…) in place of PositionInbox"
            )
        return self._client.stored


class Partition:
    """The messages of a partition that is assigned to us: where to begin, if it is taken away."""

    __slots__ = ("acked", "begin", "is_lost", "next", "partition", "place", "start", "unacked")

    def __init__(self, place: Place, acked: Iterable[int]) -> None:
        self.place = place
        self.partition = place[1]
        self.start: int | None = None
        """The offset to begin with, if it is not the committed one."""
        self.begin: int | None = None
        """The offset that it began with; None if the group had none."""
        self.is_lost = False
        self.unacked: dict[int, Delivery] = {}
        """By offset, in ascending order."""
        # Anyone who may commit may write it, and a range of any length.
        self.acked = set(islice(acked, _MAX_ACKED))
        """Offsets beyond the position that are done."""
        self.next: int | None = None
        """The offset after the last one received."""

    @property
    def position(self) -> int | None:
        """The offset before which all is done; None if nothing was received yet."""
        return next(iter(self.unacked), self.next)

    def ack(self, offsets: Collection[int]) -> int:
        """Note that messages are done; return how many were not done before."""
        unacked, size, before = self.unacked, len(self.unacked), self.position
        for offset in offsets:
            unacked.pop(offset, None)
        position = self.position
        if position is not None:
            self.acked.update(offset for offset in offsets if offset > position)
            if self.acked and position != before:
                self.acked = {each for each in self.acked if each >= position}
        return size - len(unacked)


class _KafkaClient:
    """A consumer of librdkafka, and the messages of its partitions that are not acked."""

    def __init__(
        self,
        servers: str,
        topics: Sequence[str],
        group: str,
        start: Start,
        max_in_flight: int,
        timeout: float,
        settings: Mapping[str, Any],
        positions: Engine | str | URL | None,
    ) -> None:
        self._kafka = require("confluent_kafka", "kafka")
        self._untaken: set[Place] = set()
        """Assigned partitions whose stored offset is not known, or no longer."""
        self._start = start
        self._servers = servers
        self._topics = topics
        self._max_in_flight = max_in_flight
        self._timeout = timeout
        self._settings = settings
        self._lock = threading.Lock()  # guards the partitions; never held while polling
        self.stored: StoredOffsets | None = None
        if positions is not None:
            room = require("conquiet.sources.offsets", "sql")
            self.stored = room.StoredOffsets(positions, group, self._lock)
        # Held by the one thread that calls the consumer: two calls at a time can block for ever
        # (confluent-kafka 2.16, commit beside consume).
        self._poll = threading.Lock()
        self._partitions: dict[Place, Partition] = {}
        self._unacked = 0
        self._uncommitted: set[Place] = set()
        self._commits = 0
        """Commits that are sent and not answered."""
        self._arrived: deque[Delivery] = deque()
        self._is_paused: bool | None = False
        """None if some partitions are paused and others not."""
        self._polled_at = time.monotonic()
        self._trouble: str | None = None
        self._is_doubtful = False
        """Whether a read has failed, and none has found a broker and a topic since."""
        self._closed = False
        own = {
            "bootstrap.servers": servers,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest" if start == "beginning" else "latest",
            "error_cb": self._on_error,
            "on_commit": self._on_commit,
        }
        # A rebalance of this kind leaves partitions alone that do not move. And librdkafka would
        # look for topics that did not exist at the start every five minutes.
        defaults = {_STRATEGY: _COOPERATIVE, _REFRESH: _REFRESH_MILLISECONDS}
        try:
            self._consumer = self._kafka.Consumer({**defaults, **settings, **own}, logger=quiet)
        except (self._kafka.KafkaException, TypeError, ValueError) as error:
            raise ConfigError(
                f"the settings of the Kafka source: {explain_kafka(error)}"
            ) from error
        self._consumer.subscribe(
            list(topics),
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        self._keeper = LeaseKeeper("conquiet-kafka")
        self._keeper.add(self, every=_KEEP_SECONDS)

    # --- reading ----------------------------------------------------------------------------

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        with self._poll:
            if self._closed:
                return []
            if not self._arrived:
                room = self._max_in_flight - self._unacked
                self._pause(room <= 0)
                self._consume(max(1, min(limit, room)), timeout)
            taken = [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]
            if not taken:
                self._raise_trouble()
            return taken

    def _raise_trouble(self) -> None:
        """Raise while nothing can come: librdkafka reports the beginning of it, and no end."""
        why, self._trouble = self._trouble, None
        if why is None and self._is_doubtful:
            why = self._look_for_topics()
        self._is_doubtful = why is not None
        if why is not None:
            raise StoreError(f"cannot read from Kafka: {why}")

    def _look_for_topics(self) -> str | None:
        """Return why no broker answers; or that none has a topic of ours."""
        seconds, why = min(self._timeout, _LOOK_SECONDS), ""
        for topic in self._topics:
            is_pattern = topic.startswith("^")
            try:
                found = self._consumer.list_topics(None if is_pattern else topic, timeout=seconds)
            except (self._kafka.KafkaException, RuntimeError) as error:
                return f"{error}"
            missing = None if is_pattern else found.topics[topic].error
            if missing is None or self._partitions:
                return None
            why = f"topic {topic!r}: {missing}"
        return why

    def _consume(self, limit: int, timeout: float) -> None:
        """Commit, then poll; the callbacks of a rebalance run inside."""
        with self._lock:
            offsets = self._offsets(self._uncommitted)
            self._uncommitted.clear()
        if offsets:
            self._commits += 1
            self._commit(offsets, wait=False)
        try:
            # A call that may wait does so until it has as many as it was asked for.
            is_empty = not self._receive(limit, 0.0)
            if is_empty and timeout > 0 and self._receive(1, timeout) and limit > 1:
                self._receive(limit - 1, 0.0)
        except (self._kafka.KafkaException, RuntimeError) as error:  # the latter if it is closed
            raise StoreError(f"cannot read from Kafka: {error}") from error
        finally:
            self._polled_at = time.monotonic()
        if self.stored is not None:
            self._take_again(self.stored)

    def _receive(self, limit: int, timeout: float) -> bool:
        records = self._consumer.consume(limit, timeout)
        with self._lock:
            for record in records:
                if record.error() is not None:
                    self._trouble = f"{record.error()}"
                    continue
                self._trouble = None
                self._add(record)
        return bool(records)

    def _add(self, record: Any) -> None:
        place, offset = (record.topic(), record.partition()), record.offset()
        partition = self._partitions.get(place)
        if partition is None:
            return  # revoked by now
        partition.next = offset + 1
        if offset in partition.acked:
            if not partition.unacked:
                partition.acked.discard(offset)
            return
        delivery = _deliver(record, offset, partition)
        partition.unacked[offset] = delivery
        self._unacked += 1
        self._arrived.append(delivery)

    def _pause(self, wanted: bool) -> None:
        if wanted == self._is_paused:
            return
        try:
            assigned = self._consumer.assignment()
            (self._consumer.pause if wanted else self._consumer.resume)(assigned)
        except (self._kafka.KafkaException, RuntimeError) as error:  # the latter if it is closed
            raise StoreError(f"cannot pause or resume partitions: {error}") from error
        self._is_paused = wanted

    def renew(self) -> float | None:
        """Poll with paused partitions if no read does: the group takes a silent member for dead."""
        if self._closed:
            return None
        if time.monotonic() - self._polled_at >= _KEEP_SECONDS and self._poll.acquire(False):
            try:
                self._pause(True)
                self._consume(1, 0.0)
            finally:
                self._poll.release()
        return _KEEP_SECONDS

    def join(self) -> int:
        """Take part in a rebalance without reading; return how many partitions are ours."""
        with self._poll:
            self._pause(True)
            self._consume(1, 0.05)
        return len(self._partitions)

    # --- settling ---------------------------------------------------------------------------

    def holds(self, delivery: Delivery) -> bool:
        partition, offset = delivery.receipt
        return self._owns(partition) and offset in partition.unacked

    def _owns(self, partition: Partition) -> bool:
        return self._partitions.get(partition.place) is partition and not partition.is_lost

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        if self.stored is not None:
            self.stored.store([d for d in deliveries if not d.is_moved and self.holds(d)])
        done: dict[Partition, list[int]] = {}
        for delivery in deliveries:
            partition, offset = delivery.receipt
            done.setdefault(partition, []).append(offset)
        late = len(deliveries)
        with self._lock:
            for partition, offsets in done.items():
                if self._owns(partition):
                    acked = partition.ack(offsets)
                    late -= acked
                    self._unacked -= acked
                    self._uncommitted.add(partition.place)
        if late and self.stored is None:
            logger.warning(
                "%d acks came after their partition was revoked; its new owner gets these messages",
                late,
            )
        # The thread that polls commits them with its next call. A read that waits makes many.

    def _offsets(self, places: Collection[Place]) -> list[Any]:
        found = []
        for place in places:
            partition = self._partitions.get(place)
            if partition is None:
                continue
            position = partition.start if partition.position is None else partition.position
            if position is not None:
                done = encode_acked(position, partition.acked)
                found.append(self._kafka.TopicPartition(*place, position, metadata=done))
        return found

    def _commit(self, offsets: list[Any], *, wait: bool) -> None:
        try:
            self._consumer.commit(offsets=offsets, asynchronous=not wait)
        except (self._kafka.KafkaException, RuntimeError) as error:
            logger.warning("offsets could not be committed: %s; %s", error, REPEATED)

    def _on_commit(self, error: Any, offsets: Sequence[Any]) -> None:
        """Note the answer to a commit; one that failed, say in a rebalance, is repeated."""
        self._commits -= 1
        if error is not None:
            logger.info("offsets could not be committed, trying again: %s", error)
            with self._lock:
                self._uncommitted.update((each.topic, each.partition) for each in offsets)

    def _flush(self) -> None:
        """Wait until all acks are committed, for a bounded time."""
        end = time.monotonic() + min(self._timeout, _FLUSH_SECONDS)
        try:
            self._pause(True)
            while (self._uncommitted or self._commits > 0) and time.monotonic() < end:
                self._consume(1, 0.02)
        except StoreError as error:
            logger.warning("offsets could not be committed: %s; %s", error, REPEATED)

    def open_letters(self, name: str) -> Sink:
        settings = {
            setting: value
            for setting, value in self._settings.items()
            if not setting.startswith(_OF_CONSUMERS)
        }
        return KafkaSink(self._servers, name, timeout=self._timeout, settings=settings)

    def lag(self) -> dict[Place, int]:
        with self._lock:
            positions = {place: each.position for place, each in self._partitions.items()}
            begins = {place: each.begin for place, each in self._partitions.items()}
        found: dict[Place, int] = {}
        for place, position in positions.items():
            partition = self._kafka.TopicPartition(*place)
            try:
                with self._poll:
                    low, high = self._consumer.get_watermark_offsets(
                        partition, timeout=self._timeout, cached=position is not None
                    )
            except (self._kafka.KafkaException, RuntimeError) as error:
                raise StoreError(f"cannot read the ends of partitions: {error}") from error
            if position is None:  # nothing was received yet
                default = low if self._start == "beginning" else high
                begin = begins[place]
                position = default if begin is None else begin
            found[place] = max(0, high - max(low, position))
        return found

    # --- the group --------------------------------------------------------------------------

    def _on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        """Find the messages beyond the committed offset that an earlier owner has done."""
        if self._closed:
            return
        try:
            committed = consumer.committed(partitions, timeout=self._timeout)
        except self._kafka.KafkaException as error:
            logger.warning("committed offsets could not be read: %s; %s", error, REPEATED)
            committed = partitions
        if self.stored is None:
            self._adopt(committed, {})
        else:
            try:
                rows = self.stored.take([_place(each) for each in partitions])
            except StoreError as error:
                self._trouble = f"{error}"
                self._untaken.update(_place(each) for each in partitions)
            else:
                consumer.incremental_assign(self._adopt(committed, rows))
        self._is_paused = None  # new partitions are not paused, others may be

    def _adopt(self, found: list[Any], rows: Mapping[Place, PartitionRow]) -> list[Any]:
        """Note new partitions, and set the offsets that they begin with."""
        with self._lock:
            for each in found:
                acked, row = decode_acked(each.offset, each.metadata), rows.get(_place(each))
                if row is None:
                    partition = Partition(_place(each), acked)
                else:
                    partition = require("conquiet.sources.offsets", "sql").StoredPartition(
                        _place(each), row, acked
                    )
                if partition.start is not None and each.offset != partition.start:
                    each.offset = partition.start
                    self._uncommitted.add(_place(each))  # a crash came between the two commits
                partition.begin = each.offset if each.offset >= 0 else None
                self._partitions[_place(each)] = partition
        return found

    def _take_again(self, stored: StoredOffsets) -> None:
        """Take partitions whose stored offset is not known any more, and read on from there."""
        lost = [place for place, partition in self._partitions.items() if partition.is_lost]
        if not lost and not self._untaken:
            return
        self._drop(lost)
        self._untaken.update(lost)
        kafka = self._kafka
        try:
            found = [each for each in self._consumer.assignment() if _place(each) in self._untaken]
            if found:
                found = self._consumer.committed(found, timeout=self._timeout)
                self._adopt(found, stored.take([_place(each) for each in found]))
            for each in found:
                if each.offset < 0:
                    is_old = self._start == "beginning"
                    each.offset = kafka.OFFSET_BEGINNING if is_old else kafka.OFFSET_END
                self._consumer.seek(each)
                self._untaken.discard(_place(each))
        except (kafka.KafkaException, RuntimeError, StoreError) as error:
            self._drop(self._untaken)  # until the next call
            self._trouble = f"{error}"

    def _on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        with self._lock:
            offsets = self._offsets([_place(each) for each in partitions])
        if offsets:
            self._commit(offsets, wait=True)
        self._on_lost(consumer, partitions)

    def _on_lost(self, _: object, partitions: list[Any]) -> None:
        places = [_place(each) for each in partitions]
        self._untaken.difference_update(places)
        self._drop(places)

    def _drop(self, places: Iterable[Place]) -> None:
        with self._lock:
            for place in places:
                gone = self._partitions.pop(place, None)
                if gone is not None:
                    gone.is_lost = True
                    self._unacked -= len(gone.unacked)
            kept = [delivery for delivery in self._arrived if self.holds(delivery)]
            self._arrived = deque(kept)

    def _on_error(self, error: Any) -> None:
        codes = self._kafka.KafkaError
        if error.fatal() or error.code() in (
            codes._ALL_BROKERS_DOWN,
            codes._AUTHENTICATION,
            codes._SSL,
        ):
            self._trouble = f"{error.str():.300}"

    def close(self) -> None:
        self._keeper.remove(self)
        self._closed = True
        with self._poll:
            self._flush()
            # In a thread, since librdkafka waits without
            # a limit for a rebalance that other members do not finish.
            leave = threading.Thread(target=self._leave, name="conquiet-kafka-close", daemon=True)
            leave.start()
            leave.join(self._timeout)
            if leave.is_alive():
                logger.warning("the consumer did not leave its group in %.0f s", self._timeout)
            with self._lock:
                self._partitions.clear()
        if self.stored is not None:
            self.stored.close()

    def _leave(self) -> None:
        try:
            self._consumer.close()
        except (self._kafka.KafkaException, RuntimeError) as error:
            logger.warning("the consumer could not leave its group: %s", error)


REPEATED = "these messages may be delivered again"


def _place(partition: Any) -> Place:
    return partition.topic, partition.partition


def _deliver(record: Any, offset: int, partition: Partition) -> Delivery:
    topic, number = partition.place
    body = record.value() or b""
    attributes: Attributes = {}
    error: InvalidMessage | None = None
    try:
        body, attributes = _decode(record, body)
    except InvalidMessage as failure:
        error = failure
    return Delivery(
        body,
        attributes,
        topic=topic,
        origin=topic,
        place=(topic, number, offset),
        receipt=(partition, offset),
        error=error,
    )


def _decode(record: Any, body: bytes) -> tuple[bytes, Attributes]:
    """Decode a CloudEvent; name any other record by its topic, partition and offset."""
    given = record.headers() or ()
    try:
        headers: dict[str, Any] = {name: value.decode() for name, value in given}
    except (UnicodeDecodeError, AttributeError):  # one that is binary, or null; perhaps not ours
        headers = {name: value for name, value in given if value is not None}
    content_type = headers.get("content-type")
    if content_type is not None:
        content_type = plain_value("content-type", content_type)
    key = record.key()
    event = unpack(body, headers, content_type, _PREFIX)
    if event is None:
        attributes: Attributes = {
            "id": f"{record.partition()}-{record.offset()}",
            "type": record.topic(),
            "source": f"kafka:{record.topic()}",
        }
        if content_type is not None:
            attributes["datacontenttype"] = content_type
        event = body, attributes
    if key and not event[1].get("partitionkey") and not event[1].get("subject"):
        event[1]["partitionkey"] = key.decode(errors="backslashreplace")
    return event


def encode_acked(position: int, acked: Collection[int]) -> str:
    """List acked offsets beyond a position as distances; as many as the metadata has room for.

    >>> encode_acked(100, {102, 103, 104, 109})
    '1:2-4,9'
    """
    parts: list[str] = []
    size = 0
    for first, last in find_runs(
        sorted(offset - position for offset in acked if offset > position)
    ):
        parts.append(f"{first}-{last}" if last > first else str(first))
        size += len(parts[-1]) + 1
        if size > _MAX_METADATA_CHARS:
            parts.pop()
            break
    return f"1:{','.join(parts)}" if parts else ""


def find_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield numbers[start], number
            start = place + 1


def decode_acked(position: int, metadata: str | None) -> Iterator[int]:
    """Yield the offsets that `encode_acked` listed; none if the metadata is not ours.

    >>> list(decode_acked(100, "1:2-4,9"))
    [102, 103, 104, 109]
    """
    if not metadata or not metadata.startswith("1:") or position < 0:
        return
    for part in metadata[2:].split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return
        yield from range(position + int(first), position + int(last or first) + 1)
