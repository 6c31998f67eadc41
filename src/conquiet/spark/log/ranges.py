"""Ranges: reads pieces of streams from Redis, one reply ahead of whoever uses them."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import hiredis
import numpy as np
import redis

from conquiet.errors import StoreError
from conquiet.redis.ids import next_after
from conquiet.redis.wire import TROUBLE, Wire
from conquiet.spark.log.asking import PAUSES_SECONDS, ask
from conquiet.spark.log.connection import pool_of
from conquiet.spark.log.line import Line
from conquiet.spark.log.piece import LARGEST, Piece, id_of, parts
from conquiet.spark.log.resp import Table, locate

logger = logging.getLogger("conquiet.spark")

Entries: TypeAlias = list[tuple[bytes, list[bytes] | None]]
Found: TypeAlias = tuple[str, Table | Entries]
"""A stream, and entries of it: their places in a buffer that is good until the next, or as such."""

_REPLY_BYTES = 2 << 20
"""How large a reply should be: worth the calls of numpy, and not too large for a cache."""
_FIRST_COUNT, _MOST_COUNT = 250, 16_000
_LARGEST_TABLE = (1 << 31) - 1
"""Offsets into a reply have 32 bits."""
_SMALL = 64
"""Pieces of so few entries are asked for together, and their entries taken one by one."""
_TOGETHER = 2_000
_TAIL_BYTES = 64 << 10
"""Where the last id of a reply is looked for."""
_FOR_NOW = ("LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "BUSY", "MOVED", "ASK")


_id = re.compile(rb"\d+-\d+")


class Refused(Exception):
    """Redis answered with an error."""


class Ranges:
    """Reads pieces in their order, and goes on after a broken connection where it was."""

    def __init__(self, client: Any, short: Callable[[Piece, int], None]) -> None:
        self._wire = Wire(client)
        self._short = short
        """Told of a piece that has fewer entries than it should."""
        self._count = _FIRST_COUNT
        self._mark = b""
        """What follows the id of an entry, in the last reply: to find the last id of the next."""

    def read(self, pieces: Iterable[Piece]) -> Iterator[Found]:
        left = deque(pieces)
        failures = 0
        while left:
            try:
                for found in self._from_node(left):
                    yield found
                    failures = 0
            except (*TROUBLE, Refused, redis.ResponseError) as error:
                if failures == len(PAUSES_SECONDS) or not _may_pass(error):
                    raise StoreError(
                        f"stream {left[0].stream!r} cannot be read after {left[0].after}: {error}"
                    ) from error
                logger.warning("reading stream %r again: %s", left[0].stream, error)
                time.sleep(PAUSES_SECONDS[failures])
                failures += 1
                if self._wire.is_cluster:
                    self._wire.learn_topology()

    def _from_node(self, left: deque[Piece]) -> Iterator[Found]:
        """Everything, up to the first piece that another node of the cluster has."""
        pool = self._pool(left[0])
        line = Line(pool)
        try:
            while left and self._pool(left[0]) is pool:
                if _is_small(left[0]):
                    for found in self._several(line, self._choose(left, pool)):
                        yield found
                        left.popleft()  # each by itself: the next one may be refused
                    continue
                piece = left[0]
                for entries, last_id, got in self._large(line, piece):
                    yield piece.stream, entries
                    rest = None if piece.entries is None else max(0, piece.entries - got)
                    left[0] = piece._replace(after=last_id, entries=rest)
                left.popleft()
        finally:
            line.close()

    def _pool(self, piece: Piece) -> Any:
        return pool_of(self._wire.client, piece.stream)

    # --- small pieces -----------------------------------------------------------------------

    def _choose(self, left: Iterable[Piece], pool: Any) -> list[Piece]:
        """Small pieces to ask for together."""
        chosen: list[Piece] = []
        entries = 0
        for piece in left:
            if entries >= _TOGETHER or not _is_small(piece) or self._pool(piece) is not pool:
                break
            chosen.append(piece)
            entries += max(1, piece.entries or 0)
        return chosen

    def _several(self, line: Line, pieces: list[Piece]) -> Iterator[Found]:
        line.send([_xrange(piece) for piece in pieces])
        reader = hiredis.Reader()
        reader.feed(bytes(line.receive()))
        replies = [reader.gets() for _ in pieces]
        for piece, entries in zip(pieces, replies, strict=True):
            if isinstance(entries, Exception):
                raise Refused(str(entries))
            self._compare(piece, len(entries))
            yield piece.stream, entries

    # --- large pieces -----------------------------------------------------------------------

    def _large(self, line: Line, piece: Piece) -> Iterator[tuple[Table | Entries, str, int]]:
        """Entries reply by reply, each with the id of its last, and how many there were so far."""
        # Small at first: entries of this stream may be much larger than those of the last.
        asked, got = _FIRST_COUNT, 0
        self._count = _FIRST_COUNT
        line.send([_xrange(piece, asked)])
        while True:
            content = line.receive()
            count, start = _header(content)
            if not count:
                break
            self._adapt(count, len(content))
            ahead = self._guess(content) if count == asked else ""
            if ahead:
                asked = self._count
                line.send([_xrange(piece._replace(after=ahead), asked)])
            found, last_id = self._parse(content, count, start)
            got += count
            yield found, last_id, got
            is_end = (not ahead and count < asked) or last_id == piece.until
            if ahead and (is_end or ahead != last_id):
                line.receive()  # a value looked like the end of an id
                ahead = ""
            if is_end:
                break
            if not ahead:
                asked = self._count
                line.send([_xrange(piece._replace(after=last_id), asked)])
        self._compare(piece, got)

    def _guess(self, content: memoryview) -> str:
        """The last id of a reply, by what stood behind the ids of the one before, or nothing."""
        if not self._mark:
            return ""
        tail = bytes(content[-_TAIL_BYTES:])
        end = tail.rfind(self._mark)
        start = tail.rfind(b"\n", 0, max(end, 0)) + 1
        entry_id = tail[start:end] if 0 < start < end else b""
        return entry_id.decode() if _id.fullmatch(entry_id) else ""

    def _parse(self, content: memoryview, count: int, start: int) -> tuple[Table | Entries, str]:
        if len(content) <= _LARGEST_TABLE:
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

    def _compare(self, piece: Piece, got: int) -> None:
        if piece.entries is not None:
            if got < piece.entries:
                self._short(piece, got)
        elif piece.first is not None and parts(self._front(piece)) > parts(piece.first):
            self._short(piece, got)

    def _front(self, piece: Piece) -> str:
        """The first entry that its stream still has."""
        key = piece.stream.encode()
        [page] = ask(self._wire, [(key, (b"XRANGE", key, b"-", b"+", b"COUNT", 1))])
        if isinstance(page, Exception):
            raise Refused(str(page))
        return page[0][0].decode() if page else id_of(LARGEST, LARGEST)


def _is_small(piece: Piece) -> bool:
    return piece.entries is not None and piece.entries <= _SMALL


def _xrange(piece: Piece, count: int = 0) -> list[bytes | int]:
    after, limit = next_after(piece.after.encode()), (b"COUNT", count) if count else ()
    return [b"XRANGE", piece.stream.encode(), after, piece.until.encode(), *limit]


def _header(content: memoryview) -> tuple[int, int]:
    """How many entries a reply has, and where the first begins."""
    line, _, _ = bytes(content[:1_000]).partition(b"\r\n")
    if line[:1] != b"*":
        raise Refused(line[1:].decode(errors="replace"))
    return int(line[1:]), len(line) + 2


def _may_pass(error: Exception) -> bool:
    return isinstance(error, TROUBLE) or str(error).startswith(_FOR_NOW)
