"""Fetch ranges of entries from Redis, one reply ahead of their consumer."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import hiredis
import numpy as np
import redis
from hiredis import pack_command

from conquiet.errors import StoreError
from conquiet.redis import ids
from conquiet.redis.wire import TROUBLE, Wire
from conquiet.spark.log.connection import PAUSES_SECONDS, ask, pool_of
from conquiet.spark.log.options import MAX_BYTES_PER_BATCH
from conquiet.spark.log.ranges import EntryRange
from conquiet.spark.log.resp import Table, locate

logger = logging.getLogger("conquiet.spark")

Entries: TypeAlias = list[tuple[bytes, list[bytes] | None]]


class Oversized(NamedTuple):
    """An entry that is larger than a reply may be, and whose fields were not read."""

    id: bytes
    size: int
    """In bytes, as Redis sends it."""


Found: TypeAlias = tuple[str, Table | Entries | Oversized]
"""A stream and entries of it: a table into a buffer that is valid until the next, or a list."""

_REPLY_BYTES = 2 << 20
"""Wanted size of a reply: large enough for calls of numpy, small enough for a CPU cache."""
_FIRST_COUNT, _MOST_COUNT = 16, 16_000
"""Entries of a page. The first page is small: the size of the entries is not known yet, and Redis
builds a reply in memory before it sends it."""
_SHRINK = 16
"""The factor by which a page becomes smaller whose reply was too large."""
_SMALL = 64
"""Ranges of so few entries are requested together, and their entries decoded one by one."""
_TOGETHER = 2_000
_TAIL_BYTES = 64 << 10
"""The end of a reply, in which its last id is searched."""
_TRANSIENT = ("LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "BUSY", "MOVED", "ASK")

_LEAST_BYTES = 1 << 20
_RECEIVE_BYTES = 1 << 20
_HEAD_BYTES = 4096
_pack: Any = pack_command  # its stub allows commands of one word only

_id = re.compile(rb"\d+-\d+")
_first_entry = re.compile(rb"\*1\r\n\*2\r\n\$\d+\r\n(\d+-\d+)\r\n")


class Refused(Exception):
    """Redis replied with an error."""


class ReplyTooLarge(Exception):
    """A reply exceeds the bound; the connection still has to receive the rest of it."""

    def __init__(self, head: bytes) -> None:
        super().__init__("the reply is too large")
        self.head = head
        """Its first bytes."""


class RangeReader:
    """Reads ranges in their order, and resumes after a broken connection."""

    def __init__(
        self,
        client: Any,
        report_missing: Callable[[EntryRange, int], None],
        max_bytes: int = MAX_BYTES_PER_BATCH,
    ) -> None:
        self._wire = Wire(client)
        self._max_bytes = max_bytes
        """The bound of a reply. A page that exceeds it is read again in smaller pages."""
        self._report_missing = report_missing
        """Called with a range that has fewer entries than it must have."""
        self._count = _FIRST_COUNT
        self._first_count = _FIRST_COUNT
        """Entries of the first page of the next range; fewer after a reply that was too large."""
        self._most_together = _TOGETHER
        """Entries of small ranges that are requested together; 0 after such a reply."""
        self._mark = b""
        """The bytes after the ids of the last reply, by which the last id of the next is found."""

    def read(self, ranges: Iterable[EntryRange]) -> Iterator[Found]:
        left = deque(ranges)
        failures = 0
        while left:
            try:
                for found in self._from_node(left):
                    yield found
                    failures = 0
            except ReplyTooLarge:  # the entries are read again, fewer at a time
                logger.debug("stream %r: reading in pages of %d", left[0].stream, self._first_count)
            except (*TROUBLE, Refused, redis.ResponseError) as error:
                if failures == len(PAUSES_SECONDS) or not _is_transient(error):
                    raise StoreError(
                        f"stream {left[0].stream!r} cannot be read after {left[0].after}: {error}"
                    ) from error
                logger.warning("reading stream %r again: %s", left[0].stream, error)
                time.sleep(PAUSES_SECONDS[failures])
                failures += 1
                if self._wire.is_cluster:
                    self._wire.learn_topology()

    def _from_node(self, left: deque[EntryRange]) -> Iterator[Found]:
        """Read up to the first range that another node of the cluster has."""
        pool = self._pool(left[0])
        line = Line(pool)
        try:
            while left and self._pool(left[0]) is pool:
                if self._is_small(left[0]):
                    for found in self._read_several(line, self._choose(left, pool)):
                        yield found
                        left.popleft()  # each by itself: the next one may be refused
                    continue
                whole = left[0]
                for entries, last_id, got in self._read_pages(line, whole):
                    yield whole.stream, entries
                    rest = None if whole.entries is None else max(0, whole.entries - got)
                    left[0] = whole._replace(after=last_id, entries=rest)
                left.popleft()
        finally:
            line.close()

    def _pool(self, entry_range: EntryRange) -> Any:
        return pool_of(self._wire.client, entry_range.stream)

    # --- small ranges -----------------------------------------------------------------------

    def _choose(self, left: Iterable[EntryRange], pool: Any) -> list[EntryRange]:
        """Choose small ranges to request together."""
        chosen: list[EntryRange] = []
        entries = 0
        for one in left:
            if (
                entries >= self._most_together
                or not self._is_small(one)
                or self._pool(one) is not pool
            ):
                break
            chosen.append(one)
            entries += max(1, one.entries or 0)
        return chosen

    def _read_several(self, line: Line, ranges: list[EntryRange]) -> Iterator[Found]:
        line.send([_xrange(one) for one in ranges])
        try:
            content = line.receive(self._max_bytes)
        except ReplyTooLarge:
            self._most_together = 0
            raise
        reader = hiredis.Reader()
        reader.feed(bytes(content))
        replies = [reader.gets() for _ in ranges]
        for one, entries in zip(ranges, replies, strict=True):
            if isinstance(entries, Exception):
                raise Refused(str(entries))
            self._check_complete(one, len(entries))
            yield one.stream, entries

    # --- large ranges -----------------------------------------------------------------------

    def _read_pages(
        self, line: Line, whole: EntryRange
    ) -> Iterator[tuple[Table | Entries | Oversized, str, int]]:
        """Yield the entries of each reply, the id of its last, and the number of entries so far."""
        # Small at first: entries of this stream may be much larger than those of the last.
        asked, got = self._first_count, 0
        self._count, self._first_count = asked, _FIRST_COUNT
        line.send([_xrange(whole, asked)])
        while True:
            try:
                content = line.receive(self._max_bytes)
            except ReplyTooLarge as reply:
                if asked > 1:
                    self._first_count = max(1, asked // _SHRINK)
                    raise
                oversized = _skip_oversized(reply, line)
                got += 1
                last_id = oversized.id.decode()
                yield oversized, last_id, got
                if last_id == whole.until:
                    break
                line.send([_xrange(whole._replace(after=last_id), asked)])
                continue
            count, start = _header(content)
            if not count:
                break
            self._adapt(count, len(content))
            ahead = self._guess_last_id(content) if count == asked else ""
            if ahead:
                asked = self._count
                line.send([_xrange(whole._replace(after=ahead), asked)])
            found, last_id = self._parse(content, count, start)
            got += count
            yield found, last_id, got
            is_end = (not ahead and count < asked) or last_id == whole.until
            if ahead and (is_end or ahead != last_id):
                line.skip()  # the guess was wrong: a value looked like the end of an id
                ahead = ""
            if is_end:
                break
            if not ahead:
                asked = self._count
                line.send([_xrange(whole._replace(after=last_id), asked)])
        self._check_complete(whole, got)

    def _guess_last_id(self, content: memoryview) -> str:
        """Return the last id of a reply by the bytes that follow ids, or nothing."""
        if not self._mark:
            return ""
        tail = bytes(content[-_TAIL_BYTES:])
        end = tail.rfind(self._mark)
        start = tail.rfind(b"\n", 0, max(end, 0)) + 1
        entry_id = tail[start:end] if 0 < start < end else b""
        return entry_id.decode() if _id.fullmatch(entry_id) else ""

    def _parse(self, content: memoryview, count: int, start: int) -> tuple[Table | Entries, str]:
        table = locate(np.frombuffer(content, np.uint8), count, start)
        if table is not None:
            last = max(table.groups, key=lambda group: int(group.rows[-1]))
            self._mark = b"\r\n*%d\r\n" % (2 * len(last.names))
            at, end = last.starts[0][-1], last.ends[0][-1]
            return table, content[at:end].tobytes().decode()
        reader = hiredis.Reader()
        reader.feed(bytes(content))
        entries: Entries = [entry for entry in reader.gets() if entry]
        return entries, entries[-1][0].decode()

    def _adapt(self, count: int, size: int) -> None:
        fitting = _REPLY_BYTES * count // max(1, size)
        self._count = max(1, min(fitting, _MOST_COUNT, 16 * self._count))

    def _is_small(self, entry_range: EntryRange) -> bool:
        entries = entry_range.entries
        return self._most_together > 0 and entries is not None and entries <= _SMALL

    def _check_complete(self, entry_range: EntryRange, got: int) -> None:
        if entry_range.entries is not None:
            if got < entry_range.entries:
                self._report_missing(entry_range, got)
        elif entry_range.first is not None and ids.parse(
            self._first_id(entry_range.stream)
        ) > ids.parse(entry_range.first):
            self._report_missing(entry_range, got)

    def _first_id(self, stream: str) -> bytes:
        """Return the first id that a stream still has."""
        key = stream.encode()
        [page] = ask(self._wire, [(key, (b"XRANGE", key, b"-", b"+", b"COUNT", 1))])
        if isinstance(page, Exception):
            raise Refused(str(page))
        return page[0][0] if page else ids.MAX


def _skip_oversized(reply: ReplyTooLarge, line: Line) -> Oversized:
    """Return the one entry of a reply that is too large, and receive the rest of it."""
    found = _first_entry.match(reply.head)
    if found is None:
        raise Refused(reply.head[:100].decode(errors="replace"))
    return Oversized(found[1], line.skip())


def _xrange(entry_range: EntryRange, count: int = 0) -> list[bytes | int]:
    after = ids.next_after(entry_range.after.encode())
    limit = (b"COUNT", count) if count else ()
    return [b"XRANGE", entry_range.stream.encode(), after, entry_range.until.encode(), *limit]


def _header(content: memoryview) -> tuple[int, int]:
    """Return how many entries a reply has, and where the first begins."""
    line, _, _ = bytes(content[:1_000]).partition(b"\r\n")
    if line[:1] != b"*":
        raise Refused(line[1:].decode(errors="replace"))
    return int(line[1:]), len(line) + 2


def _is_transient(error: Exception) -> bool:
    return isinstance(error, TROUBLE) or str(error).startswith(_TRANSIENT)


class Line:
    """Sends commands and receives their replies as raw bytes, into a buffer that is reused.

    A reply does not say how long it is, and finding its end would mean parsing it. So each group
    of commands is followed by a PING with a random word, and the replies are complete when the
    last bytes received are that word.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection = pool.get_connection()
        self._socket = self._connection._sock
        self._buffer = bytearray(_LEAST_BYTES)
        word = secrets.token_hex(16).encode()
        self._ping = _pack((b"PING", word))
        self._end = b"$%d\r\n%s\r\n" % (len(word), word)
        self._owed = 0
        """Groups of replies that were not received yet."""
        self._used = 0
        """Bytes that were received of a reply that is too large."""
        self._check_ping()

    def _check_ping(self) -> None:
        """Check that the user may PING: otherwise no reply would ever end."""
        self._socket.sendall(self._ping)
        self._owed = 1
        said = b""
        while not said.endswith(b"\r\n") or (said[:1] == b"$" and said != self._end):
            said += self._more(self._socket.recv(1024))
        self._owed = 0
        if said != self._end:
            self.close()
            raise redis.ResponseError(said[1:].decode(errors="replace").strip())

    def send(self, commands: Sequence[Sequence[bytes | int]]) -> None:
        packed = [_pack(tuple(command)) for command in commands]
        self._owed += 1
        self._socket.sendall(b"".join([*packed, self._ping]))

    def receive(self, max_bytes: int) -> memoryview:
        """Return the replies to the oldest group; the bytes are valid until the next call.

        Raise `ReplyTooLarge` past `max_bytes`; then `skip` the rest, or close the line.
        """
        used = 0
        end = self._end
        while True:
            if used > max_bytes + len(end):
                self._used = used
                raise ReplyTooLarge(bytes(self._buffer[:_HEAD_BYTES]))
            if len(self._buffer) - used < _RECEIVE_BYTES:
                self._grow(used)
            with memoryview(self._buffer) as view:
                used += self._more(self._socket.recv_into(view[used:]))
            if used >= len(end) and self._buffer[used - len(end) : used] == end:
                self._owed -= 1
                return memoryview(self._buffer)[: used - len(end)]

    def skip(self) -> int:
        """Receive the rest of the replies to the oldest group; return their size in bytes."""
        size, self._used = self._used, 0
        tail = bytes(self._buffer[max(0, size - len(self._end)) : size])
        while tail != self._end:
            with memoryview(self._buffer) as view:
                got = self._more(self._socket.recv_into(view[:_RECEIVE_BYTES]))
            size += got
            tail = (tail + bytes(self._buffer[max(0, got - len(self._end)) : got]))[
                -len(self._end) :
            ]
        self._owed -= 1
        return size - len(self._end)

    def _grow(self, used: int) -> None:
        # A new buffer: arrays may still refer to the old one.
        grown = bytearray(2 * len(self._buffer))
        grown[:used] = self._buffer[:used]
        self._buffer = grown

    @staticmethod
    def _more(received: Any) -> Any:
        if not received:
            raise redis.ConnectionError("Redis closed the connection")
        return received

    def close(self) -> None:
        """Give the connection back, or close it if replies are still to come."""
        if self._owed:
            self._connection.disconnect()
        self._pool.release(self._connection)
