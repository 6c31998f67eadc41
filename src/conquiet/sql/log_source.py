"""Read an outbox as a source: consumer groups over the log, without a broker.

    row of the log ──read──▶ in flight ──ack──▶ settled; the position moves past it
                                │ nack: a row of retries, so that the position can pass it
                                │       ──backoff──▶ in flight ──max_attempts──▶ dead letter
                                │ nack with a Blameless error: in flight again, at its place
                                └ crash: the lease ends, another member reads it again

A group has partitions, which its members share (`conquiet.sql.log_group`). An event's key picks its
partition, so that the events of a key are read by one member, in their order.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, get_args

from sqlalchemy import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from conquiet import attempts, inbox
from conquiet.acking import Acking, Error
from conquiet.errors import (
    Blameless,
    ConfigError,
    HandlerError,
    InvalidMessage,
    PermanentError,
    StoreError,
    TryLater,
    handler_of,
)
from conquiet.handler import SKIPPED, Process, Result
from conquiet.message import ERRORS, Message, describe, new_id, printable
from conquiet.registry import open_database
from conquiet.secret import mask
from conquiet.sql import dialect
from conquiet.sql.log import POSITION, Position
from conquiet.sql.log_group import (
    LAST,
    Delivery,
    GroupTables,
    LogRow,
    Lost,
    Move,
    Park,
    PartitionRow,
    Start,
    Tenure,
    is_covered,
)
from conquiet.sql.notification import Wakeup, wakeup_of
from conquiet.sql.outbox_source import check_attempts, stored_message
from conquiet.sql.promotion import Promoter
from conquiet.sql.schema import OUTBOX_TABLE, outbox_table
from conquiet.sql.transaction import current
from conquiet.stage import Middleware, Stage, stage_of

logger = logging.getLogger("conquiet.sql")

MAX_PARTITIONS = 64
DEFAULT_PARTITIONS = 8
_BEAT_SECONDS = 1.0
"""How often at least a member looks for free partitions and for requests of other members."""
_HAND_OVER_SECONDS = 3.0
"""How long a partition waits for the member that asked for it, which may have died since."""
_CAREFUL_MESSAGES = 200
"""After a crash of a member, up to so many messages of a partition that were there by then are read
one by one: one of them may have caused it, and only the first that is not settled is blamed. If it
is behind them, the next crash finds the position that much nearer to it."""

_FLAG = {"true": True, "false": False}.__getitem__
_SETTINGS: dict[str, Any] = {
    "topic": str,
    "group": str,
    "table": str,
    "partitions": int,
    "start": str,
    "lease": float,
    "exactly_once": str,
    "producers_repeat": _FLAG,
    "poll": float,
    "wakeup": _FLAG,
}
"""The parameters of a URL that are the source's, and how they are read."""

ExactlyOnce = Literal["inbox", "position"]


