"""History: what handlers, relays and groups did, minute by minute, kept in the store for a day.

    messages ──▶ Recorder counts in memory ──every 10 s, by its own thread──▶ Keeper ──▶ dashboard
                                             Redis: conquiet:history:*, or a table: outbox_history

All processes add to the same figures, so that their number does not depend on that of processes. A
figure is a counter, to which writes are added, or a gauge, which the last write sets. Messages
never wait for it: a write that fails is logged and tried again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from conquiet.errors import Blameless, ConquietError
from conquiet.handler import AROUND, SKIPPED, Process, Result
from conquiet.message import Message
from conquiet.middleware.dead_letter import IS_DEAD
from conquiet.middleware.metrics import ANY_TYPE, NO_HANDLER, labels_of, time_call

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.relay.relay import Relay
    from conquiet.worker import Worker

logger = logging.getLogger("conquiet.history")

KEPT_MINUTES = 24 * 60
WRITE_SECONDS = 10.0
ALIVE_SECONDS = 3.5 * WRITE_SECONDS
"""A process that has not written for so long is silent."""
_PROBE_SECONDS = 60.0
"""How often the lag of groups is looked at, and counted."""
_LOST_SECONDS = 60.0
"""Figures that could not be written for so long are dropped: added later, they would be a peak."""
_CLOSE_SECONDS = 2.0
_MOST_NAMES = 1_000
"""Combinations of handler, type and figure that are counted between two writes."""
_MOST_STREAMS = 64
_NAME_CHARS = 200

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the buckets of durations, in seconds; another bucket has what is longer."""
_BUCKETS = (*(f"<={bound:g}" for bound in BOUNDS), "<=inf")

SEEN = "seen"
ENDED = "ended"
_MOMENTS = (SEEN, ENDED)
"""Gauges whose value is the time of the store."""
GAUGES = frozenset((*_MOMENTS, "lag", "behind", "waiting", "parked", "oldest", "in_flight"))


class Key(NamedTuple):
    """Names a figure: of a handler and a type, a group and a stream, a relay, or a process."""

    kind: str
    name: str
    type: str
    figure: str


Figures = Mapping[Key, float]


class Entry(NamedTuple):
    """A figure of one minute, or of the step that begins with it."""

    minute: int
    key: Key
    value: float


@dataclass(frozen=True)
class History:
    """Holds what a keeper has, and the time of its store."""

    now: float
    entries: tuple[Entry, ...] = ()


class Keeper(Protocol):
    """Keeps figures in a store for a day."""

    def write(self, figures: Figures) -> None:
        """Add counters to the present minute, and set gauges; raise `ConquietError` if it fails."""

    def read(self, minutes: int, step: int = 1, kind: str = "", name: str = "") -> History:
        """Return the last `minutes`, in steps of so many: sums of counters, maxima of gauges."""

    def close(self) -> None:
        """Close the connections that were opened here."""


# --- recorder -------------------------------------------------------------------------------

Probe = Callable[[], Figures]
"""Returns figures that are looked at, not counted; called every minute."""


