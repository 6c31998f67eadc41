"""The commands of a queue on a Redis Stream, one call each: no loop, no retry, no policy.

Every command and option is known to Redis 6.0.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from conquiet.queue.config import QueueConfig, require_block_ms, require_int
from conquiet.queue.errors import MalformedEntryError, QueueError
from conquiet.queue.message import FIELD, QueueMessage, decode, encode
from conquiet.queue.metrics import StreamMetrics
from conquiet.queue.wire import Wire

if TYPE_CHECKING:
    import redis

_log = logging.getLogger(__name__)

# How much of the pending list one claim_stale() looks at.
_PENDING_PAGE = 1_000

_FIRST, _LAST = b"-", b"+"
_LARGEST_SEQUENCE = 2**64 - 1


class RedisStreamsQueue:
    """A queue on one stream, seen by one consumer of one group.

    `client` is a `redis.Redis`, with whatever options. Every error of Redis or of the network comes
    out as a QueueError with its cause; trying again is the caller's decision.

    >>> queue = RedisStreamsQueue(client, QueueConfig("orders", "billing", "billing-1"))
    >>> entry_id = queue.enqueue({"order": 7})
    >>> [message] = queue.read(block_ms=1_000)
    >>> message.payload
    {'order': 7}
    >>> queue.ack(message)
    """

    def __init__(self, client: redis.Redis, config: QueueConfig) -> None:
        self.config = config
        self._wire = Wire(client)
        self._stream = config.stream_key.encode()
        self._group = config.consumer_group.encode()
        self._consumer = config.consumer_name.encode()
        self._unreported: deque[MalformedEntryError] = deque()
        self._scan_from = _FIRST
        self._create_group()
        # only now: a stream that Redis refused gets no metrics, not even at zero
        self._metrics = StreamMetrics(config.stream_key)

    def enqueue(self, payload: dict[str, Any]) -> str:
        """Add a message, and return its id."""
        entry_id: bytes = self._wire.call(b"XADD", self._stream, b"*", FIELD, encode(payload))
        return entry_id.decode()

    def read(self, block_ms: int, count: int = 1) -> list[QueueMessage]:
        """Wait up to `block_ms` for messages that no consumer of the group has got yet.

        They are pending until `ack`. An entry that is no message raises MalformedEntryError: at
        once if nothing else was read, else from the next call, so that it hides no message.
        """
        require_block_ms(block_ms)
        require_int("count", count, at_least=1)
        self._raise_unreported()
        who = (b"GROUP", self._group, self._consumer)
        how = (b"COUNT", count, b"BLOCK", block_ms)
        what = (b"STREAMS", self._stream, b">")
        started = perf_counter()
        reply = self._wire.call(b"XREADGROUP", *who, *how, *what, wait_s=block_ms / 1000)
        seconds = perf_counter() - started
        entries = _entries_of_only_stream(reply)
        self._metrics.read(len(entries), seconds)
        return self._messages(entries)

    def ack(self, msg: QueueMessage) -> None:
        """Settle a message; one that is not pending any more is settled already."""
        settled: int = self._wire.call(b"XACK", self._stream, self._group, msg.id.encode())
        self._metrics.acked(settled)

    def claim_stale(self, min_idle_ms: int, count: int = 10) -> list[QueueMessage]:
        """Take over up to `count` messages that were delivered `min_idle_ms` ago and not acked.

        Best effort: one call looks at a part of the pending list, and the next goes on from there.
        A message that is still being worked on counts as stale too, once it is old enough.
        """
        require_int("min_idle_ms", min_idle_ms, at_least=0)
        require_int("count", count, at_least=1)
        self._raise_unreported()
        stale = self._stale_ids(min_idle_ms, count)
        if not stale:
            return []
        claim = (self._stream, self._group, self._consumer, min_idle_ms)
        reply = self._wire.call(b"XCLAIM", *claim, *stale)
        entries = [entry for entry in reply if entry is not None]
        self._metrics.claimed(len(entries))
        if len(entries) < len(reply):
            claimed = {entry[0] for entry in entries}
            self._settle_deleted(entry_id for entry_id in stale if entry_id not in claimed)
        return self._messages(entries)

    def _create_group(self) -> None:
        try:
            self._wire.call(b"XGROUP", b"CREATE", self._stream, self._group, b"0-0", b"MKSTREAM")
        except QueueError as error:
            if not str(error.__cause__).startswith("BUSYGROUP"):
                raise

    def _messages(self, entries: Iterable[Sequence[Any]]) -> list[QueueMessage]:
        messages = []
        for entry_id, fields in entries:
            try:
                messages.append(QueueMessage(entry_id.decode(), decode(fields)))
            except ValueError as error:
                self._found_malformed(entry_id.decode(), str(error))
        if not messages:
            self._raise_unreported()
        return messages

    def _found_malformed(self, entry_id: str, reason: str) -> None:
        error = MalformedEntryError(self.config.stream_key, entry_id, reason)
        _log.warning("%s", error)  # at once: the process may end before the next call
        self._unreported.append(error)

    def _raise_unreported(self) -> None:
        try:
            error = self._unreported.popleft()
        except IndexError:
            return
        raise error

    def _stale_ids(self, min_idle_ms: int, count: int) -> list[bytes]:
        """Ids that look stale, from where the last call ended to the end, then from the start.

        Going on instead of starting over keeps entries at the head of the pending list, fresh or
        malformed ones, from hiding all others for ever.
        """
        resume = self._scan_from
        self._scan_from = _FIRST
        stale: dict[bytes, None] = {}
        for start, end in ((resume, _LAST), (_FIRST, resume)):
            page_size = max(count, _PENDING_PAGE)
            page = self._wire.call(b"XPENDING", self._stream, self._group, start, end, page_size)
            for entry_id, _consumer, idle_ms, _deliveries in page:
                if idle_ms >= min_idle_ms:
                    stale[entry_id] = None
                if len(stale) == count:
                    self._scan_from = _id_after(entry_id)
                    return list(stale)
            if len(page) == page_size:
                self._scan_from = _id_after(page[-1][0])
                break
            if resume == _FIRST:
                break
        return list(stale)

    def _settle_deleted(self, suspects: Iterable[bytes]) -> None:
        """Ack entries that were deleted while pending; from Redis 7.0 on XCLAIM does it itself."""
        try:
            deleted = [i for i in suspects if not self._wire.call(b"XRANGE", self._stream, i, i)]
            if deleted:
                self._wire.call(b"XACK", self._stream, self._group, *deleted)
                _log.warning(
                    "%d pending entries of stream %r were deleted before they were acked: %s",
                    len(deleted),
                    self.config.stream_key,
                    b", ".join(deleted).decode(),
                )
        except QueueError:  # the messages that were claimed matter more
            _log.warning("could not settle deleted entries", exc_info=True)


def _entries_of_only_stream(reply: Any) -> list[Any]:
    """RESP2 answers with pairs of stream and entries, RESP3 with a map, both with nil for none."""
    if not reply:
        return []
    entries: list[Any] = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    return entries


def _id_after(entry_id: bytes) -> bytes:
    """The smallest id above: ranges that exclude their start came with Redis 6.2 only."""
    milliseconds, sequence = map(int, entry_id.split(b"-"))
    if sequence == _LARGEST_SEQUENCE:
        return b"%d-0" % (milliseconds + 1)
    return b"%d-%d" % (milliseconds, sequence + 1)