class LogSource:
    """Reads the events of a topic in an outbox as one member of a group.

    Groups are independent of each other. The members of a group, in threads, processes or on
    machines, share its partitions; a member that dies is replaced when its `lease` ends. The number
    of `partitions` is fixed when the group is created (8 by default) and limits how many members
    can work at once. Events of one key are delivered in their order.

    A nacked message is retried after `backoff` seconds, then after twice as long each time, up to
    `max_backoff`; later messages of its key wait behind it. At `max_attempts` it becomes a dead
    letter of the group, and so does one with a `PermanentError` at once.

    An event is delivered at least once: use an `Inbox` in the router. If the effects are in this
    database, `exactly_once="position"` lets a worker add a `PositionInbox` to the chain instead;
    `producers_repeat=False` says that no event is written to the log twice.

    `engine` is one of SQLAlchemy's, or a URL; `table` is that of the outbox. `start` says where a
    new group begins: at the `beginning` of what is kept, or `now`. An idle `read` polls every
    `poll` seconds, and at once when a writer notifies it (`wakeup`).
    """

    delivery_type = Delivery

    def __init__(
        self,
        engine: Engine | str | URL,
        topic: str,
        group: str,
        *,
        table: str = OUTBOX_TABLE,
        partitions: int | None = None,
        start: Start = "beginning",
        lease: float = 30.0,
        poll: float = 0.5,
        wakeup: bool = True,
        max_attempts: int = 10,
        backoff: float = 0.05,
        max_backoff: float = 5.0,
        exactly_once: ExactlyOnce = "inbox",
        producers_repeat: bool = True,
    ) -> None:
        _check(topic, group, partitions, start)
        if exactly_once not in get_args(ExactlyOnce):
            choices = ", ".join(get_args(ExactlyOnce))
            raise ConfigError(f"exactly_once={exactly_once!r:.40}: choose one of {choices}")
        for name, seconds in (("lease", lease), ("poll", poll)):
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name}={seconds!r}: must be a number of seconds above 0")
        for name, seconds in (("backoff", backoff), ("max_backoff", max_backoff)):
            if not seconds >= 0:
                raise ConfigError(f"{name}={seconds!r}: must be 0 seconds or more")
        self.engine = dialect.as_engine(engine)
        self._owns_engine = self.engine is not engine
        if self.engine.dialect.is_async:
            raise ConfigError("LogSource takes a sync Engine, or a URL: give it engine.url")
        self.topic = topic
        self.group = group
        self.start = start
        self.lease = lease
        self.poll = poll
        self.max_attempts = check_attempts(max_attempts)
        self.member = f"{socket.gethostname()}-{os.getpid()}-{new_id()[-12:]}"
        self.late = 0
        """How many settlements came after the partition was lost, and were ignored."""
        self.dead_by_handler: Counter[str] = Counter()
        """Dead letters by the handler that failed last; `""` for what reached none."""
        self.tables = GroupTables(self.engine, table, topic, group)
        self.inbox: PositionInbox | None = None
        """The middleware that a worker adds to its router."""
        if exactly_once == "position":
            self.inbox = PositionInbox(self, producers_repeat=producers_repeat)
        self._reader = self.engine
        if dialect.is_postgresql(self.engine.dialect):  # no round trips of BEGIN and ROLLBACK
            self._reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._asked_partitions = partitions
        self._backoff = backoff
        self._delays_hold_keys = True
        self._max_backoff = max_backoff
        self._wakeup: Wakeup = wakeup_of(self.engine, outbox_table(table).fullname, enabled=wakeup)
        self._promoter = Promoter(self.engine, table, self._wakeup.look)
        self._held: dict[int, Tenure] = {}
        self._returned: list[Delivery] = []
        """Messages that were given back, in the order of the log."""
        self._some_wait = False
        """Whether messages of our partitions may wait for a retry."""
        self._retry_at = float("inf")
        self._horizon = Position()
        self._partitions = 0
        self._renewed_at = 0.0
        self._beat_at = 0.0
        self._closed = False
        self._busy = threading.RLock()  # held during statements of this source's own transactions
        self._memory = threading.Lock()  # guards tenures; never held during a statement

    @classmethod
    def from_url(cls, url: str, *, max_attempts: int | None = None) -> LogSource:
        """Open the source of `postgresql://HOST/NAME?topic=…&group=…`, or of `sqlite:///FILE?…`.

        Also `table`, `partitions`, `start`, `lease`, `exactly_once`, `producers_repeat`, `poll` and
        `wakeup`; other parameters are the database's. A URL of an async driver opens the same
        database by the sync one.
        """
        engine, settings = open_log(url)
        if max_attempts is not None:
            settings["max_attempts"] = max_attempts
        try:
            source = cls(engine, **settings)
        except BaseException:
            engine.dispose()
            raise
        source._owns_engine = True
        return source

    @property
    def dead(self) -> int:
        """Return how many messages became dead letters."""
        return self.dead_by_handler.total()

    @property
    def positions(self) -> str:
        """The table of positions."""
        return self.tables.positions

    def allow_delays(self, attempts: int, *, ordered: bool) -> None:
        """Let messages wait in the table of retries; see `conquiet.source.Delaying`."""
        self.max_attempts = max(self.max_attempts, attempts)
        self._delays_hold_keys = ordered

    # --- reading ----------------------------------------------------------------------------

    def read(self, limit: int, timeout: float) -> Sequence[Message[bytes]]:
        if limit < 1:
            raise ConfigError(f"limit={limit}: read at least 1 message")
        deadline = time.monotonic() + timeout
        while not self._closed:
            with self._busy, self._store_errors():
                if time.monotonic() >= self._beat_at:
                    self._beat()
                self._promoter.promote(limit)
                messages = self._take(limit)
            now = time.monotonic()
            if messages or now >= deadline:
                return messages
            due = now + self._promoter.seconds_to_next()
            until = min(deadline, now + self.poll, self._retry_at, self._beat_at, due)
            self._wakeup.wait(max(until - now, 0.001))
        return ()

    def _take(self, limit: int) -> list[Message[bytes]]:
        if not self._held or self._closed:
            return []
        if any(tenure.careful for tenure in self._held.values()):
            limit = 1
        taken: list[Delivery] = []
        try:
            while len(taken) < limit:
                taken += self._take_again(limit - len(taken))
                fetched = self._fetch(limit - len(taken)) if len(taken) < limit else None
                if fetched is None:
                    break
                taken += fetched
        except BaseException:
            self._keep_for_next_read()
            raise
        return self._messages(sorted(taken, key=_place))

    def _keep_for_next_read(self) -> None:
        """Keep the messages that were read before the store failed; the next read has them."""
        with self._memory:
            for tenure in self._held.values():
                unread = [item for item in tenure.order if not item.is_out and not _is_gone(item)]
                known = set(self._returned)
                for item in unread:
                    if item not in known:
                        insort(self._returned, item, key=_place)
                for id_, item in tuple(tenure.retries.items()):
                    if not item.is_out:
                        del tenure.retries[id_]  # it is claimed again

    def _take_again(self, limit: int) -> list[Delivery]:
        """Take retries that are due, and messages that were given back, in the order of the log."""
        keys = self._find_waiting_keys(self._returned)
        waiting = [item for item in self._returned if item.key in keys]
        if waiting:
            self._write(settled=waiting, parked=[Park(item, 0, 0.0, None) for item in waiting])
        retries = self._take_retries(limit) if time.monotonic() >= self._retry_at else []
        with self._memory:
            alive = [item for item in (*self._returned, *retries) if not _is_gone(item)]
            alive.sort(key=_place)
            taken, rest = alive[:limit], alive[limit:]
            self._returned = [item for item in rest if not item.is_retry]
        over = [item for item in rest if item.is_retry]
        if over:
            self._write(given_back=over)
        return taken

    def _fetch(self, limit: int) -> list[Delivery] | None:
        """Read new rows of the partitions that are furthest behind; None if there are none."""
        readable = [tenure for tenure in self._held.values() if not tenure.is_leaving]
        if not readable:
            return None
        after = min(tenure.cursor for tenure in readable)
        behind = [tenure for tenure in readable if tenure.cursor == after]
        until = min((t.cursor for t in readable if t.cursor > after), default=None)
        with self._connect() as connection:
            if until is None:
                if after >= self._horizon:
                    self._horizon = self.tables.horizon(connection, after)
                until = self._horizon
            if after >= until:
                self._note_caught_up(behind)
                return None
            # Retries of an earlier member have their place where it had parked them.
            ends = [last for t in behind for _, last in t.settled if last > after]
            until = min([until, *ends])
            chosen = None if len(behind) == self._partitions else [t.partition for t in behind]
            rows = self.tables.rows(connection, after, until, chosen, self._partitions, limit)
        reached = until if len(rows) < limit else Position(rows[-1].xid, rows[-1].id)
        fresh: list[Delivery] = []
        with self._memory:
            for row in rows:
                tenure = self._held[row.partition]
                position = Position(row.xid, row.id)
                attempts = self._attempts(tenure) if tenure.crashes else 1
                delivery = Delivery(tenure, row, position, attempts)
                tenure.order.append(delivery)
                if tenure.settled and any(one <= position <= end for one, end in tenure.settled):
                    delivery.is_settled = True
                else:
                    fresh.append(delivery)
                if tenure.careful:
                    tenure.careful -= 1
            for tenure in behind:
                tenure.cursor = reached
                tenure.trim()
        if reached == self._horizon:
            self._note_caught_up(behind)
        self._blame(fresh)
        return self._without_waiting(fresh)

    def _note_caught_up(self, tenures: Iterable[Tenure]) -> None:
        """Read in batches again: all was read that a member which died can have had."""
        for tenure in tenures:
            tenure.careful = 0

    def _blame(self, fresh: Sequence[Delivery]) -> None:
        """Count a crash before the message that may have caused one is delivered again, alone."""
        for item in fresh:
            tenure = item.tenure
            if not tenure.crashes:
                continue
            is_first = bool(tenure.order) and tenure.order[0] is item
            if is_first and item.attempts <= self.max_attempts:
                with self._one_statement() as connection:
                    self.tables.blame(connection, self.member, tenure.partition)
                tenure.is_blamed = True

    def _attempts(self, tenure: Tenure) -> int:
        """Return how often the next row is delivered, with crashes of the members before."""
        if tenure.is_at_position and tenure.crashes > 1:
            return 1 + tenure.crashes
        return min(2, self.max_attempts)  # it may have been in flight, and is perhaps not to blame

    def _without_waiting(self, fresh: list[Delivery]) -> list[Delivery]:
        """Park messages whose key waits for a retry, and those that killed their members."""
        keys = self._find_waiting_keys(fresh)
        if not keys and not any(item.attempts > self.max_attempts for item in fresh):
            return fresh
        parks = []
        for item in fresh:
            if item.attempts > self.max_attempts:
                why = f"delivered {item.attempts - 1} times and never settled"
                parks.append(Park(item, item.attempts - 1, 0.0, PermanentError(why), True))
            elif item.key in keys:
                parks.append(Park(item, 0, 0.0, None))
        self._write(settled=[park.delivery for park in parks], parked=parks)
        return [item for item in fresh if not _is_gone(item)]

    def _find_waiting_keys(self, items: Iterable[Delivery]) -> set[str]:
        """Return those of their keys with a message that waits for a retry."""
        keys = {item.key for item in items if item.key is not None} if self._some_wait else None
        if not keys:
            return set()
        with self._connect() as connection:
            return self.tables.find_waiting_keys(connection, keys)

    def _take_retries(self, limit: int) -> list[Delivery]:
        held = {t.partition: t for t in self._held.values() if not t.is_leaving}
        # Those that an earlier member had parked come after what it had left behind.
        until = min((t.cursor for t in held.values() if not t.has_caught_up), default=LAST)
        out = [id_ for tenure in self._held.values() for id_ in tenure.retries]
        with self._begin() as connection:
            due = self.tables.claim_retries(connection, list(held), out, until, limit)
            rows = self.tables.rows_by_id(connection, list(due), self._partitions) if due else []
        taken: list[Delivery] = []
        exhausted: list[Park] = []
        with self._memory:
            for row in rows:
                tenure = held[row.partition]
                position = Position(row.xid, row.id)
                tried = due[row.id]
                delivery = Delivery(
                    tenure, row, position, tried.attempts, tried.errors, is_retry=True
                )
                tenure.retries[row.id] = delivery
                if delivery.attempts > self.max_attempts:
                    why = f"delivered {delivery.attempts - 1} times and never settled"
                    error = PermanentError(why)
                    exhausted.append(Park(delivery, delivery.attempts - 1, 0.0, error, True))
                else:
                    taken.append(delivery)
        if exhausted:
            self._write(settled=[park.delivery for park in exhausted], parked=exhausted)
        if len(due) < limit:
            self._look_at_retries()
        return taken

    def hurry(self) -> None:
        """Make all messages due that wait for a retry; those of other members, too."""
        with self._busy, self._store_errors():
            with self._begin() as connection:
                self.tables.hurry(connection)
            self._retry_at = 0.0

    def _look_at_retries(self) -> None:
        """Learn whether messages wait for a retry, and when the next one is due."""
        out = [id_ for tenure in self._held.values() for id_ in tenure.retries]
        with self._connect() as connection:
            seconds = self.tables.seconds_to_retry(connection, list(self._held), out)
        self._some_wait = bool(out) or seconds < math.inf
        self._retry_at = time.monotonic() + seconds

    def _messages(self, taken: Sequence[Delivery]) -> list[Message[bytes]]:
        messages: list[Message[bytes]] = []
        broken: list[tuple[Delivery, Error]] = []
        for delivery in taken:
            row = delivery.row
            try:
                message = stored_message(row, Acking(self, delivery), delivery.attempts)
            except InvalidMessage as error:
                broken.append((delivery, error))
                continue
            message.topic = self.topic
            if delivery.errors is not None:
                message.locals[ERRORS] = attempts.read(delivery.errors)
            messages.append(message)
        with self._memory:
            for delivery in taken:
                delivery.is_out = True
        if broken:
            self.settle((), broken)
        return messages

    # --- settling ---------------------------------------------------------------------------

    def settle(self, acked: Sequence[Delivery], nacked: Sequence[tuple[Delivery, Error]]) -> None:
        with self._busy:
            parked: list[Park] = []
            given_back: list[Delivery] = []
            with self._memory:
                done = [delivery for delivery in acked if self._accept(delivery)]
                for delivery, error in nacked:
                    if not self._accept(delivery):
                        continue
                    if not isinstance(error, Blameless):
                        parked.append(self._park(delivery, error))
                    elif delivery.is_retry:
                        given_back.append(delivery)
                    else:
                        insort(self._returned, delivery, key=_place)
            unwritten = [item for item in done if not item.is_moved]
            with self._memory:
                for item in done:
                    if item.is_moved:
                        _note_settled(item)
            if not unwritten and not parked and not given_back:
                return
            settled = [*unwritten, *(park.delivery for park in parked)]
            with self._store_errors():
                self._write(settled=settled, parked=parked, given_back=given_back)

    def _accept(self, delivery: Delivery) -> bool:
        if _is_gone(delivery) or not delivery.is_out:
            self.late += 1
            return False
        delivery.is_out = False
        return True

    def _park(self, delivery: Delivery, error: Error) -> Park:
        attempts = delivery.attempts
        dead = attempts >= self.max_attempts or isinstance(error, PermanentError)
        if isinstance(error, TryLater):
            holds_key = self._delays_hold_keys
            return Park(delivery, attempts, error.seconds, error.cause, holds_key=holds_key)
        seconds = min(self._max_backoff, self._backoff * 2.0 ** min(attempts - 1, 60))
        return Park(delivery, attempts, seconds, error, dead)

    def _write(
        self,
        *,
        settled: Sequence[Delivery] = (),
        parked: Sequence[Park] = (),
        given_back: Sequence[Delivery] = (),
    ) -> None:
        """Write settlements in a transaction of their own; drop the partitions if it fails.

        Whether a transaction that failed was committed is unknown: the partitions are loaded again.
        """
        touched = [*settled, *given_back]
        if not touched:
            return
        failed = {park.delivery for park in parked}
        done = [item for item in settled if item.is_retry and item not in failed]
        is_plain = not (parked or given_back or done)
        try:
            with self._one_statement() if is_plain else self._begin() as connection:
                self.tables.park(connection, [park for park in parked if not _is_again(park)])
                self.tables.fail(connection, [park for park in parked if _is_again(park)])
                self.tables.remove_retries(connection, [item.row.id for item in done])
                self.tables.give_back(connection, [item.row.id for item in given_back])
                self.move(connection, touched, durably=False)
        except Lost as lost:  # of the others nothing is written either
            self._drop(lost.tenures)
            self.late += sum(map(_is_gone, touched))
            self._write(
                settled=[item for item in settled if not _is_gone(item)],
                parked=[park for park in parked if not _is_gone(park.delivery)],
                given_back=[item for item in given_back if not _is_gone(item)],
            )
            return
        except BaseException:
            self._drop({item.tenure for item in touched})
            raise
        with self._memory:
            for item in touched:
                _note_settled(item)
        for park in parked:
            self._note_parked(park)
        if given_back or done:
            self._look_at_retries()

    def _note_parked(self, park: Park) -> None:
        delivery = park.delivery
        if park.is_dead:
            self.dead_by_handler[handler_of(park.error)] += 1
            logger.error(
                "dead letter of group %s attempts=%d row=%s: %s",
                *(self.group, park.attempts, delivery.position),
                printable(f"{delivery.row.event_type} id={delivery.row.event_id}: {park.reason}"),
            )
            self._retry_at = 0.0 if delivery.is_retry else self._retry_at  # its key may go on
            return
        self._some_wait = True
        self._retry_at = min(self._retry_at, time.monotonic() + park.seconds)

    def move(
        self, connection: Connection, deliveries: Iterable[Delivery], *, durably: bool = True
    ) -> None:
        """Move the positions past deliveries; raise `Lost` if a partition is no longer ours.

        Without `durably`, a crash of the server may lose the move, and they come again.
        """
        by_tenure: dict[Tenure, set[Delivery]] = {}
        for delivery in deliveries:
            if delivery.tenure.is_lost:
                raise Lost({delivery.tenure})
            by_tenure.setdefault(delivery.tenure, set()).add(delivery)
        if not by_tenure:
            return
        self.tables.advance(connection, self.member, by_tenure, self._memory, durably=durably)

    def find_done(self, connection: Connection, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Return which deliveries a transaction has committed whose end is not known here."""
        for item in deliveries:
            item.is_moved = False
            if item.tenure.is_lost:
                raise Lost([item.tenure])
        tried = [item for item in deliveries if item.is_tried]
        if not tried:
            return set()
        # By a lock, which waits for a commit that the server is still at.
        rows = self.tables.lock(connection, sorted({item.tenure.partition for item in tried}))
        waiting = self.tables.find_retries(connection, [t.row.id for t in tried if t.is_retry])
        return {
            item
            for item in tried
            if (
                item.row.id not in waiting
                if item.is_retry
                else is_covered(rows[item.tenure.partition], item.position)
            )
        }

    def confirm(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """Move the positions past deliveries and their retries, in the caller's transaction."""
        retries = [item.row.id for item in deliveries if item.is_retry]
        for item in deliveries:
            item.is_tried = True
        if self.tables.remove_retries(connection, retries) != len(retries):
            raise Lost({item.tenure for item in deliveries})
        try:
            self.move(connection, deliveries)
        except Lost as lost:
            self.note_lost(lost.tenures)
            raise
        for item in deliveries:
            item.is_moved = True

    def _drop(self, tenures: Iterable[Tenure]) -> None:
        with self._memory:
            for tenure in tenures:
                tenure.is_lost = True
                if self._held.get(tenure.partition) is tenure:
                    del self._held[tenure.partition]
            self._returned = [item for item in self._returned if not item.tenure.is_lost]
        self._beat_at = 0.0

    def note_lost(self, tenures: Collection[Tenure]) -> None:
        """Note, in a thread that does not read, that other members have taken these `tenures`."""
        with self._memory:
            for tenure in tenures:
                tenure.is_lost = True
        self._beat_at = 0.0  # the next read drops them

    # --- membership -------------------------------------------------------------------------

    def renew(self, messages: Sequence[Message[Any]]) -> None:
        """Extend the leases of all partitions of this member."""
        with self._busy, self._store_errors():
            if self._held and time.monotonic() - self._renewed_at >= self.lease / 4:
                with self._begin() as connection:
                    self._renew(connection)

    def _renew(self, connection: Connection) -> None:
        known = self.tables.renew(connection, self.member, self.lease)
        self._renewed_at = time.monotonic()
        gone = {tenure for tenure in self._held.values() if tenure.partition not in known}
        if gone:
            logger.warning(
                "group %s of %s: lost %d partitions to other members; their messages in flight"
                " are delivered there",
                *(self.group, self.topic, len(gone)),
            )
            self._drop(gone)

    def _beat(self) -> None:
        """Renew leases, take free partitions, hand over or ask for some."""
        now = time.monotonic()
        seconds = min(self.lease / 3, _BEAT_SECONDS)
        self._drop([tenure for tenure in self._held.values() if tenure.is_lost])
        with self._begin() as connection:
            rows = self._rows(connection)
            if self._held and now - self._renewed_at >= self.lease / 3:
                self._renew(connection)
                self._write_idle(connection)
            taken = [
                row.partition
                for row in rows
                if row.owner is None
                or row.seconds_left <= 0
                or (row.owner == self.member and row.partition not in self._held)
            ]
            taken = [number for number in taken if number not in self._held]
            if taken:
                self._adopt(self.tables.take(connection, self.member, self.lease, taken))
            self._hand_over(connection, rows)
            self._ask(connection, rows)
            others = [row.seconds_left for row in rows if row.owner not in (None, self.member)]
        self._beat_at = now + min([seconds, *(max(left, 0.01) for left in others)])
        if self._held:
            self._look_at_retries()

    def _rows(self, connection: Connection) -> Sequence[PartitionRow]:
        rows = self.tables.survey(connection)
        if not rows:
            count = self._asked_partitions or DEFAULT_PARTITIONS
            self.tables.create(connection, count, self.start)
            rows = self.tables.survey(connection)
        if self._asked_partitions not in (None, len(rows)):
            raise ConfigError(
                f"group {self.group!r} of topic {self.topic!r} has {len(rows)} partitions, not"
                f" {self._asked_partitions}; leave the argument out, use another group, or remove"
                " this one: conquiet streams remove-group"
            )
        self._partitions = len(rows)
        return rows

    def _adopt(self, rows: Iterable[PartitionRow]) -> None:
        for row in rows:
            position = Position(row.xid, row.id)
            tenure = Tenure(row.partition, row.version, position, position, row.ranges, row.crashes)
            tenure.careful = _CAREFUL_MESSAGES if row.crashes else 0
            self._held[row.partition] = tenure
            self._horizon = Position()  # an older one may not cover what its former member had read
        self._renewed_at = time.monotonic()

    def _hand_over(self, connection: Connection, rows: Sequence[PartitionRow]) -> None:
        """Give partitions that other members ask for, once no message of them is in flight."""
        for row in rows:
            tenure = self._held.get(row.partition)
            if tenure is None or row.claimant is None or row.owner != self.member:
                continue
            tenure.is_leaving = True
            with self._memory:
                if not tenure.is_drained():
                    continue
                move = Move.of(tenure, ())
            lease = min(self.lease, _HAND_OVER_SECONDS)  # the claimant extends it
            self.tables.hand_over(connection, self.member, row.claimant, lease, move)
            self._drop([tenure])

    def _ask(self, connection: Connection, rows: Sequence[PartitionRow]) -> None:
        """Ask the member with the most partitions for half of what it has more than this one."""
        owners: dict[str, list[PartitionRow]] = {}
        for row in rows:
            if row.owner not in (None, self.member) and row.seconds_left > 0:
                owners.setdefault(str(row.owner), []).append(row)
        asked = sum(row.claimant == self.member for rows in owners.values() for row in rows)
        richest: list[PartitionRow] = max(owners.values(), key=len, default=[])
        wanted = (len(richest) - len(self._held) - asked) // 2
        free = [row.partition for row in richest if row.claimant is None][: max(wanted, 0)]
        if free:
            self.tables.ask(connection, self.member, free)

    def _write_idle(self, connection: Connection) -> None:
        """Write positions that moved past rows of other topics, or past rows that an earlier member
        had settled, where nothing is in flight."""
        with self._memory:
            idle = [tenure for tenure in self._held.values() if not tenure.order]
            moves = [
                Move.of(tenure, ())
                for tenure in idle
                if tenure.cursor > tenure.written or (tenure.settled and tenure.has_caught_up)
            ]
            for move in moves:
                move.tenure.written = move.position
                if move.tenure.has_caught_up:
                    move.tenure.settled = ()
        if moves:
            self.tables.move(connection, self.member, moves)

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Release the partitions; what is not settled is delivered by the next member."""
        self._closed = True
        self._wakeup.close()
        with self._busy:
            if self._partitions:  # else it has taken none
                self._release(list(self._held.values()))
        if self._owns_engine:
            self.engine.dispose()

    def _release(self, held: Sequence[Tenure]) -> None:
        try:
            with self._begin() as connection:
                with self._memory:
                    moves = [Move.of(tenure, ()) for tenure in held]
                if moves:
                    self.tables.move(connection, self.member, moves)
                blamed = [tenure.partition for tenure in held if tenure.is_blamed]
                if blamed:
                    self.tables.clear(connection, self.member, blamed)
                self.tables.release(connection, self.member)
        except SQLAlchemyError as error:
            logger.warning(
                "could not release the partitions of group %s; other members take them within"
                " %g s: %s",
                *(self.group, self.lease, dialect.one_line(error)),
            )
        self._drop(held)

    def replay(self, start: str | None = None, end: str | None = None) -> Iterator[Message[bytes]]:
        """Yield the events of the topic from `start` to `end`, both inclusive; no group moves."""
        first = Position.parse(start) if start else Position()
        after = Position(first.xid, first.id - 1) if start else first
        with self._store_errors(), self._connect() as connection:
            until = self.tables.horizon(connection, after)
            until = min(Position.parse(end), until) if end else until
        rows: Sequence[LogRow] = ()
        while after < until:
            with self._store_errors(), self._connect() as connection:
                rows = self.tables.rows(connection, after, until, None, 1, 1_000)
            for row in rows:
                message = stored_message(row, None, 1)
                message.topic = self.topic
                message.locals[POSITION] = str(Position(row.xid, row.id))
                yield message
            if len(rows) < 1_000:
                break
            after = Position(rows[-1].xid, rows[-1].id)

    def __repr__(self) -> str:
        return f"<LogSource topic={self.topic!r} group={self.group!r}>"

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        """Open a connection for reading: each statement is a transaction of its own."""
        with self._reader.connect() as connection:
            yield connection

    def _one_statement(self) -> AbstractContextManager[Connection]:
        """Open a connection for one statement that writes."""
        return self._begin() if dialect.is_sqlite(self.engine.dialect) else self._connect()

    def _begin(self) -> AbstractContextManager[Connection]:
        return dialect.begin_to_write(self.engine)

    def _store_errors(self) -> AbstractContextManager[None]:
        return dialect.raise_store_errors(self.engine)


def _place(delivery: Delivery) -> Position:
    return delivery.position


def _is_gone(delivery: Delivery) -> bool:
    return delivery.is_settled or delivery.tenure.is_lost


def _is_again(park: Park) -> bool:
    return park.delivery.is_retry


def _note_settled(delivery: Delivery) -> None:
    tenure = delivery.tenure
    delivery.is_settled = True
    delivery.is_out = False
    tenure.retries.pop(delivery.row.id, None)
    before = tenure.written
    tenure.trim()
    if tenure.written != before:
        tenure.crashes = 0
        tenure.is_blamed = False


def open_log(url: str, **options: Any) -> tuple[Engine, dict[str, Any]]:
    """Create the engine of a source's URL, and return it with the source's own settings."""
    try:
        address = make_url(url)
    except ArgumentError:
        raise ConfigError(
            f"{mask(url)} is not a database URL; write"
            " postgresql://USER@HOST/NAME?topic=orders&group=billing"
        ) from None
    given = {name: address.query[name] for name in _SETTINGS if name in address.query}
    for name in ("topic", "group"):
        if not given.get(name):
            raise ConfigError(
                f"{dialect.display_url(address)}: say which {name}, as in"
                " ?topic=orders&group=billing"
            )
    if "," in given["topic"]:
        raise ConfigError(
            f"topic={given['topic']!r:.80} in the URL: the log of a database is read by topic;"
            " start a worker for each"
        )
    settings: dict[str, Any] = {}
    for name, text_ in given.items():
        if not isinstance(text_, str):
            raise ConfigError(f"{name} is in the URL {len(text_)} times; give it once")
        try:
            settings[name] = _SETTINGS[name](text_)
        except ValueError:
            raise ConfigError(f"{name}={text_!r:.40} in the URL is not a number") from None
        except KeyError:
            raise ConfigError(f"{name}={text_!r:.40} in the URL: choose true or false") from None
    address = address.difference_update_query(list(given))
    for name in dialect.unknown_parameters(address):
        raise ConfigError(
            f"{dialect.display_url(address)}: {name!r:.40} is a parameter neither of the source"
            f" ({', '.join(_SETTINGS)}) nor of {address.get_backend_name()}"
        )
    return open_database(address, "the source", **options), settings


def _check(topic: str, group: str, partitions: int | None, start: str) -> None:
    for name, value in (("topic", topic), ("group", group)):
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{name}={value!r}: give the name of a {name}")
    if start not in get_args(Start):
        raise ConfigError(f"start={start!r}: choose one of {', '.join(get_args(Start))}")
    if partitions is not None and (
        isinstance(partitions, bool)
        or not isinstance(partitions, int)
        or not 1 <= partitions <= MAX_PARTITIONS
    ):
        raise ConfigError(
            f"partitions={partitions!r}: must be a whole number from 1 to {MAX_PARTITIONS}"
        )


# --- in the transaction of the effects --------------------------------------------------------


class PositionSource(Protocol):
    """A source whose position is kept in a database, and can move in the caller's transaction."""

    @property
    def delivery_type(self) -> type:
        """The class of its tokens."""

    @property
    def engine(self) -> Engine: ...

    @property
    def positions(self) -> str:
        """The table of positions."""

    def find_done(self, connection: Connection, deliveries: Sequence[Any]) -> Collection[Any]:
        """Return which deliveries the position has passed; raise `Lost` if one is not ours."""

    def confirm(self, connection: Connection, deliveries: Sequence[Any]) -> None:
        """Move the position past deliveries; raise `Lost` if a partition is no longer ours."""


class PositionInbox:
    """Middleware: moves the position of a source in the transaction of the effects.

    The source is a `LogSource`, or a `KafkaSource` with `positions=engine`. In place of an `Inbox`,
    where effects and positions are in one database: one UPDATE per batch instead of a row per
    message. It protects against redelivery, not against an event that was written to
    the log twice: say by `producers_repeat=False` that this does not happen. Events that handlers
    return into an `Outbox` behind an inbox are written once. A message has one handler.
    """

    stage = Stage.INBOX

    def __init__(self, source: PositionSource, *, producers_repeat: bool = True) -> None:
        if producers_repeat:
            raise ConfigError(
                "PositionInbox would handle an event twice that a producer wrote to the log twice,"
                " as at-least-once producers do, such as a bridge from Kafka or Redis; say"
                " producers_repeat=False (in a URL: producers_repeat=false), or use Inbox(…)"
            )
        self.source = source
        self.table = source.positions

    def check_chain(self, middlewares: Sequence[Middleware]) -> None:
        """Refuse a chain whose transaction is in another database than the positions."""
        others = [item for item in middlewares if item is not self]
        if any(stage_of(item) in (Stage.INBOX, Stage.CLAIM) for item in others):
            raise ConfigError(
                "the router has two inboxes, and one of them is the PositionInbox of the source:"
                " take the other out of the chain, or use exactly_once='inbox'"
            )
        for item in middlewares:
            if stage_of(item) is not Stage.TRANSACTION:
                continue
            engine = getattr(item, "engine", None)
            ours = self.source.engine
            if not isinstance(engine, Engine) or not (
                engine.pool is ours.pool or dialect.is_same_database(engine, ours)
            ):
                raise ConfigError(
                    "PositionInbox moves the position in the transaction of the effects, and it is"
                    f" kept in {dialect.display_url(ours.url)}: give Transaction the engine of the"
                    f" {type(self.source).__name__}, or use Inbox(…)"
                )
            if getattr(item, "isolate", "batch") != "batch":
                raise ConfigError(
                    "PositionInbox moves the position once per transaction, and"
                    " isolate='savepoint' handles each message by itself: use isolate='batch', or"
                    " Inbox(…)"
                )

    def admit(self, message: Message[Any]) -> None:
        """Refuse a message of another source, and one that several handlers take."""
        if message.origin is not message:
            raise HandlerError(
                f"{describe(message.attributes)}: two handlers take it, and a position cannot say"
                " which of them is done; use Inbox(…) in place of PositionInbox"
            )
        kind = self.source.delivery_type
        if message.acking is None or not isinstance(message.acking.token, kind):
            raise HandlerError(
                f"{describe(message.attributes)} was not read by the {type(self.source).__name__}"
                " of the PositionInbox; use Inbox(…)"
            )

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            unit = current("the position inbox")
            unit.use_table(self.table)
            deliveries = [message.acking.token for message in batch if message.acking is not None]
            with _lost_errors():
                done = self.source.find_done(unit.connection, deliveries)
            fresh = [index for index, item in enumerate(deliveries) if item not in done]
            results: list[Result] = [SKIPPED] * len(batch)
            if not fresh:
                return results
            handled = next(batch if not done else [batch[index] for index in fresh])
            for index, result in zip(fresh, handled, strict=True):
                if isinstance(result, Exception):
                    return handled  # the transaction rolls back
                if result:
                    raise inbox.outputs_without_outbox(batch[index])
                results[index] = result
            with _lost_errors():
                self.source.confirm(unit.connection, [deliveries[index] for index in fresh])
            unit.note_write()
            return results

        return process


@contextmanager
def _lost_errors() -> Iterator[None]:
    try:
        yield
    except Lost as lost:
        error = StoreError("another member of the group has the partition; it handles the batch")
        error.is_outage = True  # no message of the batch is the cause
        raise error from lost