class Recorder:
    """Counts what the handlers of a process do, and writes it to a keeper every ten seconds.

    As a middleware of a router it counts calls, errors, retries and dead letters of each handler,
    and how long its calls take. `read` returns figures of the process at each write: what they
    count since the last one, and gauges.
    """

    def __init__(
        self,
        keeper: Keeper,
        name: str = "",
        role: str = "worker",
        *,
        read: Callable[[], Figures] = dict,
        probes: Sequence[Probe] = (),
        seconds: float = WRITE_SECONDS,
    ) -> None:
        self.keeper = keeper
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.role = role
        self._read = read
        self._probes = probes
        self._seconds = seconds
        self._lock = threading.Lock()
        self._counts: Counter[Key] = Counter()
        self._unwritten: dict[Key, float] = {}
        self._written_at = time.monotonic()
        self._probe_at = 0.0
        self._is_failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conquiet-history", daemon=True)

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            failed: set[int] = set()
            token = AROUND.set((partial(time_call, self._observe, failed), *AROUND.get()))
            results: Sequence[Result] | None = None
            try:
                results = next(batch)
                return results
            finally:
                AROUND.reset(token)
                self._count_results(batch, results)

        return process

    def _observe(self, message: Message[Any], seconds: float, again: int) -> None:
        handler, type_ = labels_of(message)
        bucket = next((at for at, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))
        made = partial(Key, "handler", handler, type_)
        with self._lock:
            self._add(made("calls"), 1)
            self._add(made("seconds"), seconds)
            self._add(made(_BUCKETS[bucket]), 1)
            if again:
                self._add(made("retries"), again)

    def _count_results(
        self, batch: Sequence[Message[Any]], results: Sequence[Result] | None
    ) -> None:
        outcomes = Counter(
            (labels_of(message), outcome)
            for at, message in enumerate(batch)
            for outcome in _outcomes(message, results[at] if results else None)
        )
        with self._lock:
            for ((handler, type_), outcome), count in outcomes.items():
                self._add(Key("handler", handler, type_, outcome), count)

    def _add(self, key: Key, value: float) -> None:
        if key in self._counts or len(self._counts) < _MOST_NAMES:
            self._counts[key] += value  # type: ignore[assignment]  # seconds are not whole

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def close(self) -> None:
        """Write the rest and close the keeper; wait no longer than two seconds for it."""
        if self._ended.is_set() or self._thread.ident is None:
            return
        self._ended.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            has_ended = self._ended.wait(self._seconds)
            self.write(ENDED if has_ended else SEEN)
            if has_ended:
                self.keeper.close()
                return

    def write(self, moment: str = SEEN) -> None:
        """Write what was counted; after a failure the next write has it too."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        given: dict[Key, float] = {Key("process", self.name, self.role, moment): 0.0}
        try:
            given |= self._read()
            if not self._ended.is_set() and time.monotonic() >= self._probe_at:
                self._probe_at = time.monotonic() + _PROBE_SECONDS
                for probe in self._probes:
                    given |= probe()
        except Exception as error:  # a figure must not end the thread
            logger.debug("a figure could not be read: %s", error, exc_info=True)
        for key, value in (*counts.items(), *given.items()):
            former = 0.0 if key.figure in GAUGES else self._unwritten.get(key, 0.0)
            self._unwritten[key] = former + value
        try:
            self.keeper.write(self._unwritten)
        except Exception as error:  # noqa: BLE001 - a store may fail in any way
            self._note_failure(error)
            return
        self._unwritten = {}
        self._written_at = time.monotonic()
        self._is_failing = False

    def _note_failure(self, error: Exception) -> None:
        if time.monotonic() - self._written_at > _LOST_SECONDS:
            self._unwritten = {}
        level = logging.DEBUG if self._is_failing else logging.WARNING
        logger.log(
            level,
            "could not write the history that the dashboard shows (%s); messages are not affected,"
            " and it is tried again",
            error,
        )
        self._is_failing = True


def _outcomes(message: Message[Any], result: Result | None) -> tuple[str, ...]:
    """Return the figures that a result counts in; dead letters of a source it counts itself."""
    if result is SKIPPED:
        return ("duplicates",)
    if isinstance(result, Blameless):
        return ("given_back",)
    if result is None or isinstance(result, Exception):
        return ("errors",)
    return ("errors", "dead") if message.has_locals and IS_DEAD in message.locals else ("ok",)


# --- of workers and relays ------------------------------------------------------------------


def record(
    workers: Sequence[Worker], relay: Relay | None = None, *, table: str = ""
) -> Recorder | None:
    """Return the recorder of the workers, and the relay, of a process; None if no store keeps it.

    Call it before they start; `start()` it then, and `close()` it in the end. It writes to Redis if
    messages come from Redis or go there, else to the database of their transaction, beside the
    outbox `table`.
    """
    keeper = find_keeper(*_places(workers, relay), table=table)
    if keeper is None:
        return None
    consumers = [getattr(worker.source, "consumer", None) for worker in workers]
    own = f"{socket.gethostname()}-{os.getpid()}"
    name = next((one for one in consumers if isinstance(one, str)), own)
    parts = (("worker", bool(workers)), ("relay", relay is not None))
    role = " and ".join(word for word, is_part in parts if is_part)
    made = Recorder(
        keeper,
        name,
        role,
        read=_Totals(workers, relay, Key("process", name, role, "in_flight"), table).read,
        probes=[partial(_lags, worker.source) for worker in workers],
    )
    for worker in workers:
        try:
            if not any(isinstance(item, Recorder) for item in worker.router.middlewares):
                worker.router.insert(made)
        except ConquietError:  # it has started: its process is seen, its handlers are not counted
            continue
    return made


def _places(workers: Sequence[Worker], relay: Relay | None) -> Iterable[Any]:
    for worker in workers:
        yield worker.source
    if relay is not None:
        yield relay.sink
        yield relay.source
    for worker in workers:
        yield from worker.router.middlewares
        yield worker.sink


def find_keeper(*places: Any, table: str = "") -> Keeper | None:
    """Return a keeper in the store of the first of sources, sinks and middlewares that has one."""
    table = table or next((one for one in map(_table_of, places) if one), "outbox")
    for place in places:
        if (client := _redis_of(_attribute(place, "client"))) is not None:
            return RedisKeeper(client)
        if (engine := _engine_of(_attribute(place, "engine"))) is not None:
            return TableKeeper(engine, table)
    return None


def _attribute(place: Any, name: str) -> Any:
    """Return an attribute, or None: that of a KafkaSource without positions raises."""
    try:
        return getattr(place, name, None)
    except ConquietError:
        return None


def _table_of(place: Any) -> str:
    table = _attribute(place, "table")
    name = getattr(table, "fullname", None)
    return name if isinstance(name, str) and hasattr(table, "columns") else ""


def _redis_of(client: Any) -> Any:
    """Return a blocking client of the same Redis; None if it is no client of Redis."""
    try:
        import redis
        import redis.asyncio
    except ImportError:
        return None
    if isinstance(client, (redis.Redis, redis.RedisCluster)):
        return client
    if not isinstance(client, redis.asyncio.Redis):
        return None
    known = client.connection_pool.connection_kwargs
    given = {
        name: known[name]
        for name in known
        if name in ("host", "port", "db", "username", "password") or name.startswith("ssl_")
    }
    if "path" in known:
        given["unix_socket_path"] = known["path"]
    pool = client.connection_pool.connection_class
    return redis.Redis(**given, ssl=issubclass(pool, redis.asyncio.SSLConnection))


def _engine_of(engine: Any) -> Engine | None:
    """Return a blocking engine of the same database; None if another thread cannot use it."""
    try:
        from sqlalchemy import Engine

        from conquiet.sql import dialect
    except ImportError:
        return None
    given = getattr(engine, "sync_engine", engine)
    if not isinstance(given, Engine) or given.dialect.name not in ("postgresql", "sqlite"):
        return None
    if dialect.is_sqlite(given.dialect) and dialect.is_in_memory(given):
        return None  # its one connection is that of the messages
    if not given.dialect.is_async:
        return given
    try:
        return dialect.engine(given.url, pool_size=1)
    except ConquietError as error:
        logger.info("no history of handlers is written: %s", error)
        return None


class _Totals:
    """Reads what workers and relay count by themselves, as the change since the last read."""

    def __init__(
        self, workers: Sequence[Worker], relay: Relay | None, in_flight: Key, table: str
    ) -> None:
        self._workers = workers
        self._relay = relay
        self._in_flight = in_flight
        self._of_relay = partial(Key, "relay", table or "outbox", "")
        self._former: dict[Key, float] = {}
        self._dead: dict[tuple[int, Key], int] = {}
        """How many dead letters of each worker's source, by handler, were reported."""

    def read(self) -> Figures:
        found: dict[Key, float] = {}
        if self._workers:
            found[self._in_flight] = sum(worker.health().in_flight for worker in self._workers)
        for worker in self._workers:
            types = {one.name: one.type or ANY_TYPE for one in worker.router.handlers}
            for handler, total in Counter(getattr(worker.source, "dead_by_handler", ())).items():
                name = handler or NO_HANDLER
                key = Key("handler", name, types.get(name, ANY_TYPE), "dead")
                place = (id(worker), key)
                found[key] = found.get(key, 0.0) + total - self._dead.get(place, 0)
                self._dead[place] = total
        if self._relay is None:
            return found
        for figure, total in (
            ("published", self._relay.published),
            ("failed", self._relay.failed),
        ):
            key = self._of_relay(figure)
            found[key] = total - self._former.get(key, 0.0)
            self._former[key] = total
        count = getattr(getattr(self._relay, "metrics", None), "figures", None)
        figures = None if count is None else count()
        if figures is not None:
            found[self._of_relay("waiting")] = figures.pending
            found[self._of_relay("oldest")] = figures.oldest_seconds
            found[self._of_relay("parked")] = figures.parked
        return found


