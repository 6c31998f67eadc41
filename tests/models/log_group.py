"""Model of a group over the SQL log: membership, leases, versions, positions, retries.

One partition, whose rows become visible in any order. Members take the partition, read rows behind
its position, and handle each in a transaction that moves the position by the version it knows
(`PositionInbox`); a worker runs several such transactions at once, for different keys. A row of
positions is locked from a transaction's UPDATE to its end, and other writers wait for it. Leases
end at any moment, also of members that are alive; COMMITs fail, and their replies are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.models.checker import Model, Outcome, step, world

NOBODY, DEAD = -1, -2
"""Owners: no member, and one whose name no process has any more."""


class Move(NamedTuple):
    """A move of the position, as `conquiet.sql.log_group.Move`."""

    position: int
    settled: tuple[int, ...]
    seen: int
    version: int


class Lane(NamedTuple):
    """A transaction of a worker."""

    at: str = "idle"
    row: int = -1
    kind: str = ""
    """effect, or park: the row failed and waits for a retry."""
    is_retry: bool = False
    is_old: bool = False
    """Whether the tenure of its delivery is lost."""
    move: Move | None = None


class Row(NamedTuple):
    """A delivery, as `conquiet.sql.log_group.Delivery`."""

    status: str = "unread"
    """unread, held, out or settled"""
    is_counted: bool = False
    is_tried: bool = False


class Tenure(NamedTuple):
    """The partition as its member knows it."""

    version: int
    cursor: int
    start: int
    settled: tuple[int, ...]
    rows: tuple[Row, ...]
    is_lost: bool = False


class Member(NamedTuple):
    """A process: what it holds, and its transactions."""

    tenure: Tenure | None
    lanes: tuple[Lane, ...]


class State(NamedTuple):
    """The tables, the members, and which faults may still happen."""

    written: tuple[bool, ...]
    position: int
    settled: tuple[int, ...]
    """Rows behind the position that are settled."""
    version: int
    owner: int
    claimant: int
    is_over: bool
    """Whether the lease of the owner has ended."""
    lock: int | None
    """The member that has the row of positions locked."""
    retries: tuple[int, ...]
    effects: tuple[int, ...]
    members: tuple[Member, ...]
    crashes: int
    losses: int
    failures: int


class LogGroup(Model):
    """Members of one group over one partition, whose rows have these keys."""

    guards: ClassVar[Mapping[str, str]] = {
        "moves are fenced": "took effect 2 times",
        "the version is compared": "took effect 2 times",
        "a lost tenure stays lost": "took effect 2 times",
        "the position moves with the effects": "took effect 2 times",
        "a move counts again what it had counted": "had no effect",
        "settled rows behind the position are written": "took effect 2 times",
        "the position stops at a gap": "had no effect",
        "the log is read up to its horizon": "had no effect",
        "an unknown commit is looked up": "took effect 2 times",
        "a waiting key is held": "overtook",
        "leases end": "stuck",
        "the position passes settled rows when idle": "stuck",
    }
    hidden = frozenset(("handle", "fetch", "ask", "write_idle"))

    def __init__(
        self,
        *,
        keys: str = "ab",
        members: int = 2,
        lanes: int = 1,
        crashes: int = 1,
        losses: int = 1,
        failures: int = 1,
        asks: bool = False,
        late: bool = False,
        without: str = "",
    ) -> None:
        super().__init__(without=without)
        self.processes = members
        self._keys = keys
        self._lanes = lanes
        self._asks = asks
        self._late = late
        self._bounds = (crashes, losses, failures)

    def initial(self) -> State:
        count = len(self._keys)
        member = Member(None, (Lane(),) * self._lanes)
        tables = (
            (not self._late,) * count,
            0,
            (),
            1,
            NOBODY,
            NOBODY,
            False,
            None,
            (),
            (0,) * count,
        )
        return State(*tables, (member,) * self.processes, *self._bounds)

    def is_done(self, state: State) -> bool:
        return state.position == len(self._keys) and not state.retries and min(state.effects) == 1

    def wrong(self, state: State) -> str | None:
        for row, times in enumerate(state.effects):
            if times > 1:
                return f"row {row} took effect 2 times"
            if not times and _is_covered(state, row) and row not in state.retries:
                return f"row {row} was passed, and had no effect"
            for earlier in range(row if times else 0):
                if self._keys[earlier] == self._keys[row] and not state.effects[earlier]:
                    return f"row {row} overtook row {earlier} of its key"
        return None

    def canonical(self, state: State) -> State:
        """Number the versions in the order in which they occur; sort the transactions."""
        names: dict[int, int] = {}

        def name(version: int) -> int:
            return names.setdefault(version, len(names) + 1)

        def rename(lane: Lane) -> Lane:
            if lane.move is None:
                return lane
            move = lane.move._replace(seen=name(lane.move.seen), version=name(lane.move.version))
            return lane._replace(move=move)

        version = name(state.version)
        members = []
        for tenure, lanes in state.members:
            if tenure is not None:
                tenure = tenure._replace(version=name(tenure.version))
            members.append(Member(tenure, tuple(map(rename, sorted(lanes, key=_place)))))
        return state._replace(version=version, members=tuple(members))

    # --- membership -----------------------------------------------------------------------------

    @step
    def take(self, state: State, me: int) -> Iterator[Outcome]:
        """Take the partition if it is free, its lease is over, or it was handed over.

        Models `conquiet.sql.log_source.LogSource._beat` and
        `conquiet.sql.log_group.GroupTables.take`; the statement waits for the lock of the row.
        """
        tenure = state.members[me].tenure
        if tenure is not None and tenure.is_lost:
            state, tenure = _drop(state, me), None
        if tenure is not None or state.lock is not None:
            return
        if state.owner in (NOBODY, me) or state.is_over:
            version = _new_version(state)
            rows = (Row(),) * len(self._keys)
            found = Tenure(version, state.position, state.position, state.settled, rows)
            taken = state._replace(owner=me, version=version, is_over=False, claimant=NOBODY)
            yield "taken", _hold(taken, me, found)

    @step
    def renew(self, state: State, me: int) -> Iterator[Outcome]:
        """Extend the lease, or learn that another member has the partition.

        Models `conquiet.sql.log_source.LogSource._renew`.
        """
        if state.members[me].tenure is None or state.lock is not None:
            return
        if state.owner != me:
            yield "lost", _drop(state, me)
        elif state.is_over:
            yield "kept", state._replace(is_over=False)

    @step
    def ask(self, state: State, me: int) -> Iterator[Outcome]:
        """Ask the owner for the partition.

        Models `conquiet.sql.log_source.LogSource._ask`, which does so if the owner has more.
        """
        owned = state.owner not in (NOBODY, me)
        if (
            self._asks
            and owned
            and state.claimant == NOBODY
            and not state.lock
            and not state.members[me].tenure
        ):
            yield "", state._replace(claimant=me)

    @step
    def hand_over(self, state: State, me: int) -> Iterator[Outcome]:
        """Hand the partition to the member that asks for it, once nothing is in flight.

        Models `conquiet.sql.log_source.LogSource._hand_over`.
        """
        tenure, lanes = state.members[me]
        if state.claimant == NOBODY or tenure is None or tenure.is_lost or state.lock is not None:
            return
        if state.owner != me or any(lane.at != "idle" and not lane.is_old for lane in lanes):
            return
        if tenure.version == state.version:
            position, settled = self._progress(tenure)
            state = state._replace(position=position, settled=settled)
            given = {"owner": state.claimant, "claimant": NOBODY, "version": _new_version(state)}
            state = state._replace(**given, is_over=False)
        yield "handed over", _drop(state, me)

    @step
    def write_idle(self, state: State, me: int) -> Iterator[Outcome]:
        """Write the position past rows that an earlier member had settled.

        Models `conquiet.sql.log_source.LogSource._write_idle`.
        """
        tenure = state.members[me].tenure
        if tenure is None or tenure.is_lost or state.lock is not None:
            return
        if any(known.status in ("held", "out") for known in tenure.rows):
            return
        has_passed = tenure.settled and tenure.cursor > max(tenure.settled)
        if has_passed and self.has("the position passes settled rows when idle"):
            version = _new_version(state)
            position, settled = self._progress(tenure)
            own = tenure._replace(settled=(), version=version)
            if state.owner == me and state.version == tenure.version:
                state = state._replace(position=position, settled=settled, version=version)
            yield "", _hold(state, me, own)

    # --- reading --------------------------------------------------------------------------------

    @step
    def fetch(self, state: State, me: int) -> Iterator[Outcome]:
        """Read the next row, up to the horizon.

        Models `conquiet.sql.log_source.LogSource._fetch`.
        """
        tenure = state.members[me].tenure
        if tenure is None or tenure.is_lost or tenure.cursor == len(self._keys):
            return
        row = tenure.cursor
        if not self.has("the log is read up to its horizon"):
            while row < len(self._keys) and not state.written[row]:
                row += 1
        if row < len(self._keys) and state.written[row]:
            status = "settled" if row in tenure.settled else "held"
            read = _change(tenure, row, status=status)._replace(cursor=row + 1)
            yield f"row {row}", _hold(state, me, read)

    @step
    def begin(self, state: State, me: int) -> Iterator[Outcome]:
        """Begin the transaction of a row whose key does not wait; skip it if it was committed.

        Models `conquiet.sql.log_source.LogSource.find_done`, with the order of
        `conquiet.sql.log_source.LogSource._take_again` and of a worker that keeps keys in order.
        """
        tenure = state.members[me].tenure
        lane = self._free_lane(state, me)
        if tenure is None or tenure.is_lost or lane is None:
            return
        for row, known in enumerate(tenure.rows):
            if known.status != "held" or not self._is_first(state, me, row):
                continue
            if self._waits(state, row):  # parked behind the one that failed
                parked = Lane("begun", row, "park")
                yield f"row {row}", _lane(self._out(state, me, row), me, lane, parked)
                continue
            if known.is_tried and self.has("an unknown commit is looked up"):
                if state.lock is None and _is_covered(state, row):
                    yield (
                        f"row {row} done",
                        _hold(state, me, _change(tenure, row, status="settled")),
                    )
                    continue
                if state.lock is not None:
                    continue
            yield (
                f"row {row}",
                _lane(self._out(state, me, row), me, lane, Lane("begun", row, "effect")),
            )
        yield from self._begin_retry(state, me, tenure, lane)

    def _begin_retry(self, state: State, me: int, tenure: Tenure, lane: int) -> Iterator[Outcome]:
        """Begin a retry that is due, as `conquiet.sql.log_source.LogSource._take_retries` does."""
        has_caught_up = not tenure.settled or tenure.cursor > max(tenure.settled)
        running = {item.row for item in state.members[me].lanes if item.at != "idle"}
        for row in state.retries:
            earlier = any(
                other < row and self._keys[other] == self._keys[row] for other in state.retries
            )
            unread = any(
                self._keys[other] == self._keys[row] and known.status in ("held", "out")
                for other, known in enumerate(tenure.rows[:row])
            )
            if has_caught_up and not earlier and not unread and row not in running:
                begun = Lane("begun", row, "effect", is_retry=True)
                yield f"row {row}", _lane(state, me, lane, begun)

    def _is_first(self, state: State, me: int, row: int) -> bool:
        """Return whether no earlier row of the key is in flight in this member."""
        tenure = state.members[me].tenure
        assert tenure is not None
        return not any(
            self._keys[other] == self._keys[row] and known.status in ("held", "out")
            for other, known in enumerate(tenure.rows[:row])
        )

    def _waits(self, state: State, row: int) -> bool:
        waiting = any(
            other < row and self._keys[other] == self._keys[row] for other in state.retries
        )
        return waiting and self.has("a waiting key is held")

    def _out(self, state: State, me: int, row: int) -> State:
        tenure = state.members[me].tenure
        assert tenure is not None
        return _hold(state, me, _change(tenure, row, status="out"))

    def _free_lane(self, state: State, me: int) -> int | None:
        lanes = state.members[me].lanes
        return next((number for number, lane in enumerate(lanes) if lane.at == "idle"), None)

    # --- the transaction ------------------------------------------------------------------------

    @step
    def handle(self, state: State, me: int) -> Iterator[Outcome]:
        """Run the handler; one that fails is parked by a transaction of the source's own.

        Models `conquiet.sql.log_source.PositionInbox` and
        `conquiet.sql.log_source.LogSource._park`.
        """
        for number, lane in enumerate(state.members[me].lanes):
            if lane.at != "begun":
                continue
            yield "works", _lane(state, me, number, lane._replace(at="handled"))
            if lane.kind == "effect" and state.failures:
                failed = state._replace(failures=state.failures - 1)
                if lane.is_retry:  # counted there, and tried later
                    yield "fails", _lane(failed, me, number, Lane())
                else:
                    yield "fails", _lane(failed, me, number, lane._replace(kind="park"))

    @step
    def move(self, state: State, me: int) -> Iterator[Outcome]:
        """Compute the move, send its UPDATE, and look again if the version is another.

        Models `conquiet.sql.log_source.LogSource.confirm` and
        `conquiet.sql.log_group.GroupTables.advance`.
        """
        for number, lane in enumerate(state.members[me].lanes):
            lost = self._lose(state, me, number)
            if lane.at == "handled":
                is_gone = lane.is_retry and lane.row not in state.retries
                if is_gone or (lane.is_old and self.has("a lost tenure stays lost")):
                    yield "lost", lost
                else:
                    yield "", self._compute(state, me, number, "moving")
            elif lane.at == "moving" and state.lock is None:
                assert lane.move is not None
                is_ours = state.owner == me and state.version == lane.move.seen
                if not self.has("the version is compared"):
                    is_ours = state.owner == me
                if is_ours or not self.has("moves are fenced"):
                    updated = _lane(state, me, number, lane._replace(at="updated"))
                    yield "moved", updated._replace(lock=me)
                else:
                    yield "", _lane(state, me, number, lane._replace(at="locking", move=None))
            elif lane.at == "locking" and state.lock is None:
                is_lost = lane.is_old and self.has("a lost tenure stays lost")
                if is_lost or state.owner != me or state.members[me].tenure is None:
                    yield "lost", lost
                else:
                    again = self._recount(state, me)
                    again = self._compute(again, me, number, "updated")
                    yield "moved", again._replace(lock=me)

    def _compute(self, state: State, me: int, number: int, at: str) -> State:
        """Compute position and version, as `conquiet.sql.log_group.Move.of` does."""
        lane = state.members[me].lanes[number]
        tenure = state.members[me].tenure
        if tenure is None:  # only without the check of a lost tenure
            return self._lose(state, me, number)
        if not lane.is_retry:
            is_tried = tenure.rows[lane.row].is_tried or lane.kind == "effect"
            tenure = _change(tenure, lane.row, is_counted=True, is_tried=is_tried)
        seen, version = tenure.version, _new_version(state)
        tenure = tenure._replace(version=version)
        move = Move(*self._progress(tenure), seen, version)
        return _lane(_hold(state, me, tenure), me, number, lane._replace(at=at, move=move))

    def _recount(self, state: State, me: int) -> State:
        """Count what the table says, as `conquiet.sql.log_group.Tenure.recount` does."""
        tenure = state.members[me].tenure
        assert tenure is not None
        if self.has("a move counts again what it had counted"):
            rows = tuple(
                known._replace(is_counted=known.status != "unread" and _is_covered(state, row))
                for row, known in enumerate(tenure.rows)
            )
            tenure = tenure._replace(rows=rows)
        return _hold(state, me, tenure._replace(version=state.version))

    def _progress(self, tenure: Tenure) -> tuple[int, tuple[int, ...]]:
        """Compute what is settled, as `conquiet.sql.log_group.Tenure.progress` does."""
        read = [row for row, known in enumerate(tenure.rows) if known.status != "unread"]
        done = {
            row
            for row in read
            if tenure.rows[row].status == "settled" or tenure.rows[row].is_counted
        }
        waiting = [row for row in read if row not in done]
        behind = [row for row in tenure.settled if row >= tenure.cursor]
        if not waiting:
            return tenure.cursor, tuple(behind)
        if not self.has("the position stops at a gap"):
            return max([tenure.start, *(row + 1 for row in done)]), ()
        position = max([tenure.start, *(row + 1 for row in done if row < waiting[0])])
        settled = tuple(sorted([*(row for row in done if row > waiting[0]), *behind]))
        if not self.has("settled rows behind the position are written"):
            settled = ()
        return position, settled

    def _lose(self, state: State, me: int, number: int) -> State:
        """Roll back, and note that the tenure is lost."""
        lane = state.members[me].lanes[number]
        tenure = state.members[me].tenure
        if tenure is not None and not lane.is_old:
            state = _hold(state, me, tenure._replace(is_lost=True))
            state = _age(state, me)
        return _lane(state, me, number, Lane())

    @step
    def commit(self, state: State, me: int) -> Iterator[Outcome]:
        """Commit effects and position; the reply may be lost, or the server refuse.

        Models `conquiet.sql.transaction.Transaction` around
        `conquiet.sql.log_source.PositionInbox`, and `conquiet.sql.log_source.LogSource._write`.
        """
        for number, lane in enumerate(state.members[me].lanes):
            if lane.at != "updated":
                continue
            applied = self._apply(state, lane)
            yield "committed", _lane(applied, me, number, lane._replace(at="ack", move=None))
            if state.losses:
                for outcome in (applied, state._replace(lock=None)):
                    lost = outcome._replace(losses=state.losses - 1)
                    yield "lost", self._give_back(lost, me, number)

    def _apply(self, state: State, lane: Lane) -> State:
        assert lane.move is not None
        effects, retries = list(state.effects), set(state.retries)
        if lane.kind == "effect":
            effects[lane.row] = min(2, effects[lane.row] + 1)
            retries.discard(lane.row)
        else:
            retries.add(lane.row)
        state = state._replace(lock=None, effects=tuple(effects), retries=tuple(sorted(retries)))
        if lane.kind == "effect" and not self.has("the position moves with the effects"):
            return state
        position, settled, _, version = lane.move
        return state._replace(position=position, settled=settled, version=version)

    def _give_back(self, state: State, me: int, number: int) -> State:
        """Let the row come again; what the source itself could not write drops the partition."""
        lane = state.members[me].lanes[number]
        tenure = state.members[me].tenure
        state = _lane(state, me, number, Lane())
        if lane.is_old or tenure is None:
            return state
        if lane.kind == "park":
            return _drop(state, me)
        if lane.is_retry:
            return state
        return _hold(state, me, _change(tenure, lane.row, status="held"))

    @step
    def ack(self, state: State, me: int) -> Iterator[Outcome]:
        """Note in memory that a row is settled.

        Models `conquiet.sql.log_source.LogSource.settle`.
        """
        for number, lane in enumerate(state.members[me].lanes):
            if lane.at != "ack":
                continue
            tenure = state.members[me].tenure
            after = _lane(state, me, number, Lane())
            if lane.is_old or tenure is None:
                yield "late", after
                continue
            if not lane.is_retry:
                after = _hold(after, me, _change(tenure, lane.row, status="settled"))
            if lane.kind == "effect" and not self.has("the position moves with the effects"):
                own = after.members[me].tenure
                assert own is not None
                position, settled = self._progress(own)
                if state.owner == me and state.lock is None:
                    after = after._replace(position=position, settled=settled)
            yield "settled", after

    # --- faults ---------------------------------------------------------------------------------

    @step
    def crash(self, state: State, me: int) -> Iterator[Outcome]:
        """Die; the server ends the transactions, or runs a COMMIT that it has received."""
        tenure, lanes = state.members[me]
        if not state.crashes or (tenure is None and all(lane.at == "idle" for lane in lanes)):
            return
        outcomes = [state]
        if state.lock == me:
            [lane] = [lane for lane in lanes if lane.at == "updated"]
            outcomes = [state._replace(lock=None), self._apply(state, lane)]
        for outcome in outcomes:
            members = list(outcome.members)
            members[me] = Member(None, (Lane(),) * self._lanes)
            dead = outcome._replace(members=tuple(members), crashes=state.crashes - 1)
            if dead.owner == me:
                dead = dead._replace(owner=DEAD)
            yield "", dead._replace(claimant=DEAD) if dead.claimant == me else dead

    @world
    def a_writer_commits(self, state: State) -> Iterator[Outcome]:
        """Let a row be seen; its transaction began before those of later rows."""
        for row, is_written in enumerate(state.written):
            if not is_written:
                written = tuple(
                    known or number == row for number, known in enumerate(state.written)
                )
                yield f"row {row}", state._replace(written=written)

    @world
    def the_lease_ends(self, state: State) -> Iterator[Outcome]:
        """Let the time of the owner pass, whether it is alive or not."""
        if state.owner != NOBODY and not state.is_over and self.has("leases end"):
            yield "", state._replace(is_over=True)


def _place(lane: Lane) -> tuple[object, ...]:
    return (*lane[:5], lane.move or ())


def _hold(state: State, me: int, tenure: Tenure | None) -> State:
    members = list(state.members)
    members[me] = members[me]._replace(tenure=tenure)
    return state._replace(members=tuple(members))


def _lane(state: State, me: int, number: int, lane: Lane) -> State:
    members = list(state.members)
    lanes = list(members[me].lanes)
    lanes[number] = lane
    members[me] = members[me]._replace(lanes=tuple(lanes))
    return state._replace(members=tuple(members))


def _age(state: State, me: int) -> State:
    """Let all running transactions belong to a lost tenure."""
    members = list(state.members)
    lanes = tuple(
        lane if lane.at == "idle" else lane._replace(is_old=True) for lane in members[me].lanes
    )
    members[me] = members[me]._replace(lanes=lanes)
    return state._replace(members=tuple(members))


def _drop(state: State, me: int) -> State:
    """Forget the tenure, as `conquiet.sql.log_source.LogSource._drop` does."""
    return _age(_hold(state, me, None), me)


def _change(tenure: Tenure, row: int, **changes: object) -> Tenure:
    rows = list(tenure.rows)
    rows[row] = rows[row]._replace(**changes)
    return tenure._replace(rows=tuple(rows))


def _is_covered(state: State, row: int) -> bool:
    return row < state.position or row in state.settled


def _new_version(state: State) -> int:
    used = [state.version]
    for tenure, lanes in state.members:
        used += [tenure.version] if tenure is not None else []
        used += [max(lane.move.seen, lane.move.version) for lane in lanes if lane.move is not None]
    return max(used) + 1
