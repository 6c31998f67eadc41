"""Write events to Redis Streams, each once, though Spark may run a task more than once.

A lane adds the rows of one task to one stream.

Two keys belong to it, in the slot of the stream:

- the plan of a query, a hash: which batch is being written, in which run of the query, and the
  last id of the stream before it;
- a fence per partition: how many rows of the batch are in, and their checksum.

Rows are added in slices: WATCH both keys, read them, then MULTI, the rows, the new fence, EXEC. If
another writer of the same partition (a speculative copy, a task that was believed dead, the next
run of the query) changes a watched key, EXEC adds nothing.

    the fence is as we left it           add the slice
    it is ahead of us, in this run       another attempt added rows: skip as many as it counted
    the checksums differ, or the batch   the rows may have come in another order or in other
      was begun by another run           partitions: read what the batch added, skip by event id
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
from hiredis import Reader
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from conquiet.errors import ConfigError, ConquietError, StoreError
from conquiet.redis import ids
from conquiet.redis.connection import Connection, Database, pack
from conquiet.redis.topic import beside
from conquiet.redis.wire import TROUBLE
from conquiet.spark.log.connection import client_of
from conquiet.spark.log.encoder import Entries, RowEncoder, encode_bulk
from conquiet.spark.log.options import WriteOptions

if TYPE_CHECKING:
    import pyarrow as pa

_QUERY_ID = "sql.streaming.queryId"
_RUN_ID = "spark.jobGroup.id"
_BATCH_ID = "streaming.sql.batchId"


def batch_writer(options: Mapping[str, str], schema: Any, overwrite: bool) -> DataSourceArrowWriter:
    """Return the writer of `df.write.format("conquiet")`."""
    if overwrite:
        raise ConfigError(
            "mode('overwrite') is refused: a log is appended to; delete the streams yourself, then"
            " write with mode('append')"
        )
    return _BatchWriter(WriteOptions.of(options), schema.names)


def stream_writer(
    options: Mapping[str, str], schema: Any, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Return the writer of `df.writeStream.format("conquiet")`."""
    if overwrite:
        raise ConfigError("outputMode('complete') is refused: a log is appended to; use 'append'")
    made = WriteOptions.of(options)
    if made.write_id is not None:
        raise ConfigError("option writeId is for batches; a stream is identified by its checkpoint")
    return _StreamWriter(made, schema.names)


@dataclass(slots=True)
class Added(WriterCommitMessage):
    """The result of a task: how many rows it offered."""

    rows: int


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        RowEncoder(columns, options)  # refuses on the driver a frame that no task could write
        self._options = options
        self._columns = columns
        self._job = uuid.uuid4().hex  # one writer is made per job, and copied into its tasks

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Added:
        return _write(
            iterator, self._options, self._columns, _batch_attempt(self._options, self._job)
        )


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        RowEncoder(columns, options)
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Added:
        return _write(iterator, self._options, self._columns, _stream_attempt())


def _write(
    batches: Iterator[pa.RecordBatch], options: WriteOptions, columns: list[str], attempt: Attempt
) -> Added:
    prefix = f"{attempt.query}-{attempt.batch}-{attempt.partition}-"
    rows = RowEncoder(columns, options, prefix)
    task = _Task(attempt, options, named=not rows.makes_ids)
    offered = 0
    try:
        for batch in batches:
            offered += batch.num_rows
            for entries in rows.encode(batch):
                for part in entries.slices(options.slice_rows, options.slice_bytes):
                    task.add(part)
        task.finish()
    finally:
        task.close()
    return Added(offered)


