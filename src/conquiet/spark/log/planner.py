"""Planner: decides what the next micro-batch of a query holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from conquiet.spark.log.ahead import Ahead
from conquiet.spark.log.connection import client_of
from conquiet.spark.log.counting import Walk
from conquiet.spark.log.limiting import Limited, limited
from conquiet.spark.log.losses import Losses
from conquiet.spark.log.offsets import START, Position, entries_between
from conquiet.spark.log.options import ReadOptions
from conquiet.spark.log.piece import BEGINNING, Piece, parts
from conquiet.spark.log.standing import Standing
from conquiet.spark.log.streams import Streams, StreamState
from conquiet.spark.log.tasks import LogPartition, plan

Positions = dict[str, Position]


class Planner:
    """One per query, in a process of its own."""

    def __init__(self, options: ReadOptions) -> None:
        client = client_of(options.address)
        self._options = options
        self._streams = Streams(client, options.streams, options.discovery_seconds)
        self._standing = Standing(client, options.reader_name, options.mirror_group)
        self._present: Positions | None = None
        """The end that is not to be passed (Trigger.AvailableNow)."""
        self._starts: Positions = {}
        self._ends: Positions = {}
        self._ways: dict[str, Walk] = {}
        self._lengths: dict[str, int] = {}
        """What was planned last, and what was counted for it."""
        self._ahead: Ahead | None = None
        self._losses = Losses(options)
        self.newest: Positions = {}

    def initial(self) -> Positions:
        """Where a query begins that has no checkpoint yet."""
        states = self._streams.states(self._streams.names())
        start = {name: self._options.start.position(name, state) for name, state in states.items()}
        self._standing.tell(start)
        return start

    def stop_at_present(self) -> None:
        """Behave from now on as if nothing were added any more."""
        states = self._streams.states(self._streams.names())
        self._present = {name: state.end for name, state in states.items()}

    def next(self, start: Mapping[str, Position], limit: int | None) -> Positions:
        """The end of the next micro-batch."""
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
        self._standing.tell(starts)
        # One that has nothing to read is not mentioned before it begins.
        begun = {name for name, at in ends.items() if name in start or at.id != BEGINNING}
        self._ways = {}
        if limit is not None:
            ends, self._ways = self._limited(starts, ends, limit)
        # A stream that is gone keeps its place.
        kept = {
            name: at._replace(is_gone=at.is_gone or name in missing)
            for name, at in start.items()
            if name not in ends
        }
        self._starts = starts
        reached = kept | {name: at for name, at in ends.items() if name in begun}
        self._ends = self._losses.counted(reached, start, missing)
        return self._ends

    def _limited(self, starts: Positions, ends: Positions, limit: int) -> Limited:
        """Where the batch ends; then the end of the next is looked for while this one is read."""
        wire = self._streams.wire
        found = self._ahead.found(starts, ends, limit) if self._ahead is not None else None
        found = found or limited(wire, starts, ends, limit)
        self._ahead = Ahead(wire, found.ends, ends, limit) if found.ways else None
        return found

    def _end(self, name: str, state: StreamState) -> Position | None:
        """How far a stream may be read now; None if not at all."""
        if self._present is None:
            return state.end
        last = self._present.get(name)
        return last if last is None or state.end.is_after(last) else state.end

    def partitions(self, start: Positions, end: Positions) -> list[LogPartition]:
        """The tasks that read from one offset to another."""
        starts, ways = self._starts, self._ways
        if end != self._ends:  # planned before the query was restarted
            states = self._streams.states(end)
            self._losses.notice_again(start, end, states)
            self._lengths = {name: state.length for name, state in states.items()}
            starts, ways = {}, {}
        pieces = []
        begins: Positions = {}
        for name, to in end.items():
            given = start.get(name, START)
            begin = starts.get(name, given)
            if parts(to.id) < parts(given.id):  # it begins anew
                begin = Position(BEGINNING, begin.added if begin.id == BEGINNING else None)
            if to.is_after(begin):
                entries, length = entries_between(begin, to), self._lengths.get(name)
                pieces.append(Piece(name, begin.id, to.id, entries, at_most=length))
                begins[name] = begin._replace(lost=to.lost)
        least, most = self._options.min_partitions, self._options.max_per_partition
        tasks = plan(self._streams.wire, pieces, least, most, ways)
        self._look_again(tasks, begins, end)
        return tasks

    def _look_again(self, tasks: Sequence[LogPartition], begins: Positions, end: Positions) -> None:
        """Parts of a piece begin with what was there when it was split: a trim just before that
        would be seen by none of them."""
        parts_of = Counter(piece.stream for task in tasks for piece in task.pieces)
        split = {name: begins[name] for name, count in parts_of.items() if count > 1}
        if split:
            self._losses.notice_again(split, end, self._streams.states(split))

    def done(self, end: Positions) -> None:
        """All up to here is committed."""
        self._standing.tell({name: at for name, at in end.items() if at.id != BEGINNING})


def _begin(start: Position | None, state: StreamState) -> Position:
    """Where to go on in a stream, given how far the query has come in it."""
    if start is None or parts(state.last_id) < parts(start.id):
        return state.beginning
    if not state.length or parts(state.first_id) > parts(start.id):
        # Nothing up to there is left, so that much is known to be added before what is left.
        return Position(start.id, state.removed)
    return start._replace(is_gone=False)
