"""SqsSource: receives from a queue of Amazon SQS; a lease is SQS's visibility timeout."""

from __future__ import annotations

import math
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack
from urllib.parse import urlsplit

import msgspec

from conquiet.acking import Error
from conquiet.codec import from_json, to_json
from conquiet.config import Url, check_timeout, require
from conquiet.errors import ConfigError, InvalidMessage, Refused, SinkUnavailable, StoreError
from conquiet.message import Attributes, Message, describe
from conquiet.relay.sinks.envelope import unpack
from conquiet.sink import Sink
from conquiet.sources.broker import MAX_ATTEMPTS, BrokerSource, Delivery, Redelivery, logger

_BATCH = 10
"""SQS takes and gives no more messages in one request."""
_MAX_WAIT_SECONDS = 20
_LOOK_SECONDS = 1.0
_MAX_LEASE_SECONDS = 12 * 60 * 60


class SqsSource(BrokerSource):
    """Receives messages of a queue; they are deleted after the commit, ten in a request.

        SqsSource("orders", region="eu-central-1")

    `lease` is the visibility timeout in whole seconds: a message that is neither settled nor
    renewed by then is delivered again. A worker renews it while a handler works. A failed message
    stays with this consumer and pauses `backoff` seconds, then twice as long, up to `max_backoff`.
    After `max_attempts` deliveries, as SQS counts them, or a permanent error, it goes to the queue
    `dead_letters`, by default the name of its queue and `-dead`, which is created if it is missing;
    a `Sink` may be given instead. `endpoint` is for servers that speak like SQS; credentials are
    those that boto3 finds.

    `region` is that of AWS; else boto3 finds one. `max_in_flight` bounds the messages that are
    received and not settled. A request may take `timeout` seconds.
    """

    _letters_suffix = "-dead"
    _look_seconds = _LOOK_SECONDS

    def __init__(
        self,
        queue: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        lease: float = 60.0,
        max_in_flight: int = 10_000,
        timeout: float = 10.0,
        **redelivery: Unpack[Redelivery],
    ) -> None:
        if not queue:
            raise ConfigError("an SQS source needs the name of a queue, such as 'orders'")
        if not 1 <= lease <= _MAX_LEASE_SECONDS or lease != int(lease):
            raise ConfigError(f"lease={lease}: must be a whole number of seconds, 1 to 43200")
        if isinstance(max_in_flight, bool) or max_in_flight < 1:
            raise ConfigError(f"max_in_flight={max_in_flight}: must be at least 1")
        self.lease = lease
        self._client = _Client(
            queue, region, endpoint, int(lease), max_in_flight, check_timeout(timeout)
        )
        super().__init__(self._client, queue, **redelivery)

    @classmethod
    def from_url(cls, url: str, max_attempts: int | None = None) -> Self:
        """Create one by `sqs://REGION/QUEUE?lease=60&dead_letters=NAME&endpoint=http://HOST:PORT`.

        Also `max_in_flight=` and `timeout=` in seconds.
        """
        given = Url(url, "the source")
        if not given.path:
            raise ConfigError(
                "the source sqs://…: say which queue, as in sqs://eu-central-1/orders"
            )
        settings: dict[str, Any] = {
            "region": given.place or None,
            "endpoint": given.text("endpoint"),
            "lease": given.seconds(60.0, "lease"),
            "max_in_flight": given.count("max_in_flight", 10_000),
            "dead_letters": given.text("dead_letters"),
            "timeout": given.seconds(10.0),
        }
        given.end()
        return cls(given.path, max_attempts=max_attempts or MAX_ATTEMPTS, **settings)

    def _name_letters(self, origin: str) -> str:
        # Only a FIFO queue can have a dot in its name, and letters need no order.
        return super()._name_letters(origin.removesuffix(".fifo"))

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Extend the lease of messages in flight, and of those that wait for their redelivery."""
        tokens = (message.acking.token for message in messages if message.acking is not None)
        ours = (token for token in tokens if isinstance(token, Delivery))
        self._client.renew([*ours, *self._waiting])


class _Client:
    """The messages that are received and not deleted, and when their leases end."""

    def __init__(
        self,
        queue: str,
        region: str | None,
        endpoint: str | None,
        lease: int,
        max_in_flight: int,
        timeout: float,
    ) -> None:
        self._queue = queue
        self._lease = lease
        self._max_in_flight = max_in_flight
        self._sqs = open_client(region, endpoint, timeout)
        self._url: str | None = None
        self._lock = threading.Lock()
        self._until: dict[Delivery, float] = {}
        self._received = 0
        self._closed = False

    def receive(self, limit: int, timeout: float) -> Sequence[Delivery]:
        found: list[Delivery] = []
        # SQS waits whole seconds; a worker's reads of half a second become requests of one.
        wait = min(_MAX_WAIT_SECONDS, math.ceil(timeout)) if timeout >= 0.5 else 0
        while not self._closed and len(found) < limit:
            if len(self._until) >= self._max_in_flight:
                self._forget_lost()
            room = min(limit - len(found), _BATCH, self._max_in_flight - len(self._until))
            if room <= 0:
                if not found:
                    time.sleep(min(timeout, _LOOK_SECONDS))
                break
            page = self._receive(room, 0 if found else wait)
            found += page
            if not page and not found and not wait and timeout > 0:
                time.sleep(timeout)
                timeout = 0.0
            elif not page:
                break
        return found

    def _forget_lost(self) -> None:
        """Forget messages whose lease has ended, which SQS delivers again."""
        with self._lock:
            self._until = {each: at for each, at in self._until.items() if self.holds(each)}

    def _receive(self, limit: int, wait: int) -> list[Delivery]:
        began = time.monotonic()
        answer = self._call(
            self._sqs.receive_message,
            MaxNumberOfMessages=limit,
            WaitTimeSeconds=wait,
            VisibilityTimeout=self._lease,
            AttributeNames=["ApproximateReceiveCount"],
            MessageAttributeNames=["All"],
        )
        # A message may have come at any moment of the wait; its lease began after `began`.
        page = [self._deliver(message) for message in answer.get("Messages", ())]
        with self._lock:
            for delivery in page:
                self._until[delivery] = began + self._lease
        return page

    def _deliver(self, message: Mapping[str, Any]) -> Delivery:
        body = message["Body"]
        data: bytes = body.encode()
        attributes: Attributes = {}
        error: InvalidMessage | None = None
        try:
            data, attributes = _decode(message, data, self._queue)
        except InvalidMessage as failure:
            error = failure
        self._received += 1
        return Delivery(
            data,
            attributes,
            topic=self._queue,
            origin=self._queue,
            place=self._received,
            receipt=message["ReceiptHandle"],
            deliveries=int(message["Attributes"]["ApproximateReceiveCount"]),
            error=error,
        )

    def holds(self, delivery: Delivery) -> bool:
        return self._until.get(delivery, 0.0) > time.monotonic()

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        with self._lock:
            mine = [delivery for delivery in deliveries if self.holds(delivery)]
            for delivery in deliveries:
                self._until.pop(delivery, None)
        if len(mine) < len(deliveries):
            logger.warning(
                "%d acks came after the lease of their messages; SQS delivers them again",
                len(deliveries) - len(mine),
            )
        self._change("deleted", self._sqs.delete_message_batch, mine)

    def renew(self, deliveries: Sequence[Delivery]) -> None:
        """Extend leases of which a third is over; a worker calls this each second."""
        began = time.monotonic()
        with self._lock:
            mine = [
                delivery
                for delivery in deliveries
                if began < self._until.get(delivery, 0.0) <= began + self._lease * 2 / 3
            ]
        lost = self._change("renewed", self._sqs.change_message_visibility_batch, mine, self._lease)
        with self._lock:
            for delivery in mine:
                if delivery in self._until and delivery not in lost:
                    self._until[delivery] = began + self._lease

    def _change(
        self,
        what: str,
        request: Callable[..., Any],
        deliveries: Sequence[Delivery],
        visibility: int | None = None,
    ) -> set[Delivery]:
        """Send a request for each ten messages; return those that it failed for."""
        failed: set[Delivery] = set()
        more = {} if visibility is None else {"VisibilityTimeout": visibility}
        for page in _pages(deliveries):
            entries = [
                {"Id": str(number), "ReceiptHandle": delivery.receipt, **more}
                for number, delivery in enumerate(page)
            ]
            try:
                answer = self._call(request, Entries=entries)
                failed.update(page[int(entry["Id"])] for entry in answer.get("Failed", ()))
            except StoreError as error:
                logger.warning("%s", error)
                failed.update(page)
        if failed:
            logger.warning(
                "%d messages of %r could not be %s; SQS may deliver them again",
                *(len(failed), self._queue, what),
            )
        return failed

    def open_letters(self, name: str) -> Sink:
        return _QueueSink(self._sqs, name)

    def _call(self, request: Callable[..., Any], **arguments: Any) -> Mapping[str, Any]:
        try:
            if self._url is None:
                self._url = self._sqs.get_queue_url(QueueName=self._queue)["QueueUrl"]
            answer: Mapping[str, Any] = request(QueueUrl=self._url, **arguments)
        except errors() as error:
            raise StoreError(f"queue {self._queue!r} of SQS: {error!s:.300}") from error
        return answer

    def close(self) -> None:
        self._closed = True
        with self._lock:
            mine = [delivery for delivery in self._until if self.holds(delivery)]
            self._until.clear()
        self._change("returned", self._sqs.change_message_visibility_batch, mine, 0)
        self._sqs.close()


class _QueueSink(Sink):
    """Sends messages to a queue as CloudEvents in JSON; creates it if it is missing."""

    def __init__(self, client: Any, queue: str) -> None:
        self._sqs = client
        self._queue = queue
        self._url: str | None = None

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        answers: list[Error] = []
        try:
            if self._url is None:
                self._url = self._sqs.create_queue(QueueName=self._queue)["QueueUrl"]
            for page in _pages(messages):
                entries = [
                    {"Id": str(number), "MessageBody": to_json(message).decode()}
                    for number, message in enumerate(page)
                ]
                answer = self._sqs.send_message_batch(QueueUrl=self._url, Entries=entries)
                failed = {entry["Id"]: entry for entry in answer.get("Failed", ())}
                for number, message in enumerate(page):
                    entry = failed.get(str(number))
                    why = entry and f"{describe(message.attributes)}: {entry.get('Message')}"
                    answers.append(Refused(why) if why else None)
        except errors() as error:
            raise SinkUnavailable(f"queue {self._queue!r} of SQS: {error!s:.300}") from error
        return answers

    def close(self) -> None:
        pass


def open_client(region: str | None, endpoint: str | None, timeout: float) -> Any:
    boto3, config = require("boto3", "sqs"), require("botocore.config", "sqs")
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(f"endpoint={endpoint!r:.80}: write https://HOST:PORT")
    settings = config.Config(
        connect_timeout=timeout,
        read_timeout=timeout + _MAX_WAIT_SECONDS,
        retries={"total_max_attempts": 2, "mode": "standard"},
        max_pool_connections=32,
    )
    wrong: tuple[type[Exception], ...] = (*errors(), ValueError)
    try:
        return boto3.client("sqs", region_name=region, endpoint_url=endpoint, config=settings)
    except require("botocore.exceptions", "sqs").NoRegionError:
        raise ConfigError(
            "SQS: say which region, as in sqs://eu-central-1/orders, or set AWS_DEFAULT_REGION"
        ) from None
    except wrong as error:
        raise ConfigError(f"the settings of the SQS source: {error}") from error


def errors() -> tuple[type[Exception], ...]:
    found = require("botocore.exceptions", "sqs")
    return found.ClientError, found.BotoCoreError


def _pages(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _decode(message: Mapping[str, Any], body: bytes, queue: str) -> tuple[bytes, Attributes]:
    """Decode a CloudEvent in JSON, or in Kombu's form; name any other message by its MessageId."""
    if body.startswith(b"{") and b'"specversion"' in body:
        event = from_json(body)
        return event.data, event.attributes
    headers = {
        name: value.get("StringValue", value.get("BinaryValue"))
        for name, value in message.get("MessageAttributes", {}).items()
    }
    found = unpack(body, headers, headers.get("content-type"), "ce_", "ce-") or _of_kombu(body)
    if found is not None:
        return found
    attributes: Attributes = {
        "id": message["MessageId"],
        "type": queue,
        "source": f"sqs:{queue}",
    }
    return body, attributes


def _of_kombu(body: bytes) -> tuple[bytes, Attributes] | None:
    """Decode what `KombuSink` sent through Kombu's transport of SQS; None if it is not that."""
    try:
        packed = msgspec.json.decode(b64decode(body, validate=True))
        data = b64decode(packed["body"], validate=True)
        return unpack(data, packed["headers"], packed["content-type"], "cloudEvents_")
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return None