class _Task:
    """The lanes of one task. One slice is in flight while the next is encoded."""

    def __init__(self, attempt: Attempt, options: WriteOptions, named: bool) -> None:
        self._attempt = attempt
        self._options = options
        self._named = named
        self._database = Database(client_of(options.address))
        self._connections: dict[str, Any] = {}
        self._lanes: dict[str, Lane] = {}
        self._in_flight: tuple[Lane, Entries] | None = None

    def add(self, entries: Entries) -> None:
        self._settle()
        lane = self._lane(entries.stream)
        if lane.offer(entries):
            self._in_flight = (lane, entries)

    def finish(self) -> None:
        self._settle()
        for lane in self._lanes.values():
            lane.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _settle(self) -> None:
        if self._in_flight is None:
            return
        (lane, entries), self._in_flight = self._in_flight, None
        while not lane.confirm():
            if not lane.offer(entries):
                return

    def _lane(self, stream: str) -> Lane:
        lane = self._lanes.get(stream)
        if lane is None:
            # One slice is in flight, so one connection is enough; in a cluster, one per stream.
            name = stream if self._database.is_cluster else ""
            if name not in self._connections:
                self._connections[name] = connect_to(self._database, stream)
            connection = self._connections[name]
            lane = Lane(connection, stream, self._attempt, self._options, self._named)
            self._lanes[stream] = lane
        return lane


# --- attempts -------------------------------------------------------------------------------


def _stream_attempt() -> Attempt:
    task = _task()
    query, batch = (task.getLocalProperty(name) for name in (_QUERY_ID, _BATCH_ID))
    run = task.getLocalProperty(_RUN_ID)
    if query is None or batch is None or run is None:
        raise ConfigError(
            "this version of Spark does not say to its tasks which micro-batch they write, so a"
            " repeated one cannot be recognised; use foreachBatch and option writeId"
        )
    return Attempt(query, run, int(batch), task.partitionId(), task.taskAttemptId())


def _batch_attempt(options: WriteOptions, job: str) -> Attempt:
    task = _task()
    return Attempt(options.write_id or job, job, 0, task.partitionId(), task.taskAttemptId())


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark calls a writer inside a task"
    return task


# --- lanes ------------------------------------------------------------------------------------

_PAGE_ENTRIES = 1_000

# KEYS plan. ARGV batch, run, last id of the stream, seconds to live.
# Returns 1 if rows of the batch may have been added already, and the id after which they are.
_BEGIN = b"""
local plan = redis.call('HMGET', KEYS[1], 'batch', 'run', 'start', 'begun')
local batch = tonumber(plan[1])
if batch and batch > tonumber(ARGV[1]) then return {-1, plan[1]} end
if batch ~= tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'batch', ARGV[1], 'run', ARGV[2], 'start', ARGV[3], 'begun', '0')
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  return {0, ARGV[3]}
end
if plan[2] ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'run', ARGV[2], 'begun', '1')
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  return {1, plan[3]}
end
return {tonumber(plan[4]), plan[3]}
"""

# The last row is added together with the fence: XADD is refused because of the type of its key, so
# if this one is accepted, all before it were. KEYS stream, fence. ARGV fence, seconds, id, fields.
_LAST = b"""
redis.call('XADD', KEYS[1], ARGV[3], unpack(ARGV, 4))
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
"""


class Superseded(ConquietError):
    """A later batch or another run of the query writes here; this attempt must not go on."""


class NotRepeatable(ConquietError):
    """An attempt had other rows than the one before it, and the added ones cannot be recognised."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one partition of one batch."""

    query: str
    run: str
    batch: int
    partition: int
    task: int


@dataclass(frozen=True, slots=True)
class Mark:
    """How many rows were added, and their checksum."""

    rows: int = 0
    checksum: int = 0

    def after(self, entries: Entries, count: int) -> Mark:
        return Mark(self.rows + count, zlib.crc32(entries.pack(0, count), self.checksum))


