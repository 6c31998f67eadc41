"""Consumer: what one consumer of a group holds, from its delivery to its ack.

    XREADGROUP > ──▶ held ──ack──▶ XACK (an outbox: XACK + XDEL)
       XCLAIM  ──▶    │ nack: stays held, redelivered later (see `redelivery`)
                      │ release: claimable by other consumers at once
                      └ crash: claimable by other consumers when the lease has ended

Times are differences of the monotonic clock here and idle times of the server there; the wall
clock is never used.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import redis

from conquiet import bridge
from conquiet.errors import StoreError
from conquiet.message import printable
from conquiet.redis.group import (
    ATTEMPTS,
    ENTRY,
    ERRORS,
    IDLE_SECONDS,
    TURN,
    GroupStream,
    Pending,
    Start,
)
from conquiet.redis.ids import FIRST, LAST, MIN, next_after, parse
from conquiet.redis.wire import Argument, Command, Wire, entries_by_stream, may_pass

logger = logging.getLogger("conquiet.redis")

PAGE = 500
"""Lines of XPENDING per command."""
_PAGES_PER_READ = 20
"""Pages of a pending list per read; a longer list is scanned between reads."""
_POLL_SECONDS = 0.02
_SPARE = 1_000
"""How many other pending entries may lie between those that XPENDING is asked about."""
_UNREAD_SECONDS = 0.002
"""If no read waits for so long, entries may have been added and trimmed in between."""
_REMOVE_IDLE_SECONDS = 3_600.0
_REMOVE_IDLE_NAMES = 1_000
"""How often, and how many at once, names of idle consumers are removed."""


class Delivery:
    """One delivered entry; the token of its message's acking."""

    __slots__ = ("deliveries", "fields", "id", "is_acked", "nacks", "stream", "touched")

    def __init__(
        self, stream: GroupStream, id: bytes, fields: list[bytes], deliveries: int, touched: float
    ) -> None:
        self.stream = stream
        self.id = id
        self.fields = fields
        self.deliveries = deliveries
        self.touched = touched
        """When its idle time was last restarted, by the monotonic clock."""
        self.nacks = 0
        """How often it was nacked and had to pause; sets the length of the next pause."""
        self.is_acked = False
        """Whether the EXEC of a transaction on the same server acked it: no XACK is needed."""

    @property
    def place(self) -> tuple[int, int, bytes]:
        """Sort key over all streams: by id, which begins with the time."""
        return (*parse(self.id), self.stream.key)

    @property
    def attempts_before(self) -> int:
        """How often the message was delivered before it waited for a later try."""
        return int(self._field(ATTEMPTS) or 0)

    @property
    def errors(self) -> str | None:
        """The errors of attempts before it waited, as `conquiet.attempts` writes them."""
        stored = self._field(ERRORS)
        return None if stored is None else stored.decode(errors="replace")

    @property
    def origin(self) -> tuple[str, str]:
        """The stream that the message came from, and the id of its entry there."""
        return self.stream.origin, (self._field(ENTRY) or self.id).decode()

    @property
    def turn(self) -> bytes | None:
        """The turn of an entry that has waited in an ordered worker (`delay`)."""
        return self._field(TURN)

    def _field(self, name: bytes) -> bytes | None:
        if self.stream.origin == self.stream.name:
            return None
        names = self.fields[::2]
        return self.fields[2 * names.index(name) + 1] if name in names else None

    def renew(self, now: float) -> None:
        """Note that the idle time was restarted."""
        self.touched = now

    def restart(self, deliveries: int, now: float) -> None:
        """Begin the delivery with this count."""
        self.deliveries = deliveries
        self.touched = now

    def count_nack(self) -> None:
        self.nacks += 1

    def mark_acked(self) -> None:
        self.is_acked = True

    def __repr__(self) -> str:
        return f"<{self.stream.name} {self.id.decode()} delivery {self.deliveries}>"