def _lags(source: Any) -> Figures:
    """Return how far behind the groups of a source are: of streams, or of the log of a database."""
    if _redis_of(getattr(source, "client", None)) is not None:
        return dict(_lags_of_streams(source))
    tables = _attribute(source, "tables")
    if not hasattr(tables, "survey") or not hasattr(source, "topic"):
        return {}
    with source.engine.connect() as connection:
        lag, behind = tables.lag(connection, len(tables.survey(connection)))
    made = partial(Key, "group", source.group, source.topic)
    return {made("lag"): lag, made("behind"): behind}


def _lags_of_streams(source: Any) -> Iterable[tuple[Key, float]]:
    from conquiet.operations.streams import describe

    client = _redis_of(source.client)
    for name in source.names[:_MOST_STREAMS]:
        for group in describe(client, name).groups:
            if group.name == source.group:
                made = partial(Key, "group", group.name, name)
                yield made("lag"), group.lag
                yield made("behind"), group.behind_seconds


# --- keepers --------------------------------------------------------------------------------


def _cut(key: Key) -> Key:
    return Key(*(part.replace(_BETWEEN, " ").replace("\0", "")[:_NAME_CHARS] for part in key))


_BETWEEN = "\x1f"
_KEY_MINUTES = 10
"""Minutes in one hash of Redis."""


