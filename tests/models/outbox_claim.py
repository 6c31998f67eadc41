"""Model of the relay over a table: claim, publish, mark, by several relays on PostgreSQL.

Rows become visible when their transactions commit, those of a key in the order of their ids, those
of different keys in any order. A claim locks rows (unordered), or keys and then rows (ordered), in
the transaction that marks them later. Relays die between any two steps, replies of the sink and of
COMMIT are lost, and a relay loses its connection to the database while it publishes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.models.checker import Model, Outcome, step, world

FREE, OPERATOR = -1, -2
LIMIT = 2
"""Rows per claim."""


class Relay(NamedTuple):
    """A relay, whose claim is a transaction of the database."""

    at: str = "idle"
    seen: tuple[str, ...] = ()
    """Keys that the first statement of an ordered claim has found."""
    seen_rows: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    """Keys that it has locked."""
    rows: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    """One per row that was tried: confirmed, failed or given back."""
    delayed: tuple[int, ...] = ()
    """Rows that failed, and wait for their backoff, which is kept in memory."""
    behind: int = -1
    """Where the next claim goes on."""
    is_cut: bool = False
    """Whether the database has ended its transaction."""


class State(NamedTuple):
    """The table, the sink, the relays, and which faults may still happen."""

    rows: tuple[str, ...]
    """unwritten, stored, marked or parked"""
    sent: tuple[int, ...]
    """How often each is in the sink; 2 is many."""
    locks: tuple[int, ...]
    relays: tuple[Relay, ...]
    had_fault: bool
    crashes: int
    losses: int


class OutboxClaim(Model):
    """Relays over one table, whose rows have these keys."""

    guards: ClassVar[Mapping[str, str]] = {
        "claimed rows are locked": "published 2 times, and nothing had failed",
        "marks come after the publish": "marked, and was never published",
        "locks end with the connection": "stuck",
        "claims start over": "stuck",
    }
    guards_of_order: ClassVar[Mapping[str, str]] = {
        "claims are by key": "overtook",
        "rows are read when the key is locked": "overtook",
        "a locked row blocks those behind it": "overtook",
        "a failed row blocks those behind it": "overtook",
        "a parked row blocks its key": "overtook",
        "parked rows are looked for again": "overtook",
        "a delay holds the key": "overtook",
    }
    hidden = frozenset(("wait",))

    def __init__(
        self,
        *,
        keys: str = "aab",
        ordered: bool = False,
        relays: int = 2,
        crashes: int = 1,
        losses: int = 1,
        limit: int | None = LIMIT,
        without: str = "",
    ) -> None:
        self.guards = self.guards_of_order if ordered else self.guards  # type: ignore[misc]
        super().__init__(without=without)
        self.processes = relays
        self._keys = keys
        self._ordered = ordered
        self._limit = limit
        """Rows of a claim; None for any number, as a claim has of one of its keys."""
        self._bounds = (crashes, losses)

    def initial(self) -> State:
        count = len(self._keys)
        relays = (Relay(),) * self.processes
        unwritten = ("unwritten",) * count
        return State(unwritten, (0,) * count, (FREE,) * count, relays, False, *self._bounds)

    def is_done(self, state: State) -> bool:
        return all(row == "marked" for row in state.rows)

    def wrong(self, state: State) -> str | None:
        for number, (row, sent) in enumerate(zip(state.rows, state.sent, strict=True)):
            if row == "marked" and not sent:
                return f"row {number} is marked, and was never published"
            if sent > 1 and not state.had_fault:
                return f"row {number} was published 2 times, and nothing had failed"
            if sent and self._ordered:
                for earlier in range(number):
                    if self._keys[earlier] == self._keys[number] and not state.sent[earlier]:
                        return f"row {number} overtook row {earlier} of its key"
        return None

    # --- the claim ------------------------------------------------------------------------------

    @step
    def claim(self, state: State, me: int) -> Iterator[Outcome]:
        """Claim rows that are stored and not locked; those of keys in two statements.

        Models `conquiet.sql.claim.PsycopgClaimer._any`, `conquiet.sql.claim.Claimer._lock_keys`
        and `conquiet.sql.claim.Claimer._of_keys`.
        """
        relay = state.relays[me]
        if not self._ordered:
            if relay.at == "idle":
                yield from self._claim_any(state, me)
        elif relay.at == "idle":
            if keys := self._waiting_keys(state, me):
                rows = tuple(row for row in self._stored(state) if self._keys[row] in keys)
                yield "", _set(state, me, at="seen", seen=keys, seen_rows=rows)
        elif relay.at == "seen":
            locked = {key for other in state.relays for key in other.keys if not other.is_cut}
            if not self.has("claims are by key"):
                locked = set()
            mine = tuple(key for key in relay.seen if key not in locked)
            yield "", _set(state, me, at="locked" if mine else "idle", seen=(), keys=mine)
        elif relay.at == "locked":
            rows = self._rows_of_keys(state, me)
            if rows:
                for count in range(1, len(rows)) if self._limit is None else ():
                    yield _names(rows[:count]), self._hold(state, me, rows[:count])
                yield _names(rows), self._hold(state, me, rows)
            else:
                yield "nothing", _set(state, me, at="idle", keys=(), seen_rows=())

    def _claim_any(self, state: State, me: int) -> Iterator[Outcome]:
        relay = state.relays[me]
        found: tuple[int, ...] = ()
        for behind in (relay.behind, -1) if self.has("claims start over") else (relay.behind,):
            free = [
                row
                for row in self._stored(state)
                if row > behind
                and (state.locks[row] == FREE or not self.has("claimed rows are locked"))
                and row not in relay.delayed
            ]
            found = tuple(free[:LIMIT])
            if found:
                break
        if found:
            start = -1 if self.has("claims start over") else found[-1]
            behind = found[-1] if len(found) == LIMIT else start
            yield _names(found), _set(self._hold(state, me, found), me, behind=behind)

    def _waiting_keys(self, state: State, me: int) -> tuple[str, ...]:
        delayed = {self._keys[row] for row in state.relays[me].delayed}
        if not self.has("a delay holds the key"):
            delayed = set()
        keys = {self._keys[row] for row in self._stored(state)} - delayed
        return tuple(sorted(key for key in keys if not self._is_stuck(state, key)))

    def _rows_of_keys(self, state: State, me: int) -> tuple[int, ...]:
        relay = state.relays[me]
        stored = list(self._stored(state))
        if not self.has("rows are read when the key is locked"):
            # As one statement would: those of its snapshot that can be locked and are still stored.
            old = (row for row in relay.seen_rows if self._keys[row] in relay.keys)
            return tuple(row for row in old if row in stored and state.locks[row] == FREE)
        rows: list[int] = []
        each = max(1, (self._limit or len(self._keys)) // len(relay.keys))
        for key in relay.keys:
            if self._is_stuck(state, key) and self.has("parked rows are looked for again"):
                continue
            wanted = [row for row in stored if self._keys[row] == key]
            if not self.has("a delay holds the key"):
                wanted = [row for row in wanted if row not in relay.delayed]
            free = [row for row in wanted if state.locks[row] == FREE]
            if self.has("a locked row blocks those behind it") and self.has("claims are by key"):
                free = [row for row, place in zip(free, wanted, strict=False) if row == place]
            rows += free[:each]
        return tuple(sorted(rows))

    def _is_stuck(self, state: State, key: str) -> bool:
        if not self.has("a parked row blocks its key"):
            return False
        return any(
            row == "parked" and self._keys[number] == key for number, row in enumerate(state.rows)
        )

    def _stored(self, state: State) -> Iterator[int]:
        return (number for number, row in enumerate(state.rows) if row == "stored")

    def _hold(self, state: State, me: int, rows: tuple[int, ...]) -> State:
        locks = tuple(me if row in rows else held for row, held in enumerate(state.locks))
        state = _set(state._replace(locks=locks), me, at="publish", rows=rows, seen_rows=())
        if not self.has("marks come after the publish"):
            state = _mark(state, dict.fromkeys(rows, "marked"))
        return state

    # --- publish and mark -----------------------------------------------------------------------

    @step
    def publish(self, state: State, me: int) -> Iterator[Outcome]:
        """Publish the next row; one whose key has failed before is given back.

        Models `conquiet.relay.relay._publish_in_order`; unordered, the sink's `publish_each`.
        """
        relay = state.relays[me]
        if relay.at != "publish":
            return
        row = relay.rows[len(relay.answers)]
        if self._is_blocked(relay):
            yield f"row {row} given back", self._answer(state, me, "given back")
            return
        yield f"row {row} confirmed", self._answer(_send(state, row), me, "confirmed")
        yield f"row {row} failed", self._answer(state, me, "failed")
        if state.losses:
            lost = _send(state, row)._replace(losses=state.losses - 1, had_fault=True)
            yield f"row {row} failed", self._answer(lost, me, "failed")

    def _is_blocked(self, relay: Relay) -> bool:
        """Return whether an earlier row of the next one's key has failed in this claim."""
        if not self._ordered or not self.has("a failed row blocks those behind it"):
            return False
        tried = zip(relay.rows, relay.answers, strict=False)
        failed = {self._keys[other] for other, answer in tried if answer != "confirmed"}
        return self._keys[relay.rows[len(relay.answers)]] in failed

    def _answer(self, state: State, me: int, answer: str) -> State:
        relay = state.relays[me]
        answers = (*relay.answers, answer)
        at = "settle" if len(answers) == len(relay.rows) else "publish"
        return _set(state, me, answers=answers, at=at)

    @step
    def settle(self, state: State, me: int) -> Iterator[Outcome]:
        """Mark published rows, count failures or park, and commit, in the claiming transaction.

        Models `conquiet.sql.claim.Claimer.settle` and `conquiet.sql.outbox_source.Claim._end`.
        """
        relay = state.relays[me]
        if relay.at != "settle":
            return
        answers = dict(zip(relay.rows, relay.answers, strict=True))
        failed = tuple(row for row, answer in answers.items() if answer == "failed")
        published = {row: "marked" for row, answer in answers.items() if answer == "confirmed"}
        kept = tuple(row for row in relay.delayed if row not in published)
        ended = _release(_set(state, me, **_ENDED), me)
        if relay.is_cut:
            yield "lost", ended
            return
        delayed = tuple(sorted({*kept, *failed}))
        yield "committed", _set(_mark(ended, published), me, delayed=delayed)
        if failed:  # the last attempt, or a permanent error
            parked = published | dict.fromkeys(failed, "parked")
            yield "committed", _set(_mark(ended, parked), me, delayed=kept)
        if state.losses:
            lost = ended._replace(losses=state.losses - 1, had_fault=True)
            yield "lost", lost
            yield "lost", _mark(lost, published)

    @step
    def wait(self, state: State, me: int) -> Iterator[Outcome]:
        """End the delays of failed rows, and go on from the start, as after a second.

        Models `conquiet.sql.claim.RowBackoff.ids`.
        """
        relay = state.relays[me]
        if relay.at == "idle" and relay.delayed:
            yield "a delay is over", _set(state, me, delayed=())
        if relay.at == "idle" and relay.behind >= 0 and self.has("claims start over"):
            yield "a second is over", _set(state, me, behind=-1)

    # --- faults ---------------------------------------------------------------------------------

    @step
    def crash(self, state: State, me: int) -> Iterator[Outcome]:
        """Die; a row may have been sent just before, and its confirmation not read."""
        relay = state.relays[me]
        if not state.crashes or relay.at == "idle":
            return
        dead = _set(state._replace(crashes=state.crashes - 1, had_fault=True), me, **_DEAD)
        if self.has("locks end with the connection"):
            dead = _release(dead, me)
        yield "", dead
        if relay.at == "publish" and not self._is_blocked(relay):
            yield "", _send(dead, relay.rows[len(relay.answers)])

    @world
    def the_database_ends_a_transaction(self, state: State) -> Iterator[Outcome]:
        """Free the locks of a relay that is still publishing."""
        for me, relay in enumerate(state.relays):
            if state.losses and relay.at in ("publish", "settle") and not relay.is_cut:
                cut = _set(state, me, is_cut=True)._replace(losses=state.losses - 1, had_fault=True)
                yield f"of process {me}", _release(cut, me)

    @world
    def a_writer_commits(self, state: State) -> Iterator[Outcome]:
        """Store a row; ids are given before the commit, so that a lower one may come later."""
        for number, row in enumerate(state.rows):
            earlier = range(number)
            if row == "unwritten" and not any(
                state.rows[other] == "unwritten" and self._keys[other] == self._keys[number]
                for other in earlier
            ):
                yield f"row {number}", _mark(state, {number: "stored"})

    @world
    def an_operator_acts(self, state: State) -> Iterator[Outcome]:
        """Let parked rows be tried again; hold a lock on the first row for a moment.

        Models `conquiet.relay.inspection.Inspection.retry` and any statement that locks a row.
        """
        for number, row in enumerate(state.rows):
            if row == "parked":
                yield f"row {number} is tried again", _mark(state, {number: "stored"})
        if not self._ordered:
            return
        if state.locks[0] == OPERATOR:
            yield "unlocks row 0", state._replace(locks=(FREE, *state.locks[1:]))
        elif state.locks[0] == FREE and state.rows[0] == "stored":
            yield "locks row 0", state._replace(locks=(OPERATOR, *state.locks[1:]))


_ENDED = {"at": "idle", "keys": (), "rows": (), "answers": (), "is_cut": False}
_DEAD = Relay()._asdict()


def _set(state: State, me: int, **changes: object) -> State:
    relays = list(state.relays)
    relays[me] = relays[me]._replace(**changes)
    return state._replace(relays=tuple(relays))


def _release(state: State, me: int) -> State:
    return state._replace(locks=tuple(FREE if held == me else held for held in state.locks))


def _mark(state: State, marks: dict[int, str]) -> State:
    rows = tuple(marks.get(number, row) for number, row in enumerate(state.rows))
    return state._replace(rows=rows)


def _send(state: State, row: int) -> State:
    sent = list(state.sent)
    sent[row] = min(2, sent[row] + 1)
    return state._replace(sent=tuple(sent))


def _names(rows: tuple[int, ...]) -> str:
    return f"rows {' '.join(map(str, rows))}"