class Consumer:
    """Reads, claims, renews and acks the entries of one consumer, over all its streams.

    Invariants:

    - Only this class adds and removes held entries. An entry is held from the reply that delivered
      it until it is acked, found to belong to another consumer, or released.
    - A held entry has one `Delivery`. A delivery that is not held any more is stale: renewing,
      redelivering and nacking it do nothing.
    - A held entry is never claimed by this consumer, however long it takes.
    - An entry whose ack could not be sent stays held until the ack is sent.

    One thread or task at a time reads; acks and renewals may come from any. Reads append to the
    caller's list, so that entries of a first command are not lost if a later command fails.
    """

    def __init__(
        self,
        wire: Wire,
        streams: Sequence[GroupStream],
        start: Start,
        lease: float,
        claim_interval: float,
        *,
        resumes: bool,
    ) -> None:
        self.streams = list(streams)
        self.lease = lease
        self.claimed = 0
        """Entries claimed from consumers that let their lease end."""
        self.deleted = 0
        """Entries that were deleted from their stream before they were acked, or even read."""
        self._held: dict[GroupStream, dict[bytes, Delivery]] = {s: {} for s in streams}
        # Where to read our own pending entries from. A made-up name has none from before.
        self._own_from: dict[GroupStream, bytes] = dict.fromkeys(streams, b"0") if resumes else {}
        self._stale = _StaleScan(streams, lease, claim_interval)
        self._taken = _Taken()
        self._trimming = _TrimWatch(streams)
        self._remove_idle_at = time.monotonic()
        self._unsent = _UnsentAcks()
        self._wire = wire
        self._by_slot = _by_slot(wire, streams)
        self._start: Start = start
        self._lease_ms = max(1, round(lease * 1000))
        self._is_ready = False
        self._turn = 0
        self._stopped = threading.Event()

    @property
    def in_flight(self) -> int:
        """Return how many entries are held."""
        return sum(map(len, self._held.values()))

    def holds(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still valid: not acked, released or claimed by another."""
        held = self._held.get(delivery.stream)
        return held is not None and held.get(delivery.id) is delivery

    # --- groups -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the groups that do not exist yet, and store our lease; once."""
        if self._is_ready:
            return
        for stream in self.streams:
            stream.create(self._start)
            stream.store_lease(self._lease_ms)
        self._is_ready = True

    def repair(self, error: redis.ResponseError) -> bool:
        """Create deleted groups again, if the error reports a missing one."""
        if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
            return False
        for stream in self.streams:
            if stream.repair():
                stream.store_lease(self._lease_ms)
                logger.warning(
                    "group %r of stream %r was deleted and is created again; all entries of the"
                    " stream are delivered again",
                    *(stream.group.decode(), stream.name),
                )
        return True

    # --- reading ----------------------------------------------------------------------------

    @property
    def next_scan(self) -> float:
        """When the pending lists are scanned for stale entries next, by the monotonic clock."""
        return self._stale.next_scan

    def collect_pending(self, found: list[Delivery], room: int) -> None:
        """Collect our own pending entries, then stale entries of other consumers."""
        self._read_own(found, room)
        self._claim_stale(found, room)

    def collect_new(self, found: list[Delivery], room: int, wait: float) -> None:
        """Read up to `room` new entries; wait up to `wait` seconds for the first of them."""
        before = len(found)
        self._trimming.begin()
        try:
            self._collect_new(found, room, wait)
        finally:
            self._trimming.note_read(is_full=len(found) - before >= room)

    def _collect_new(self, found: list[Delivery], room: int, wait: float) -> None:
        if len(self._by_slot) == 1 and room >= len(self.streams):
            self._read_new_of(self._by_slot[0], found, room, wait)
            return
        # One command cannot block on streams of several slots; nor can it return fewer entries
        # than it names streams, since COUNT is per stream.
        groups = self._by_slot if room >= len(self.streams) else [[s] for s in self.streams]
        end = time.monotonic() + wait
        most = len(found) + room
        before = len(found)
        while True:
            self._turn += 1
            turn = self._turn % len(groups)
            for streams in groups[turn:] + groups[:turn]:
                if len(found) < most:
                    self._read_new_of(streams, found, most - len(found), 0.0)
            left = end - time.monotonic()
            if len(found) > before or left <= 0:
                return
            if self._pause(min(left, _POLL_SECONDS)):
                return

    def _pause(self, seconds: float) -> bool:
        """Wait; return whether the consumer was stopped."""
        if not bridge.is_on_loop():
            return self._stopped.wait(seconds)
        bridge.sleep(seconds)
        return self._stopped.is_set()

    def rescan(self) -> None:
        """Find the entries of a reply that was lost, after a failed read."""
        self._stale.restart()

    def stop(self) -> None:
        """Cut a wait for new entries short."""
        self._stopped.set()

    def _read_own(self, found: list[Delivery], room: int) -> None:
        """Read the entries that this consumer's name held before this process started."""
        for stream in list(self._own_from):
            while stream in self._own_from and len(found) < room:
                self._read_own_of(stream, found, room - len(found))

    def _read_own_of(self, stream: GroupStream, found: list[Delivery], count: int) -> None:
        entries = stream.read_own(self._own_from[stream], count)
        if entries:
            now = time.monotonic()
            counts = self._still_ours(stream, (entry_id for entry_id, _ in entries))
            held = self._held[stream]
            for entry_id, fields in entries:
                row = counts.get(entry_id)
                if fields and row is not None and entry_id not in held:
                    delivery = Delivery(stream, entry_id, fields, row.deliveries, now)
                    held[entry_id] = delivery
                    found.append(delivery)
            deleted = [entry_id for entry_id, fields in entries if not fields]
            self._drop_deleted(stream, deleted, self._taken)
            self._taken.report(stream)
            self._own_from[stream] = entries[-1][0]
        if len(entries) < count:
            del self._own_from[stream]

    def _claim_stale(self, found: list[Delivery], room: int) -> None:
        for _ in self.streams:  # each once: a scan that takes longer than its interval is due again
            if not self._stale.is_due() or len(found) >= room:
                return
            stream = self._stale.stream
            for terms, rows in self._stale.find(self._held[stream], room - len(found)).items():
                self._claim(stream, terms, rows, found)
            if not self._stale.advance():
                return
            self._taken.report(stream)
            if not self._stopped.is_set():  # `close` may have removed our name
                stream.show_alive(self._lease_ms)
                self._remove_idle_names()

    def _claim(
        self, stream: GroupStream, terms: _ClaimTerms, rows: list[Pending], found: list[Delivery]
    ) -> None:
        now = time.monotonic()
        missing = {row.id: row.deliveries + (terms.deliveries is None) for row in rows}
        held = self._held[stream]
        for entry_id, fields in stream.claim(terms.min_idle_ms, list(missing), terms.deliveries):
            delivery = Delivery(stream, entry_id, fields, missing.pop(entry_id), now)
            held[entry_id] = delivery
            found.append(delivery)
            self.claimed += 1
        self._taken.add_claimed(row.consumer for row in rows if row.id not in missing)
        self._drop_deleted(stream, missing, self._taken)  # or other consumers were faster

    def _drop_deleted(self, stream: GroupStream, suspects: Iterable[bytes], taken: _Taken) -> None:
        """Ack and count those of the entries that were deleted from the stream.

        In an outbox none counts: deletion is part of the ack there.
        """
        deleted = stream.ack_deleted(suspects)
        self._let_go(stream, deleted)
        if not stream.deletes:
            self.deleted += len(deleted)
            taken.add_deleted(deleted)

    def _remove_idle_names(self) -> None:
        """Remove names of consumers that crashed long ago, once an hour, some at a time."""
        now = time.monotonic()
        if self._remove_idle_at > now:
            return
        self._remove_idle_at = now + _REMOVE_IDLE_SECONDS
        for stream in self.streams:
            try:
                idle = stream.idle_consumers(IDLE_SECONDS)
                removed = stream.remove_consumers(idle[:_REMOVE_IDLE_NAMES])
            except redis.ResponseError as error:  # an ACL without these commands
                logger.debug("cannot remove idle consumers of %r: %s", stream.name, error)
                continue
            if removed:
                logger.info(
                    "removed %d consumers of group %r of stream %r that were idle for a day",
                    *(len(removed), stream.group.decode(), stream.name),
                )
            if len(idle) > _REMOVE_IDLE_NAMES:
                self._remove_idle_at = now

    def _read_new_of(
        self, streams: list[GroupStream], found: list[Delivery], room: int, wait: float
    ) -> None:
        """Share `room` among the streams; give what some left to those that had more entries."""
        while streams and room > 0:
            count = max(1, room // len(streams))
            asked = streams[:room]
            entries = self._read_group(asked, count, wait)
            wait = 0.0
            now = time.monotonic()
            full: list[GroupStream] = []
            for stream in asked:
                held = self._held[stream]
                got = entries.get(stream.key, ())
                for entry_id, fields in got:
                    delivery = Delivery(stream, entry_id, fields, 1, now)
                    held[entry_id] = delivery
                    found.append(delivery)
                if got:
                    self._trimming.note_entry(stream, got[-1][0])
                room -= len(got)
                if len(got) == count:
                    full.append(stream)
            streams = full if len(self.streams) > 1 else []

    def _read_group(
        self, streams: Sequence[GroupStream], count: int, wait: float
    ) -> dict[bytes, list[Any]]:
        first = streams[0]
        read: list[Argument] = [b"XREADGROUP", b"GROUP", first.group, first.consumer]
        read += (b"COUNT", count)
        if wait > 0:
            read += (b"BLOCK", math.ceil(wait * 1000))  # never 0, which blocks for ever
        read.append(b"STREAMS")
        read.extend(stream.key for stream in streams)
        read.extend([b">"] * len(streams))
        counts = self._trimming.take_due(streams)
        commands = [*((stream.key, command) for stream, command in counts), (first.key, read)]
        *trimmed, entries = self._wire.send(commands, wait=max(wait, 0.0))
        for (stream, _), reply in zip(counts, trimmed, strict=True):
            self.deleted += self._trimming.count(stream, reply)
        if isinstance(entries, Exception):
            raise entries
        return entries_by_stream(entries)

    # --- acks -------------------------------------------------------------------------------

    @property
    def unsent_acks(self) -> int:
        return len(self._unsent)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Ack with one command per stream; keep acks that find no server for `send_acks`."""
        by_stream: dict[GroupStream, list[bytes]] = {}
        for delivery in deliveries:
            stream = delivery.stream
            if delivery.is_acked:
                self._held[stream].pop(delivery.id, None)
                continue
            ids = by_stream.get(stream)
            if ids is None:
                ids = by_stream[stream] = []
            ids.append(delivery.id)
        failure: Exception | None = None
        for stream, ids in by_stream.items():
            try:
                self._send_acks(stream, ids)
            except (redis.RedisError, OSError) as error:
                if may_pass(error):
                    logger.warning(
                        "could not send %d acks to %r, retrying later: %r",
                        *(len(ids), stream.name, error),
                    )
                    self._unsent.add(stream, ids)
                else:
                    failure = error
        if failure is not None:
            raise StoreError(f"acks were refused: {failure}") from failure

    def send_acks(self) -> None:
        """Send the acks that could not be sent before; raises if the server is still away."""
        unsent = self._unsent.take()
        for stream in list(unsent):
            try:
                self._send_acks(stream, unsent[stream])
            except (redis.RedisError, OSError) as error:
                if may_pass(error):
                    for late, ids in unsent.items():
                        self._unsent.add(late, ids)
                    raise
                logger.error(
                    "%d acks to %r were refused, their entries will be delivered again: %r",
                    *(len(unsent[stream]), stream.name, error),
                )
            del unsent[stream]

    def ack_buried(self, delivery: Delivery) -> None:
        """Ack an entry whose dead letter was written; raises if that fails, and keeps it held."""
        delivery.stream.ack([delivery.id])
        self._let_go(delivery.stream, (delivery.id,))

    def forget(self, delivery: Delivery) -> None:
        """Hold an entry no longer that was moved out of the pending list."""
        self._let_go(delivery.stream, (delivery.id,))

    def _send_acks(self, stream: GroupStream, ids: Sequence[bytes]) -> None:
        """Send acks; twice does no harm, and one that is refused is not tried again."""
        try:
            stream.ack(ids)
        except (redis.RedisError, OSError) as error:
            if not may_pass(error):
                self._let_go(stream, ids)  # they are redelivered when the lease has ended
            raise
        self._let_go(stream, ids)

    def _let_go(self, stream: GroupStream, ids: Iterable[bytes]) -> None:
        held = self._held[stream]
        for entry_id in ids:
            held.pop(entry_id, None)

    # --- leases -----------------------------------------------------------------------------

    def _touch(self, stream: GroupStream, ids: Sequence[bytes], *options: Argument) -> None:
        """Touch held entries; drop those that turn out to be deleted."""
        taken = _Taken()  # not that of the scan, which another thread may run
        self._drop_deleted(stream, stream.touch(ids, *options), taken)
        taken.report(stream)

    def renew(self, deliveries: Iterable[Delivery]) -> None:
        """Restart the idle time of held entries, unless it was restarted recently."""
        now = time.monotonic()
        recently = now - self.lease / 4
        due = [item for item in deliveries if item.touched <= recently and self.holds(item)]
        for stream, some in _group(due).items():
            ours = self._still_ours(stream, (delivery.id for delivery in some))
            if ours:
                self._touch(stream, list(ours))
            for delivery in some:
                delivery.renew(now)

    def redeliver(self, counts: Mapping[Delivery, int]) -> list[Delivery]:
        """Restart held entries with these delivery counts; return those that are still ours.

        A process that was frozen beyond its lease has lost entries to other consumers.
        """
        for stream, some in _group(counts).items():
            ours = self._still_ours(stream, (delivery.id for delivery in some))
            by_count: dict[int, list[bytes]] = {}
            for delivery in some:
                if delivery.id in ours:
                    by_count.setdefault(counts[delivery], []).append(delivery.id)
                else:
                    self._let_go(stream, (delivery.id,))
            for count, ids in by_count.items():
                self._touch(stream, ids, b"RETRYCOUNT", count)
        now = time.monotonic()
        restarted = [delivery for delivery in counts if self.holds(delivery)]
        for delivery in restarted:
            delivery.restart(counts[delivery], now)
        return restarted

    def uncount(self, deliveries: Sequence[Delivery], *options: Argument) -> None:
        """Lower the delivery count in Redis by one, so that the delivery costs no attempt.

        Done at once, so that it also holds if this process dies. A failure is logged only.
        """
        try:
            for stream, some in _group(deliveries).items():
                ours = self._still_ours(stream, (delivery.id for delivery in some))
                by_count: dict[int, list[bytes]] = {}
                for delivery in some:
                    if delivery.id in ours:
                        by_count.setdefault(delivery.deliveries - 1, []).append(delivery.id)
                for count, ids in by_count.items():
                    self._touch(stream, ids, *options, b"RETRYCOUNT", count)
        except (redis.RedisError, OSError) as error:
            logger.warning(
                "could not take back %d deliveries, each costs an attempt: %r",
                *(len(deliveries), error),
            )

    def release(self) -> None:
        """Let other consumers claim all held entries at once; the delivery costs no attempt."""
        held = [item for entries in self._held.values() for item in list(entries.values())]
        if self._stale.has_lost_reply:
            held += self._find_lost(len(held) + _SPARE)
        self.uncount(held, b"IDLE", self._lease_ms)
        for entries in self._held.values():
            entries.clear()
        self._taken.report(self._stale.stream)

    def _find_lost(self, count: int) -> list[Delivery]:
        """Find entries that are pending under our name, and whose delivery we did not receive."""
        found: list[Delivery] = []
        try:
            for stream in self.streams:
                rows = stream.list_pending(FIRST, LAST, count, stream.consumer)
                lost = (row for row in rows if row.id not in self._held[stream])
                found += [Delivery(stream, row.id, [], row.deliveries, 0.0) for row in lost]
        except (redis.RedisError, OSError) as error:
            logger.debug("entries of a lost reply wait for the end of their lease: %r", error)
        return found

    def remove_name(self) -> None:
        """Remove the consumer's name from its groups, where nothing is pending under it."""
        for stream in self.streams:
            stream.remove_consumers([stream.consumer])

    def _still_ours(self, stream: GroupStream, ids: Iterable[bytes]) -> dict[bytes, Pending]:
        """Return those of the entries that no other consumer has claimed and none has acked."""
        wanted = sorted(ids, key=parse)
        if not wanted:
            return {}
        count = len(self._held[stream]) + len(wanted) + _SPARE
        rows = stream.list_pending(wanted[0], wanted[-1], count, stream.consumer)
        found = {row.id: row for row in rows}
        return {entry_id: found[entry_id] for entry_id in wanted if entry_id in found}


class _ClaimTerms(NamedTuple):
    """How to claim: the least idle time, and the delivery count if it is not the next."""

    min_idle_ms: int
    deliveries: int | None


class _StaleScan:
    """Scans the pending lists, every `interval` seconds, for entries whose lease has ended.

    How long an entry may be idle is the lease of its holder, which each consumer stores beside the
    stream: a consumer with a short lease does not claim from one with a long lease. On Redis 6.0
    XPENDING cannot filter by idle time, so the lists are read page by page.
    """

    def __init__(self, streams: Sequence[GroupStream], lease: float, interval: float) -> None:
        self.next_scan = time.monotonic()
        self._streams = streams
        self._lease_ms = max(1, round(lease * 1000))
        self._interval = interval
        self._at = 0
        self._from = FIRST
        """Where in the pending list of the current stream the scan goes on."""
        self._can_read_leases = True
        self.has_lost_reply = False
        """Whether entries may be pending under our name that no read has returned."""

    @property
    def stream(self) -> GroupStream:
        return self._streams[self._at]

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_scan

    def restart(self) -> None:
        """Scan from the start, now, and also for entries that we hold without knowing it."""
        self.has_lost_reply = True
        self._at = 0
        self._from = FIRST
        self.next_scan = time.monotonic()

    def advance(self) -> bool:
        """Go on to the next stream; False if the current one is not finished yet."""
        if self._from != FIRST:
            return False
        self._at = (self._at + 1) % len(self._streams)
        if self._at == 0:
            self.has_lost_reply = False
            self.next_scan = time.monotonic() + self._interval
        return True

    def find(self, held: Mapping[bytes, Delivery], room: int) -> dict[_ClaimTerms, list[Pending]]:
        """Find up to `room` claimable entries of the current stream that are not held."""
        leases: dict[bytes, int] | None = None
        found: dict[_ClaimTerms, list[Pending]] = {}
        for _ in range(_PAGES_PER_READ):
            page = self.stream.list_pending(self._from, LAST, PAGE)
            if page and leases is None:
                leases = self._leases()
            for row in page:
                terms = None if row.id in held else self._terms(row, leases or {})
                if terms is None:
                    continue
                found.setdefault(terms, []).append(row)
                room -= 1
                if not room:
                    self._from = next_after(row.id)
                    return found
            if len(page) < PAGE:
                self._from = FIRST
                return found
            self._from = next_after(page[-1].id)
        return found

    def _terms(self, row: Pending, leases: dict[bytes, int]) -> _ClaimTerms | None:
        if self.has_lost_reply and row.consumer == self.stream.consumer:
            return _ClaimTerms(0, row.deliveries)
        lease_ms = leases.get(row.consumer, self._lease_ms)
        return _ClaimTerms(lease_ms, None) if row.idle_ms >= lease_ms else None

    def _leases(self) -> dict[bytes, int]:
        try:
            return self.stream.leases() if self._can_read_leases else {}
        except redis.ResponseError as error:  # an ACL without this key
            logger.warning(
                "could not read the leases of other consumers (%s); ours applies to their entries",
                error,
            )
            self._can_read_leases = False
            return {}


class _Taken:
    """Collects what a scan took over, so that a takeover of many pages is one line of the log."""

    def __init__(self) -> None:
        self._claimed: Counter[bytes] = Counter()
        self._deleted: list[bytes] = []

    def add_claimed(self, consumers: Iterable[bytes]) -> None:
        self._claimed.update(consumers)

    def add_deleted(self, ids: Iterable[bytes]) -> None:
        self._deleted.extend(ids)

    def report(self, stream: GroupStream) -> None:
        """Log what was collected of a stream."""
        claimed, self._claimed = self._claimed, Counter()
        deleted, self._deleted = self._deleted, []
        claimed.pop(stream.consumer, None)
        if claimed:
            names = b", ".join(name for name, _ in claimed.most_common(5))
            logger.info(
                "claimed %d stale entries of stream %r from %d consumers: %s",
                *(claimed.total(), stream.name, len(claimed)),
                printable(names.decode(errors="backslashreplace")),
            )
        if deleted:
            logger.warning(
                "%d entries of stream %r were deleted while they were pending in group %r: %s",
                *(len(deleted), stream.name, stream.group.decode()),
                b", ".join(deleted[:20]).decode(),
            )


class _TrimWatch:
    """Counts entries that were trimmed before their group read them; Redis 7 and later.

    A read that waits gets new entries at once. So they are counted with the first read, after a
    pause, and with reads after one that left entries behind: once the group has read on, Redis has
    corrected its counters, and a loss cannot be found any more. The count is sent just before the
    read, in one piece with it.
    """

    def __init__(self, streams: Sequence[GroupStream]) -> None:
        # Acked entries of an outbox are deleted, and the counters of Redis do not say which.
        self._last_ids = {stream: MIN for stream in streams if not stream.deletes}
        """The newest entry that we have read of each stream that can be counted."""
        self._due: set[GroupStream] = set()
        self._last_read = -math.inf
        self._is_full = False

    def begin(self) -> None:
        """Note that reading begins: each stream is due, unless the last read was complete."""
        is_due = self._is_full or time.monotonic() - self._last_read >= _UNREAD_SECONDS
        self._due = set(self._last_ids) if is_due else set()

    def take_due(self, streams: Iterable[GroupStream]) -> list[tuple[GroupStream, Command]]:
        """Return the commands that count for those of the streams that are due."""
        due = [stream for stream in streams if stream in self._due]
        self._due.difference_update(due)
        return [(stream, stream.count_trimmed(self._last_ids[stream])) for stream in due]

    def note_entry(self, stream: GroupStream, entry_id: bytes) -> None:
        if stream in self._last_ids:
            self._last_ids[stream] = entry_id

    def note_read(self, *, is_full: bool) -> None:
        """Note that a read has ended, and whether it may have left entries behind."""
        self._last_read = time.monotonic()
        self._is_full = is_full

    def count(self, stream: GroupStream, reply: Any) -> int:
        """Return the count in a reply, and log it; one consumer of the group counts each loss."""
        trimmed = stream.trimmed(reply)
        if trimmed is None:
            del self._last_ids[stream]
        elif trimmed:
            logger.warning(
                "%d entries of stream %r were trimmed before group %r read them, and are lost"
                " to it; trim by `conquiet streams trim`, which spares unread entries",
                *(trimmed, stream.name, stream.group.decode()),
            )
        return trimmed or 0


class _UnsentAcks:
    """Acks that found no server, by stream."""

    def __init__(self) -> None:
        self._ids: dict[GroupStream, list[bytes]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, list(self._ids.values())))

    def add(self, stream: GroupStream, ids: Sequence[bytes]) -> None:
        with self._lock:
            self._ids.setdefault(stream, []).extend(ids)

    def take(self) -> dict[GroupStream, list[bytes]]:
        with self._lock:
            ids, self._ids = self._ids, {}
        return ids


def _by_slot(wire: Wire, streams: Sequence[GroupStream]) -> list[list[GroupStream]]:
    by_key = {stream.key: stream for stream in streams}
    return [[by_key[key] for key in keys] for keys in wire.by_slot(list(by_key))]


def _group(deliveries: Iterable[Delivery]) -> dict[GroupStream, list[Delivery]]:
    streams: dict[GroupStream, list[Delivery]] = {}
    for delivery in deliveries:
        streams.setdefault(delivery.stream, []).append(delivery)
    return streams