class Lane:
    """Adds the rows of one attempt to one stream."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        attempt: Attempt,
        options: WriteOptions,
        named: bool,
    ) -> None:
        self._connection = connection
        self._attempt = attempt
        self._options = options
        self._named = named
        """Whether the rows have ids of their own."""
        self.stream = stream
        self._key = stream.encode()
        self._plan = f"{beside(stream, 'conquiet:fence:')}:{attempt.query}".encode()
        self._fence = b"%b:%d" % (self._plan, attempt.partition)
        self._at = Mark()
        self._next = Mark()
        self._sent = 0
        self._left: bytes | None = None
        """The fence as this attempt last read or wrote it."""
        self._known: dict[bytes, int] | None = None
        self._seen_upto = b"0-0"
        self._begin()

    # --- one slice --------------------------------------------------------------------------

    def offer(self, entries: Entries) -> bool:
        """Send the rows of a slice that were not added yet; return False if there are none."""
        fence = self._look()
        choose = self._by_count if self._known is None else self._by_id
        missing = choose(entries, fence)
        if not len(missing):
            return False
        self._send(missing)
        return True

    def confirm(self) -> bool:
        """Receive the outcome; return False if another attempt wrote, and nothing was added."""
        *queued, outcome = self._receive(self._sent + 2)
        self._connection.end_watch()
        for reply in (*queued, *(outcome if isinstance(outcome, list) else (outcome,))):
            if isinstance(reply, Exception):
                raise StoreError(f"stream {self.stream!r}: Redis refused an entry: {reply}")
        if outcome is None:
            return False
        self._at = self._next
        self._left = self._value(self._at)
        return True

    def close(self) -> None:
        """Check that there were as many rows as an earlier attempt has added."""
        if self._known is None and self._at.rows < _mark(self._left or b"", self._attempt).rows:
            raise self._mistrust("fewer rows")

    def _by_count(self, entries: Entries, fence: bytes) -> Entries:
        there = _mark(fence, self._attempt)
        if there.rows < self._at.rows:
            raise StoreError(
                f"the fence {self._fence.decode()!r} is gone: was Redis emptied, or does it evict"
                " keys? Set maxmemory-policy to noeviction"
            )
        self._left = fence
        skipped = min(there.rows - self._at.rows, len(entries))
        if skipped:
            self._at = self._at.after(entries, skipped)
        if self._at.rows == there.rows and self._at.checksum != there.checksum:
            raise self._mistrust("other rows")
        missing = entries.slice(skipped)
        self._next = self._at.after(missing, len(missing))
        return missing

    def _by_id(self, entries: Entries, fence: bytes) -> Entries:
        known = self._known
        assert known is not None
        if fence != self._left:
            self._read_back()
            self._left = fence
        places = []
        for place, identity in enumerate(entries.identities.to_pylist()):
            checksum = known.get(identity)
            if checksum is None:
                places.append(place)
            elif not self._named and checksum != zlib.crc32(self._fields(entries, place)):
                raise NotRepeatable(
                    f"stream {self.stream!r}: row {identity.decode(errors='replace')!r} differs"
                    " from the one that an earlier attempt added: give the rows an event_id of"
                    " their own, or the same order and partitions at each attempt"
                )
        self._next = self._at.after(entries, len(entries))
        if len(places) == len(entries):
            return entries
        if not places:
            self._at = self._next
        return entries.take(places)

    def _mistrust(self, what: str) -> ConquietError:
        """Make the next attempt compare ids: the rows that this one skipped may be missing."""
        self._exchange([(b"HSET", self._plan, b"begun", b"1")])
        return NotRepeatable(
            f"stream {self.stream!r}: this attempt has {what} than the one before it; the next"
            " compares the ids of the rows instead of their order"
        )

    # --- Redis ------------------------------------------------------------------------------

    def _begin(self) -> None:
        attempt = self._attempt
        [last] = self._exchange([(b"XREVRANGE", self._key, b"+", b"-", b"COUNT", 1)])
        start = last[0][0] if last else b"0-0"
        seconds = self._options.fence_seconds
        begin = (b"EVAL", _BEGIN, 1, self._plan, attempt.batch, attempt.run, start, seconds)
        [(state, about)] = self._exchange([begin])
        if state < 0:
            raise self._late_error(f"batch {about.decode()}")
        if state:
            self._known = {}
            self._seen_upto = about

    def _look(self) -> bytes:
        """Watch and read the fence; raise if this attempt must not write any more."""
        self._connection.begin_watch()
        _, (batch, run), fence = self._exchange(
            [
                (b"WATCH", self._plan, self._fence),
                (b"HMGET", self._plan, b"batch", b"run"),
                (b"GET", self._fence),
            ]
        )
        mine = (str(self._attempt.batch).encode(), self._attempt.run.encode())
        if (batch, run) != mine:
            raise self._late_error(
                f"batch {(batch or b'?').decode()}, run {(run or b'?').decode()}"
            )
        return fence or b""

    def _send(self, missing: Entries) -> None:
        last = len(missing) - 1
        fields = self._fields(missing, last)
        arguments = (
            b"EVAL", _LAST, 2, self._key, self._fence, self._value(self._next),
            self._options.fence_seconds, self._options.entry_id,
        )  # fmt: skip
        count = len(arguments) + missing.counts[last].as_py()
        script = b"*%d\r\n" % count + pack(arguments).split(b"\r\n", 1)[1]
        self._sent = len(missing)
        wholes = (pack((b"MULTI",)), missing.pack(0, last), script, fields, pack((b"EXEC",)))
        try:
            self._connection.send(wholes)  # type: ignore[arg-type]
        except TROUBLE as error:
            raise self._unreachable(error) from error

    def _receive(self, count: int) -> list[Any]:
        try:
            return receive(self._connection, count)
        except TROUBLE as error:
            raise self._unreachable(error) from error

    def _exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            replies = self._connection.exchange([pack(command) for command in commands])
        except TROUBLE as error:
            raise self._unreachable(error) from error
        for reply in replies:
            if isinstance(reply, Exception):
                raise StoreError(f"stream {self.stream!r}: {reply}") from reply
        return replies

    def _read_back(self) -> None:
        """Read the entries added since the batch began, by this query and by others."""
        assert self._known is not None
        while True:
            start = ids.next_after(self._seen_upto)
            [page] = self._exchange([(b"XRANGE", self._key, start, b"+", b"COUNT", _PAGE_ENTRIES)])
            for entry_id, fields in page:
                self._seen_upto = entry_id
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                identity = b"%b %b" % (named.get(b"source", b""), named.get(b"id", b""))
                self._known[identity] = zlib.crc32(b"".join(encode_bulk(item) for item in fields))
            if len(page) < _PAGE_ENTRIES:
                return

    def _fields(self, entries: Entries, place: int) -> memoryview:
        """Return the names and values of a command, without the words before them."""
        count = b"*%d\r\n" % (entries.counts[place].as_py() + 3)
        head = encode_bulk(b"XADD") + encode_bulk(self._key) + encode_bulk(self._options.entry_id)
        return entries.pack(place, place + 1)[len(count) + len(head) :]

    def _value(self, mark: Mark) -> bytes:
        attempt = self._attempt
        text = f"{attempt.run} {attempt.batch} {mark.rows} {mark.checksum} {attempt.task}"
        return text.encode()

    def _late_error(self, by: str) -> Superseded:
        return Superseded(
            f"stream {self.stream!r}: {by} of query {self._attempt.query} is being written; this"
            f" late attempt of batch {self._attempt.batch}, run {self._attempt.run}, adds nothing"
        )

    def _unreachable(self, error: Exception) -> StoreError:
        return StoreError(f"Redis cannot be reached while {self.stream!r} is written: {error}")


def _mark(fence: bytes, attempt: Attempt) -> Mark:
    """Read a fence; one of another batch or run counts as no rows."""
    run, batch, rows, checksum, *_ = (*fence.decode().split(), "", "", "", "")
    if (run, batch) != (attempt.run, str(attempt.batch)):
        return Mark()
    return Mark(int(rows), int(checksum))


def connect_to(database: Database, stream: str) -> Connection:
    """Return a connection to the node of a stream."""
    return database.connect(database.slot(stream.encode()) if database.is_cluster else None)


_RECEIVE_BYTES = 1 << 16


def receive(connection: Connection, count: int) -> list[Any]:
    """Receive thousands of short replies as `Connection.receive` does, at a tenth of its cost.

    The connection must owe no other replies.
    """
    socket = connection._connection._sock
    reader = Reader(replyError=redis.ResponseError)
    replies: list[Any] = []
    try:
        while len(replies) < count:
            received = socket.recv(_RECEIVE_BYTES)
            if not received:
                raise redis.ConnectionError("Redis closed the connection")
            reader.feed(received)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    except BaseException:
        connection.drop()  # replies in flight must not be taken for those of another command
        raise
    return replies
