"""Plan the micro-batches of a query: where each ends, which tasks read it, what is lost of it.

A loss is entries that a query was still to read and that are gone from their stream. It ends the
query, or is logged and counted where `failOnDataLoss=false` allows it. The count is part of the
offsets, so every progress of the query shows it and it survives a restart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple

from conquiet.errors import ConfigError
from conquiet.redis import ids
from conquiet.redis.topic import beside
from conquiet.redis.wire import Command, Wire
from conquiet.spark.log.connection import ask, client_of
from conquiet.spark.log.offsets import NOTHING, START, Lost, Position, Positions, entries_between
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.ranges import BEGINNING, EntryRange, RangeIndex, index_ranges
from conquiet.spark.log.streams import Streams, StreamState
from conquiet.spark.log.tasks import LogPartition, plan_tasks
from conquiet.spark.progress import DataLoss

logger = logging.getLogger("conquiet.spark")


class Planner:
    """Plans one query, in a process that Spark keeps for it."""

    def __init__(self, options: ReadOptions) -> None:
        client = client_of(options.address)
        self._options = options
        self._streams = Streams(client, options.streams, options.discovery_seconds)
        self._registration = Registration(client, options.reader_name, options.mirror_group)
        self._present: Positions | None = None
        """The end that the query must not pass (Trigger.AvailableNow)."""
        self._starts: Positions = {}
        self._ends: Positions = {}
        self._indexes: dict[str, RangeIndex] = {}
        self._lengths: dict[str, int] = {}
        """The last plan: its bounds, the indexes made for it, and the lengths of its streams."""
        self._prefetch: Prefetch | None = None
        self._losses = Losses(options)
        self.newest: Positions = {}

    def initial(self) -> Positions:
        """Return where a query without a checkpoint begins."""
        states = self._streams.states(self._streams.names())
        start = {name: self._options.start.position(name, state) for name, state in states.items()}
        self._registration.update(start)
        return start

    def stop_at_present(self) -> None:
        """Ignore entries that are added from now on."""
        states = self._streams.states(self._streams.names())
        self._present = {name: state.end for name, state in states.items()}

    def next(self, start: Mapping[str, Position], limit: int | None) -> Positions:
        """Return the end of the next micro-batch."""
        names = sorted({*self._streams.names(), *start})
        states = self._streams.states(names)
        self.newest = {name: state.end for name, state in states.items()}
        self._lengths = {name: state.length for name, state in states.items()}
        missing = self._losses.notice(start, states)
        starts: Positions = {}
        ends: Positions = {}
        for name in names:
            if name in states:
                starts[name] = begin = _begin(start.get(name), states[name])
                end = self._end(name, states[name])
                ends[name] = end if end is not None and end.is_after(begin) else begin
        # Spark asks for the next batch when the last one is committed: all up to here is done.
        self._registration.update(starts)
        # A stream without entries gets no offset before its first entry.
        begun = {name for name, at in ends.items() if name in start or at.id != BEGINNING}
        self._indexes = {}
        if limit is not None:
            ends, self._indexes = self._limit(starts, ends, limit)
        # A stream that is gone keeps its position.
        kept = {
            name: at._replace(is_gone=at.is_gone or name in missing)
            for name, at in start.items()
            if name not in ends
        }
        self._starts = starts
        reached = kept | {name: at for name, at in ends.items() if name in begun}
        self._ends = self._losses.with_losses(reached, start, missing)
        return self._ends

    def _limit(self, starts: Positions, ends: Positions, limit: int) -> LimitedEnds:
        """Return where a limited batch ends, and look for the end of the next one meanwhile."""
        wire = self._streams.wire
        prefetch = self._prefetch
        found = prefetch.result(starts, ends, limit) if prefetch is not None else None
        found = found or limit_ends(wire, starts, ends, limit)
        self._prefetch = Prefetch(wire, found.ends, ends, limit) if found.indexes else None
        return found

    def _end(self, name: str, state: StreamState) -> Position | None:
        """Return how far a stream may be read now; None if not at all."""
        if self._present is None:
            return state.end
        last = self._present.get(name)
        return last if last is None or state.end.is_after(last) else state.end

    def partitions(self, start: Positions, end: Positions) -> list[LogPartition]:
        """Return the tasks that read from one offset to another."""
        starts, indexes = self._starts, self._indexes
        if end != self._ends:  # planned before the query was restarted
            states = self._streams.states(end)
            self._losses.notice_again(start, end, states)
            self._lengths = {name: state.length for name, state in states.items()}
            starts, indexes = {}, {}
        ranges = []
        begins: Positions = {}
        for name, to in end.items():
            given = start.get(name, START)
            begin = starts.get(name, given)
            if ids.parse(to.id) < ids.parse(given.id):  # the stream was created again
                begin = Position(BEGINNING, begin.added if begin.id == BEGINNING else None)
            if to.is_after(begin):
                entries, length = entries_between(begin, to), self._lengths.get(name)
                ranges.append(EntryRange(name, begin.id, to.id, entries, at_most=length))
                begins[name] = begin._replace(lost=to.lost)
        least, most = self._options.min_partitions, self._options.max_per_partition
        tasks = plan_tasks(self._streams.wire, ranges, least, most, indexes)
        self._check_splits(tasks, begins, end)
        return tasks

    def _check_splits(
        self, tasks: Sequence[LogPartition], begins: Positions, end: Positions
    ) -> None:
        """Look for losses in ranges that were split.

        Each part begins with the entries that existed when it was split: none of them would notice
        a trim just before that.
        """
        parts = Counter(one.stream for task in tasks for one in task.ranges)
        split = {name: begins[name] for name, count in parts.items() if count > 1}
        if split:
            self._losses.notice_again(split, end, self._streams.states(split))

    def commit(self, end: Positions) -> None:
        """Register that all entries up to here are committed."""
        self._registration.update({name: at for name, at in end.items() if at.id != BEGINNING})


def _begin(start: Position | None, state: StreamState) -> Position:
    """Return where to go on in a stream, given how far the query has read it."""
    if start is None or ids.parse(state.last_id) < ids.parse(start.id):
        return state.beginning
    if not state.length or ids.parse(state.first_id) > ids.parse(start.id):
        # No entry up to there exists, so the entries that were removed are those added before.
        return Position(start.id, state.removed)
    return start._replace(is_gone=False)


# --- limits ---------------------------------------------------------------------------------


class LimitedEnds(NamedTuple):
    """The ends of a limited batch, and the indexes that were made to find them."""

    ends: Positions
    indexes: dict[str, RangeIndex]


def limit_ends(
    wire: Wire, starts: Mapping[str, Position], ends: Mapping[str, Position], limit: int
) -> LimitedEnds:
    """Return the ends of a batch of exactly `limit` entries.

    Each stream gets a share of it in proportion to its backlog, and none starves.
    """
    backlog = _backlog(wire, starts, ends, limit)
    if sum(backlog.values()) <= limit:
        return LimitedEnds(dict(ends), {})
    shares = _shares(backlog, limit, starts)
    cut = {name: share for name, share in shares.items() if share < backlog[name]}
    wanted = [
        (EntryRange(name, starts[name].id, ends[name].id, backlog[name]), share)
        for name, share in cut.items()
    ]
    result = dict(ends)
    indexes = {index.range.stream: index for index in index_ranges(wire, wanted)}
    for name, index in indexes.items():
        start = starts[name]
        if index.end != ends[name].id:
            added = None if start.added is None else start.added + index.entries
            result[name] = Position(index.end, added) if index.entries else start
    return LimitedEnds(result, indexes)


def _backlog(
    wire: Wire, starts: Mapping[str, Position], ends: Mapping[str, Position], limit: int
) -> dict[str, int]:
    """Return how many entries each stream has; if uncounted, not beyond the limit plus one."""
    backlog: dict[str, int] = {}
    unknown: list[EntryRange] = []
    for name, end in ends.items():
        start = starts[name]
        entries = entries_between(start, end) if end.is_after(start) else 0
        if entries is None:
            unknown.append(EntryRange(name, start.id, end.id))
        else:
            backlog[name] = entries
    for index in index_ranges(wire, [(one, limit + 1) for one in unknown]):
        backlog[index.range.stream] = index.entries
    return backlog


def _shares(
    backlog: Mapping[str, int], limit: int, starts: Mapping[str, Position]
) -> dict[str, int]:
    """Share the limit: one entry for each stream, and the rest in proportion to the backlog.

    What rounding leaves over goes to the streams that lost most by it.
    """
    busy = {name: entries - 1 for name, entries in backlog.items() if entries}
    left = limit - len(busy)
    if left <= 0:  # the streams that were read longest ago
        turns = sorted(busy, key=lambda name: (ids.parse(starts[name].id), name))
        return dict.fromkeys(backlog, 0) | dict.fromkeys(turns[:limit], 1)
    exact = {name: left * entries / sum(busy.values()) for name, entries in busy.items()}
    shares = {name: int(share) for name, share in exact.items()}
    left -= sum(shares.values())
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[:left]:
        shares[name] += 1
    return dict.fromkeys(backlog, 0) | {name: share + 1 for name, share in shares.items()}


class Prefetch:
    """Looks for the end of the next limited batch, in a thread, while the last one is read.

    Redis walks through the entries of a limited batch to find its end, which takes about as long
    as reading them; without this, the tasks would be idle meanwhile.
    """

    def __init__(
        self,
        wire: Wire,
        starts: Mapping[str, Position],
        ends: Mapping[str, Position],
        limit: int,
    ) -> None:
        self._asked = (starts, ends, limit)
        self._found: LimitedEnds | None = None
        self._thread = Thread(target=self._look, args=(wire,), daemon=True)
        self._thread.start()

    def _look(self, wire: Wire) -> None:
        try:
            self._found = limit_ends(wire, *self._asked)
        except Exception:  # noqa: BLE001 - the planner then looks itself, and reports the error
            self._found = None

    def result(
        self, starts: Mapping[str, Position], ends: Mapping[str, Position], limit: int
    ) -> LimitedEnds | None:
        """Return the end, unless the bounds have changed or more entries could be read."""
        self._thread.join()
        there, then, least = self._asked
        if self._found is None or limit != least or self._found.ends == then:
            return None
        is_same = _places(starts) == _places(there) and then.keys() == ends.keys()
        if not is_same or any(ids.parse(ends[name].id) < ids.parse(then[name].id) for name in then):
            return None
        return self._found


def _places(positions: Mapping[str, Position]) -> dict[str, tuple[str, int | None]]:
    """Return id and count of each position; a trim past a position changes its count."""
    return {name: (at.id, at.added) for name, at in positions.items()}


# --- positions in Redis ---------------------------------------------------------------------


class Registration:
    """Writes a query's positions to Redis: under a reader's name for trims, in a group for lag."""

    def __init__(self, client: Any, reader: str, group: str) -> None:
        self._wire = Wire(client)
        self._reader = reader
        self._group = group.encode()
        self._written: Positions = {}

    def update(self, positions: Mapping[str, Position]) -> None:
        """Register that entries up to these positions are done."""
        changed = {
            stream: position
            for stream, position in positions.items()
            if self._written.get(stream) != position
        }
        if not changed or not (self._reader or self._group):
            return
        commands: list[tuple[bytes, Command]] = []
        for stream, position in changed.items():
            key = stream.encode()
            if self._reader:
                readers = beside(stream, "conquiet:readers:").encode()
                commands.append((readers, (b"HSET", readers, self._reader, position.id)))
            if self._group and position.added is not None:
                if stream not in self._written:
                    create = (b"XGROUP", b"CREATE", key, self._group, position.id)
                    commands.append((key, create))
                at = (position.id.encode(), b"ENTRIESREAD", position.added)
                commands.append((key, (b"XGROUP", b"SETID", key, self._group, *at)))
        self._send(commands)
        self._written.update(changed)

    def _send(self, commands: list[tuple[bytes, Command]]) -> None:
        for (_, command), reply in zip(commands, ask(self._wire, commands), strict=True):
            if not isinstance(reply, Exception) or str(reply).startswith("BUSYGROUP"):
                continue
            if command[0] == b"HSET":
                raise ConfigError(f"the position of the reader cannot be registered: {reply}")
            logger.warning("the position is not mirrored in group %r: %s", self._group, reply)


# --- losses ---------------------------------------------------------------------------------

_ADVICE = (
    "Restore it, or set failOnDataLoss=false to go on with the entries that exist, or start with a"
    " new checkpoint. The option readerName keeps `conquiet` from trimming entries that a query has"
    " not read."
)


class Loss(NamedTuple):
    """Entries that are missing from a stream."""

    stream: str
    wanted: str
    """The last id that was read: the entries after it were wanted."""
    available: str
    why: str
    entries: int | None = None
    """How many, if that is known."""
    is_certain: bool = True

    def __str__(self) -> str:
        many = "entries" if self.entries is None else f"{self.entries} entries"
        gone = f"{many} {'are' if self.is_certain else 'may be'} gone"
        return (
            f"stream {self.stream!r} {self.why}: {gone}; wanted the entries after {self.wanted},"
            f" available from {self.available}"
        )


class Losses:
    """The losses of one query, as its planner finds them."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._warned: set[Loss] = set()
        self._late: dict[str, Lost] = {}
        """Losses in a batch whose end was already written: counted with the next batch."""

    def notice(
        self, start: Mapping[str, Position], states: Mapping[str, StreamState]
    ) -> dict[str, Lost]:
        """Find entries after `start` that are gone; raise `DataLoss` if that is not allowed."""
        return {
            name: Lost(1, loss.entries or 0)
            for name, loss in self._find_allowed(start, states).items()
        }

    def notice_again(
        self,
        start: Mapping[str, Position],
        end: Mapping[str, Position],
        states: Mapping[str, StreamState],
    ) -> None:
        """Find losses in a batch that was planned before a restart and is read again."""
        for name, loss in self._find_allowed(start, states).items():
            if name not in end or name not in states:  # the next batch counts a stream that is gone
                continue
            before, after = start[name], end[name]
            if loss.entries is None:
                if after.lost.times == before.lost.times:
                    self._late[name] = Lost(1)
                continue
            in_batch = entries_between(before, after)
            missing = loss.entries if in_batch is None else min(loss.entries, in_batch)
            missing -= after.lost.entries - before.lost.entries  # counted when it was planned
            if missing > 0:
                self._late[name] = Lost(1, missing)

    def with_losses(
        self,
        ends: Mapping[str, Position],
        start: Mapping[str, Position],
        missing: Mapping[str, Lost],
    ) -> Positions:
        """Return the ends of a batch, each with all losses up to it."""
        counted: Positions = {}
        for name, end in ends.items():
            lost = start[name].lost if name in start else NOTHING
            lost = lost.plus(self._late.pop(name, NOTHING)).plus(missing.get(name, NOTHING))
            counted[name] = end._replace(lost=lost)
        return counted

    def _find_allowed(
        self, start: Mapping[str, Position], states: Mapping[str, StreamState]
    ) -> dict[str, Loss]:
        """Return the losses that the query may pass; log each once; raise for the others."""
        refused, allowed = [], {}
        for name, position in start.items():
            if position.is_gone and name not in states:
                continue
            loss = _loss_of(name, position, states.get(name))
            if loss is None:
                continue
            # A server that does not count entries cannot distinguish a loss from a trim of entries
            # that were read; and conquiet trims no entry that a registered reader has not read.
            is_trusted = not loss.is_certain and self._options.reader_name
            if self._options.fail_on_data_loss and not is_trusted:
                refused.append(loss)
                continue
            if loss not in self._warned:
                self._warned.add(loss)
                logger.warning("%s", loss)
            if not is_trusted:
                allowed[name] = loss
        if refused:
            more = f" (and {len(refused) - 1} other streams)" if len(refused) > 1 else ""
            raise DataLoss(f"{refused[0]}{more}. {_ADVICE}")
        return allowed


def _loss_of(stream: str, position: Position, state: StreamState | None) -> Loss | None:
    """Return what a stream has lost of the entries after a position."""
    if position.id == BEGINNING and position.added is None:
        return None
    if state is None:
        if position.id == BEGINNING:
            return None
        return Loss(stream, position.id, "nothing", "does not exist any more")
    available = state.first_id if state.length else "nothing"
    if ids.parse(state.last_id) < ids.parse(position.id):
        return Loss(stream, position.id, available, "was deleted and created again")
    has_more = ids.parse(state.last_id) > ids.parse(position.id)
    if state.length and ids.parse(state.first_id) <= ids.parse(position.id):
        return None  # the entry at the position exists, so none after it was trimmed
    removed = state.removed
    if removed is not None and position.added is not None:
        if removed < position.added:  # all up to the position is gone, which is more than that
            return Loss(stream, position.id, available, "was deleted and created again")
        if removed > position.added:
            lost = removed - position.added
            return Loss(stream, position.id, available, "was trimmed", lost)
        return None
    if not has_more:
        return None
    if not state.length:
        return Loss(stream, position.id, "nothing", "was trimmed")
    return Loss(stream, position.id, available, "was trimmed", is_certain=False)
