"""Model of the inbox in Redis: stream, lease, fence, EXEC, outbox and ack.

A producer has sent one message twice, as two entries of a stream. Workers read entries, lease the
key of the message, handle it and write effect, event, `done` and ack in one EXEC. Leases end at any
moment, also of processes that are alive (they were frozen). A process dies between any two of its
steps; replies are lost, and an EXEC whose reply was lost may still come to the server much later.

A transaction has one message here. The rest of its batch shows itself in one way only: EXEC may be
fenced, or the handler fail, for a reason that lies in another message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.models.checker import Model, Outcome, step, world

UNREAD, ACKED = -1, -2
ABSENT, DONE = 0, -1
"""Values of the inbox key; others are the tokens of leases."""
CLEAN, DIRTY, CUT, NONE = "watches", "dirty", "cut", ""
"""States of a connection's WATCH: nothing changed, the key changed, disconnected, no WATCH."""


class Worker(NamedTuple):
    """A consumer of the group, which runs one transaction at a time."""

    at: str = "idle"
    entry: int = -1
    """The delivery that it holds."""
    token: int = 0
    """The lease of its transaction."""
    is_fresh: bool = False
    """Whether its message was not done before."""
    watch: str = NONE
    abandoned: int = 0
    """The lease that `LeaseTerms` remembers as abandoned by this process."""


class Late(NamedTuple):
    """A request whose sender waits no longer; the server may receive it still."""

    kind: str
    entry: int
    token: int
    watch: str = NONE


class State(NamedTuple):
    """The server, the processes, and which faults may still happen."""

    entries: tuple[tuple[int, bool], ...]
    """For each entry its consumer, and whether it has been idle for longer than the lease."""
    key: int
    effects: int
    event: str
    """Where the event is: nowhere, in the outbox, read by a relay, in the log, out of the outbox"""
    published: bool
    workers: tuple[Worker, ...]
    late: tuple[Late, ...]
    crashes: int
    losses: int