class RedisKeeper:
    """Keeps figures in hashes of ten minutes each, which expire after a day."""

    def __init__(self, client: Any) -> None:
        from conquiet.redis.wire import Wire

        self._wire = Wire(client)

    def write(self, figures: Figures) -> None:
        now = self._now()
        minute = int(now // 60)
        key = self._key(minute)
        commands: list[tuple[bytes, tuple[Any, ...]]] = []
        for name, value in figures.items():
            field = _BETWEEN.join((str(minute), *_cut(name))).encode()
            if name.figure in GAUGES:
                text = f"{now if name.figure in _MOMENTS else value:.3f}"
                commands.append((key, (b"HSET", key, field, text)))
            elif value:
                commands.append((key, (b"HINCRBYFLOAT", key, field, f"{value:.6g}")))
        commands.append((key, (b"EXPIRE", key, (KEPT_MINUTES + _KEY_MINUTES) * 60)))
        for _ in self._ask(commands):
            pass

    def read(self, minutes: int, step: int = 1, kind: str = "", name: str = "") -> History:
        from conquiet.redis.wire import pairs

        now = self._now()
        last = int(now // 60)
        first = (last - minutes + 1) // step * step
        keys = [self._key(at) for at in range(first, last + _KEY_MINUTES, _KEY_MINUTES)]
        sums: dict[tuple[int, Key], float] = {}
        for reply in self._ask([(key, (b"HGETALL", key)) for key in dict.fromkeys(keys)]):
            for field, text in pairs(reply).items():
                minute_text, *parts = field.decode().split(_BETWEEN)
                minute = int(minute_text)
                if minute < first or (kind and parts[0] != kind) or (name and parts[1] != name):
                    continue
                at, value = (minute // step * step, Key(*parts)), float(text)
                former = sums.get(at, 0.0)
                is_gauge = at[1].figure in GAUGES
                sums[at] = max(former, value) if is_gauge else former + value
        return History(now, tuple(Entry(*at, value) for at, value in sorted(sums.items())))

    def close(self) -> None:
        self._wire.close()

    def _now(self) -> float:
        [(seconds, micros)] = self._ask([(self._key(0), (b"TIME",))])
        return int(seconds) + int(micros) / 1e6

    def _ask(self, commands: Sequence[tuple[bytes, tuple[Any, ...]]]) -> list[Any]:
        from conquiet.operations.streams import translate_errors

        with translate_errors("history"):
            replies = self._wire.send(commands)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    @staticmethod
    def _key(minute: int) -> bytes:
        return b"conquiet:history:%d" % (minute // _KEY_MINUTES * _KEY_MINUTES)


class TableKeeper:
    """Keeps figures in the table `…_history` beside an outbox; the oldest are deleted."""

    def __init__(self, engine: Engine, outbox: str = "outbox") -> None:
        from sqlalchemy import text

        from conquiet.sql.dialect import write_epoch
        from conquiet.sql.schema import history_table

        self._engine = engine
        prepare = engine.dialect.identifier_preparer
        table = prepare.format_table(history_table(outbox))
        self._now_sql = text(f"SELECT {write_epoch(engine.dialect)}")
        gauges = ", ".join(f"'{figure}'" for figure in sorted(GAUGES))
        self._add_sql = text(
            f"INSERT INTO {table} AS former (minute, kind, name, type, figure, value)"
            " VALUES (:minute, :kind, :name, :type, :figure, :value)"
            " ON CONFLICT (minute, kind, name, type, figure) DO UPDATE SET value ="
            f" CASE WHEN excluded.figure IN ({gauges}) THEN excluded.value"
            " ELSE former.value + excluded.value END"
        )
        self._prune_sql = text(f"DELETE FROM {table} WHERE minute < :minute")
        self._read_sql = (
            "SELECT (minute / <step>) * <step>, kind, name, type, figure, sum(value), max(value)"
            f" FROM {table} WHERE minute >= :first<and> GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4"
        )
        self._pruned = 0

    def write(self, figures: Figures) -> None:
        from conquiet.sql import dialect

        engine = self._engine
        with dialect.raise_store_errors(engine), dialect.begin_to_write(engine) as connection:
            if dialect.is_postgresql(engine.dialect):
                connection.exec_driver_sql("SET LOCAL statement_timeout = 5000")
            now = float(connection.execute(self._now_sql).scalar_one())
            minute = int(now // 60)
            rows = [
                {
                    "minute": minute,
                    **_cut(key)._asdict(),
                    "value": now if key.figure in _MOMENTS else float(value),
                }
                # In one order, so that processes that write at the same time wait, and no more.
                for key, value in sorted(figures.items())
                if value or key.figure in GAUGES
            ]
            connection.execute(self._add_sql, rows)
            if minute >= self._pruned + _KEY_MINUTES:
                connection.execute(self._prune_sql, {"minute": minute - KEPT_MINUTES})
                self._pruned = minute

    def read(self, minutes: int, step: int = 1, kind: str = "", name: str = "") -> History:
        from sqlalchemy import text

        from conquiet.sql import dialect

        engine = self._engine
        given: dict[str, Any] = {}
        conditions = ""
        for column, value in (("kind", kind), ("name", name)):
            if value:
                conditions += f" AND {column} = :{column}"
                given[column] = value
        statement = self._read_sql.replace("<step>", str(int(step))).replace("<and>", conditions)
        with dialect.raise_store_errors(engine), engine.connect() as connection:
            now = float(connection.execute(self._now_sql).scalar_one())
            given["first"] = (int(now // 60) - minutes + 1) // step * step
            rows = connection.execute(text(statement), given).all()
        return History(
            now,
            tuple(
                Entry(int(row[0]), key, row[6] if key.figure in GAUGES else row[5])
                for row in rows
                for key in (Key(*row[1:5]),)
            ),
        )

    def close(self) -> None:
        """Leave the engine alone: it is its owner's."""


# --- reading --------------------------------------------------------------------------------


def quantile(buckets: Mapping[str, float], part: float) -> float | None:
    """Estimate a quantile of durations from the counts of buckets, in seconds.

    Linear within a bucket; what is longer than the last bound counts as that bound.

    >>> quantile({"<=0.1": 50, "<=0.25": 50}, 0.5), quantile({}, 0.5)
    (0.1, None)
    """
    total = sum(buckets.get(name, 0.0) for name in _BUCKETS)
    if total <= 0:
        return None
    wanted, passed, lower = part * total, 0.0, 0.0
    for name, upper in zip(_BUCKETS, (*BOUNDS, BOUNDS[-1]), strict=True):
        count = buckets.get(name, 0.0)
        if count and passed + count >= wanted:
            return lower + (upper - lower) * (wanted - passed) / count
        passed, lower = passed + count, upper
    return BOUNDS[-1]


# --- what they amount to --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandlerFigures:
    """What a handler did in a span of time."""

    name: str
    type: str
    calls: float
    rate: float
    """Messages per second, tries that failed included."""
    p50: float | None
    """Of the seconds of a call; None if there was none."""
    p95: float | None
    busy: float
    """Seconds of work in a second."""
    errors: float
    failing: float
    """The part of the tries that failed, from 0 to 1."""
    retries: float
    dead: float


@dataclass(frozen=True, slots=True)
class Report:
    """The last report of a process that has not ended by itself."""

    name: str
    role: str
    seconds: float
    """Since the report."""
    in_flight: int

    @property
    def is_alive(self) -> bool:
        return self.seconds < ALIVE_SECONDS


def span(entries: Collection[Entry], now: float, minutes: int) -> float:
    """Return how many seconds of the last `minutes` there has been something in."""
    first = min((entry.minute for entry in entries), default=0)
    begun = max(first * 60, now - minutes * 60)
    return max(now - begun, 60.0) if entries else 0.0


def list_handlers(entries: Iterable[Entry], seconds: float) -> list[HandlerFigures]:
    """Return what each handler did in a span of so many seconds."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for entry in entries:
        if entry.key.kind == "handler":
            figures = found.setdefault((entry.key.name, entry.key.type), {})
            figures[entry.key.figure] = figures.get(entry.key.figure, 0.0) + entry.value
    return [summarize(*names, figures, seconds) for names, figures in found.items()]


def summarize(
    name: str, type_: str, figures: Mapping[str, float], seconds: float
) -> HandlerFigures:
    """Return what a handler did, by the sums of its figures in a span of so many seconds."""
    ok, errors, busy, calls, retries, dead = (
        figures.get(figure, 0.0)
        for figure in ("ok", "errors", "seconds", "calls", "retries", "dead")
    )
    tries = ok + errors
    return HandlerFigures(
        name,
        type_,
        calls,
        tries / seconds if seconds else 0.0,
        quantile(figures, 0.5),
        quantile(figures, 0.95),
        busy / seconds if seconds else 0.0,
        errors,
        errors / tries if tries else 0.0,
        retries,
        dead,
    )


def list_reports(entries: Iterable[Entry], now: float) -> Iterator[Report]:
    """Return the processes that report, unless they have ended by themselves."""
    latest: dict[Key, float] = {}
    for entry in sorted(entries):
        if entry.key.kind == "process":
            latest[entry.key] = entry.value
    for key, seen in latest.items():
        if key.figure == SEEN and latest.get(key._replace(figure=ENDED), 0.0) < seen:
            in_flight = int(latest.get(key._replace(figure="in_flight"), 0.0))
            yield Report(key.name, key.type, max(0.0, now - seen), in_flight)