class RedisInbox(Model):
    """The worker of `conquiet.redis` over one message in several entries."""

    guards: ClassVar[Mapping[str, str]] = {
        "WATCH": "took effect 2 times",
        "the token is compared": "hold the lease",
        "WATCH comes before the comparison": "hold the lease",
        "done is written in the EXEC": "took effect 2 times",
        "a lease is not yet done": "acked, and had no effect",
        "leases end": "stuck",
        "the ack comes with the EXEC": "acked, and had no effect",
        "a lost lease is not released": "took effect 2 times",
        "renewal compares again": "hold the lease",
        "an abandoned lease is compared": "hold the lease",
        "an unknown outcome keeps the key": "took effect 2 times",
        "the event is written in the EXEC": "no event",
        "a relay acks what it has published": "stuck",
    }
    hidden = frozenset(("handle", "redeliver", "run_again"))

    def __init__(
        self,
        *,
        workers: int = 2,
        entries: int = 2,
        crashes: int = 1,
        losses: int = 1,
        without: str = "",
    ) -> None:
        super().__init__(without=without)
        self.processes = workers
        self._bounds = (entries, crashes, losses)

    def initial(self) -> State:
        entries, crashes, losses = self._bounds
        workers = (Worker(),) * self.processes
        unread = ((UNREAD, False),) * entries
        return State(unread, ABSENT, 0, "nowhere", False, workers, (), crashes, losses)

    def is_done(self, state: State) -> bool:
        return (
            all(owner == ACKED for owner, _ in state.entries)
            and state.effects == 1
            and state.published
            and state.event == "gone"
        )

    def wrong(self, state: State) -> str | None:
        if state.effects > 1:
            return "the message took effect 2 times"
        if state.effects and state.event == "nowhere" and not state.published:
            return "the message took effect, and there is no event"
        if not state.effects and any(owner == ACKED for owner, _ in state.entries):
            return "the message was acked, and had no effect"
        holders = [
            number
            for number, worker in enumerate(state.workers)
            if worker.is_fresh and worker.at in ("handle", "ready") and worker.watch == CLEAN
        ]
        if self.has("WATCH") and len(holders) > 1:
            return f"the workers {holders} hold the lease at the same time"
        return None

    def canonical(self, state: State) -> State:
        """Number tokens in the order in which they occur; forget those that the key cannot have."""
        names: dict[int, int] = {}
        possible = {state.key, *(item.token for item in state.late if item.kind == "set")}
        if not self.has("an abandoned lease is compared"):
            possible.update(worker.abandoned for worker in state.workers)

        def name(token: int) -> int:
            return names.setdefault(token, len(names) + 1) if token > 0 else token

        key = name(state.key)
        workers = tuple(
            worker
            if worker.token <= 0 and not worker.abandoned
            else worker._replace(
                token=name(worker.token),
                abandoned=name(worker.abandoned) if worker.abandoned in possible else 0,
            )
            for worker in state.workers
        )
        late = state.late
        if late:
            late = tuple(
                sorted(
                    item._replace(token=name(item.token) if item.kind == "set" else 0)
                    for item in late
                )
            )
        return State(key=key, workers=workers, late=late, **_rest(state))

    # --- reading --------------------------------------------------------------------------------

    @step
    def read(self, state: State, me: int) -> Iterator[Outcome]:
        """Read a new entry, claim a stale one, or find an own one of a lost reply.

        Models `conquiet.redis.consumer.Consumer.collect_pending` and `collect_new`.
        """
        if state.workers[me].at != "idle":
            return
        for entry, (owner, is_idle) in enumerate(state.entries):
            if owner in (UNREAD, me) or (owner >= 0 and is_idle):
                held = _own(state, entry, me)
                if not self.has("the ack comes with the EXEC"):
                    held = _own(state, entry, ACKED)
                yield f"entry {entry}", _set(held, me, at="begun", entry=entry)
                if state.losses:
                    yield "lost", held._replace(losses=state.losses - 1)

    @step
    def redeliver(self, state: State, me: int) -> Iterator[Outcome]:
        """Deliver a nacked entry again if it is still ours, else let go of it.

        Models `conquiet.redis.redelivery.Redelivery.take` with
        `conquiet.redis.consumer.Consumer.redeliver`.
        """
        worker = state.workers[me]
        if worker.at != "nacked":
            return
        if state.entries[worker.entry][0] == me:
            yield "again", _set(_own(state, worker.entry, me), me, at="begun")
        else:
            yield "let go", _set(state, me, at="idle", entry=-1)

    @step
    def run_again(self, state: State, me: int) -> Iterator[Outcome]:
        """Run a message again whose transaction failed, or nack it.

        Models `conquiet.transaction.Batches.process` and
        `conquiet.redis.transaction.Transaction.commit`.
        """
        if state.workers[me].at == "failed":
            yield "in place", _set(state, me, at="begun")
            yield "nack", _set(state, me, at="nacked")

    # --- the lease ------------------------------------------------------------------------------

    @step
    def lease(self, state: State, me: int) -> Iterator[Outcome]:
        """Send SET NX, WATCH and MGET; other clients may come between any two of them.

        Models `conquiet.redis.lease.Leases.acquire`.
        """
        worker = state.workers[me]
        if worker.at == "begun":
            token = _new_token(state)
            if not self.has("a lease is not yet done"):
                yield from self._lease_as_done(state, me)
                return
            if state.key == ABSENT:
                yield "", _set(self._write(state, token), me, at="set", token=token)
            else:
                yield "", _set(state, me, at="set", token=token)
            if state.losses:
                late = Late("set", worker.entry, token)
                lost = state._replace(losses=state.losses - 1, late=(*state.late, late))
                yield "lost", self._abandon(lost, me, token)
        elif worker.at == "set" and self.has("WATCH comes before the comparison"):
            yield "", _set(state, me, at="watched", watch=CLEAN)
        elif worker.at in ("set", "watched"):
            yield from self._compare(state, me)
        elif worker.at == "compared":
            yield "ours", _set(state, me, at="handle", watch=CLEAN)
        if worker.at in ("set", "watched") and state.losses:
            lost = state._replace(losses=state.losses - 1)
            yield "lost", self._abandon(lost, me, worker.token)

    def _compare(self, state: State, me: int) -> Iterator[Outcome]:
        """Decide by the value of MGET, as `conquiet.redis.lease.Leases._state` does."""
        worker = state.workers[me]
        if state.key == DONE:
            done = {"at": "ready", "is_fresh": False, "token": 0, "watch": worker.watch or CLEAN}
            yield "done", _set(state, me, **done)
            return
        found = state.key
        is_ours = found == worker.token
        if found not in (ABSENT, worker.token) and worker.abandoned:
            exact = self.has("an abandoned lease is compared")
            is_ours = found == worker.abandoned or not exact
        if not self.has("the token is compared"):
            is_ours = True
        if not is_ours:
            yield "held", _set(state, me, at="nacked", token=0, watch=NONE)
            return
        ours = _set(state, me, token=found, is_fresh=True, abandoned=0)
        if found == worker.token:
            ours = _set(ours, me, abandoned=worker.abandoned)
        if self.has("WATCH comes before the comparison"):
            yield "ours", _set(ours, me, at="handle")
        else:
            yield "", _set(ours, me, at="compared")

    def _lease_as_done(self, state: State, me: int) -> Iterator[Outcome]:
        if state.key == ABSENT:
            fresh = _set(self._write(state, DONE), me, at="handle", is_fresh=True, watch=CLEAN)
            yield "ours", fresh
        else:
            yield "done", _set(state, me, at="ready", is_fresh=False, watch=CLEAN)

    @step
    def renew(self, state: State, me: int) -> Iterator[Outcome]:
        """Renew the lease under MULTI, WATCH again, compare again, while the handler runs.

        Models `conquiet.redis.lease.Leases.renew`.
        """
        worker = state.workers[me]
        if worker.at == "handle" and worker.is_fresh and worker.watch in (CLEAN, DIRTY):
            if worker.watch == DIRTY:
                yield "lost", _set(state, me, watch=CUT)
            else:  # EXEC ends the WATCH
                yield "", _set(_touch(state, but=me), me, at="renewing", watch=NONE)
        elif worker.at == "renewing":
            if state.key == worker.token or not self.has("renewal compares again"):
                yield "kept", _set(state, me, at="handle", watch=CLEAN)
            else:
                yield "lost", _set(state, me, at="handle", watch=CUT)

    # --- the transaction ------------------------------------------------------------------------

    @step
    def handle(self, state: State, me: int) -> Iterator[Outcome]:
        """Run the handler, which queues its commands, or fails; so may one of its batch.

        Models `conquiet.redis.transaction.Unit.queue` and `conquiet.redis.outbox.Outbox`.
        """
        if state.workers[me].at == "handle":
            yield "works", _set(state, me, at="ready")
            yield "fails", _set(state, me, at="discard")

    @step
    def exec(self, state: State, me: int) -> Iterator[Outcome]:
        """Send MULTI … EXEC with effect, event, `done` and XACK.

        Models `conquiet.redis.transaction.Unit.commit`.
        """
        worker = state.workers[me]
        if worker.at == "confirm":
            yield "applied", _set(self._write(state, DONE), me, **_FREE)
            return
        if worker.at != "ready":
            return
        failed = self._abandon(state, me, worker.token)
        if worker.watch == CUT:
            yield "not applied", failed
            return
        if worker.watch == CLEAN:
            free = _set(state, me, **_FREE)
            yield "applied", self._apply(free, me, worker.entry, worker.is_fresh)
        yield "not applied", failed  # refused, or fenced by another message of the batch
        if state.losses:
            lost = _set(failed, me, at="nacked")._replace(losses=state.losses - 1)
            if not self.has("an unknown outcome keeps the key"):
                lost = self._write(lost, ABSENT)
            if worker.watch == CLEAN:
                applied = self._apply(lost, -1, worker.entry, worker.is_fresh)
                if not self.has("an unknown outcome keeps the key"):
                    applied = self._write(applied, ABSENT)
                yield "unknown", applied
            yield "unknown", lost._replace(late=(*lost.late, self._late(worker)))

    def _late(self, worker: Worker) -> Late:
        kind = "fresh" if worker.is_fresh else "seen"
        return Late(kind, worker.entry, worker.token, worker.watch)

    def _apply(self, state: State, me: int, entry: int, is_fresh: bool) -> State:
        """Write what the EXEC has."""
        if is_fresh:
            is_stored = self.has("the event is written in the EXEC")
            state = state._replace(effects=min(2, state.effects + 1))
            state = state._replace(event="stored" if is_stored else "nowhere")
            if self.has("done is written in the EXEC"):
                state = self._write(state, DONE)
            elif me >= 0:  # a command of its own, afterwards
                return _set(_own(state, entry, ACKED), me, at="confirm", entry=entry)
        return _own(state, entry, ACKED)

    @step
    def discard(self, state: State, me: int) -> Iterator[Outcome]:
        """Give the lease back after a failure, unless it was lost.

        Models `conquiet.redis.transaction.Unit.discard`.
        """
        worker = state.workers[me]
        if worker.at != "discard":
            return
        failed = _set(state, me, at="failed", token=0, is_fresh=False, watch=NONE)
        is_ours = worker.watch == CLEAN or not self.has("a lost lease is not released")
        yield "done", self._write(failed, ABSENT) if is_ours else failed
        if worker.watch == CUT:
            yield "done", self._abandon(state, me, worker.token)

    def _abandon(self, state: State, me: int, token: int) -> State:
        """Remember a lease as `conquiet.redis.lease.LeaseTerms.abandon` does."""
        abandoned = token or state.workers[me].abandoned
        return _set(_end(state, me), me, at="failed", abandoned=abandoned)

    # --- faults ---------------------------------------------------------------------------------

    @step
    def crash(self, state: State, me: int) -> Iterator[Outcome]:
        """Die; an EXEC or a SET may have been sent just before."""
        worker = state.workers[me]
        if not state.crashes or worker.at == "idle":
            return
        dead = _set(state._replace(crashes=state.crashes - 1), me, **_FREE, abandoned=0)
        yield "", dead
        if worker.at == "ready" and worker.watch != CUT:
            yield "", dead._replace(late=(*dead.late, self._late(worker)))
        elif worker.at == "begun":
            late = Late("set", worker.entry, _new_token(state))
            yield "", dead._replace(late=(*dead.late, late))

    @world
    def a_late_request_arrives(self, state: State) -> Iterator[Outcome]:
        """Run a request of a connection whose other end is gone, or notice that it is closed."""
        for item in state.late:
            left = list(state.late)
            left.remove(item)
            gone = state._replace(late=tuple(left))
            yield "is dropped", gone
            if item.kind == "set":
                if state.key == ABSENT:
                    yield "SET", self._write(gone, item.token)
            elif item.watch == CLEAN:
                yield "EXEC", self._apply(gone, -1, item.entry, item.kind == "fresh")

    @world
    def the_lease_ends(self, state: State) -> Iterator[Outcome]:
        """Expire the key; `done` stays for as long as copies may come."""
        if state.key > 0 and self.has("leases end"):
            yield "", self._write(state, ABSENT)

    @world
    def an_entry_is_idle(self, state: State) -> Iterator[Outcome]:
        """Let the time pass after which other consumers may claim an entry."""
        for entry, (owner, is_idle) in enumerate(state.entries):
            if owner >= 0 and not is_idle:
                yield f"entry {entry}", _own(state, entry, owner, is_idle=True)

    # --- the relay ------------------------------------------------------------------------------

    @world
    def a_relay_works(self, state: State) -> Iterator[Outcome]:
        """Read the event, publish it, delete it with its ack; or die and read it again.

        Only when the workers have ended: none of their steps depends on a relay's.

        Models `conquiet.redis.outbox.OutboxSource` under `conquiet.relay.relay.Relay`.
        """
        if any(owner != ACKED for owner, _ in state.entries):
            return
        acks_first = not self.has("a relay acks what it has published")
        if state.event == "stored":
            yield "reads", state._replace(event="gone" if acks_first else "read")
            if acks_first:
                yield "reads and publishes", state._replace(event="gone", published=True)
        elif state.event == "read":
            yield "publishes", state._replace(event="sent", published=True)
            yield "dies", state._replace(event="stored")
        elif state.event == "sent":
            yield "acks", state._replace(event="gone")
            yield "dies", state._replace(event="stored")

    def _write(self, state: State, value: int) -> State:
        """Write the inbox key; connections that watch it learn of it."""
        state = state._replace(key=value)
        return _touch(state) if self.has("WATCH") else state


def _rest(state: State) -> dict[str, object]:
    return {name: getattr(state, name) for name in _REST}


_REST = ("entries", "effects", "event", "published", "crashes", "losses")
_FREE = {"at": "idle", "entry": -1, "token": 0, "is_fresh": False, "watch": NONE}


def _set(state: State, me: int, **changes: object) -> State:
    workers = list(state.workers)
    workers[me] = workers[me]._replace(**changes)
    return state._replace(workers=tuple(workers))


def _end(state: State, me: int) -> State:
    """End the transaction of a worker; its own writes do not concern it any more."""
    return _set(state, me, **(_FREE | {"entry": state.workers[me].entry}))


def _own(state: State, entry: int, owner: int, *, is_idle: bool = False) -> State:
    entries = list(state.entries)
    entries[entry] = (owner, is_idle)
    return state._replace(entries=tuple(entries))


def _touch(state: State, *, but: int = -1) -> State:
    """Let every connection that watches the key know that it was written."""
    workers = tuple(
        worker._replace(watch=DIRTY) if worker.watch == CLEAN and number != but else worker
        for number, worker in enumerate(state.workers)
    )
    late = tuple(item._replace(watch=DIRTY) if item.watch else item for item in state.late)
    return state._replace(workers=workers, late=late)


def _new_token(state: State) -> int:
    used = [state.key, *(max(worker.token, worker.abandoned) for worker in state.workers)]
    return max(0, *used, *(item.token for item in state.late)) + 1
