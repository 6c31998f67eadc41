"""App: name, database and broker in one object; handlers, ways to emit, workers and relay.

Everything in it can be written out: `app.router` is a `Router` whose middlewares are `Transaction`,
`Inbox` and `Outbox`; `app.workers()` are `Worker`s on its sources, `app.relay()` is a `Relay`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, overload

from conquiet.app.injection import Provider, inject, inject_all
from conquiet.app.store import Broker, Store, make_relay, make_task_relay, open_store
from conquiet.delay import delay_all, due_of, is_delayed
from conquiet.errors import ConfigError
from conquiet.event import complete
from conquiet.gate import Unknown
from conquiet.handler import Handler, Kind, function_name, type_hints
from conquiet.message import Message, describe
from conquiet.router import Router
from conquiet.schedule import KIND, Clock, Missed, Schedule, Schedules, Tick, type_of
from conquiet.shutdown import Signals
from conquiet.source import Source
from conquiet.stage import Middleware
from conquiet.task import is_signature, is_task
from conquiet.worker import Health, Worker

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine, MetaData
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    from conquiet.app.client import Client
    from conquiet.health import Health as Probes
    from conquiet.operations.history import Recorder
    from conquiet.relay.relay import Relay
    from conquiet.sql.handle import AsyncHandle, Handle

    Database = (
        Store
        | str
        | URL
        | Engine
        | AsyncEngine
        | sessionmaker[Session]
        | scoped_session[Session]
        | async_sessionmaker[AsyncSession]
    )

logger = logging.getLogger("conquiet.app")

F = TypeVar("F", bound=Callable[..., Any])

COMMAND = "command"
"""The attribute `kind` of what `send` stores: its app must have a handler for it."""
_LOOK_SECONDS = 0.05
_RELAY_SECONDS = 10.0
"""How long the relay may take to finish its batch at a stop."""
_CHECK_SECONDS = 2.0
"""How long the database may take to answer a probe."""


class App:
    """Handles commands and events of one service: effects once, events never lost.

    `name` is the topic of what it sends and emits, the group that reads, and the subscriber of its
    inbox. `database` is a URL, an engine, or a factory of sessions, sync or async; `redis://` keeps
    effects in Redis. Without a `broker` the database itself is the log; else it is the URL of one:
    redis, amqp or kafka. `metadata` has the tables of the application, for `create_tables`.
    `celery` is the Celery application that tasks, as `task.s(…)`, are sent by.

    >>> app = App("shop", database="sqlite:///shop.db")
    >>> [type(item).__name__ for item in app.router.middlewares]
    ['Transaction', 'Inbox', 'Outbox']
    """

    def __init__(
        self,
        name: str,
        database: Database,
        broker: str | None = None,
        *,
        metadata: MetaData | None = None,
        celery: Any = None,
    ) -> None:
        if not name or not isinstance(name, str):
            raise ConfigError("an app needs a name, such as 'shop': its topic, group and inbox")
        self.name = name
        self.source = f"/{name}"
        self.metadata = metadata
        self.store: Store = open_store(database, name, metadata)
        self.broker = Broker(broker, name) if broker else None
        self.celery = celery
        self.store.outbox.takes_tasks = celery is not None
        self.router = Router(unknown=self._judge_unknown)
        self.router.use(*self.store.middlewares)
        self._topics: dict[str, list[Handler]] = {}
        self._schedules: dict[str, tuple[Schedule, Handler]] = {}
        self._running: Running | None = None
        self.is_in_test = False
        """Whether `test()` has replaced database, broker and router for a while."""

    # --- handlers ---------------------------------------------------------------------------

    @overload
    def on(self, function: F, /) -> F: ...

    @overload
    def on(
        self, *, topic: str | None = None, type: str | None = None, name: str | None = None
    ) -> Callable[[F], F]: ...

    def on(
        self,
        function: Any = None,
        *,
        topic: str | None = None,
        type: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Register a handler, sync or async; the annotation of its first parameter names the type.

        Further parameters are given by annotation or by `Depends`. What it returns, an event, a
        list of events, or nothing, goes into the outbox in the same transaction. `topic` is that of
        another app; without it the handler takes its type from every topic that this app reads,
        the app's own among them. `name` is that of the handler in the inbox: pin it before renaming
        a function.
        """
        if function is not None and not callable(function):
            raise ConfigError(
                f"@app.on({function!r:.60}): name it, as in @app.on(topic='payments')"
            )
        if function is None:
            return partial(self._register, topic=topic, type=type, name=name)
        return self._register(function, topic=topic, type=type, name=name)

    def _register(self, function: F, *, topic: str | None, type: str | None, name: str | None) -> F:
        called = name or function_name(function)
        self._check_function(function, called)
        hints = type_hints(function, f"handler {called}")
        first = hints.get(next(iter(inspect.signature(function).parameters), ""))
        is_raw = (get_origin(first) or first) is Message
        handler = Handler(
            inject(function, called, self._find),
            Kind.RAW if is_raw else Kind.COMMAND,
            source=self.source,
            type=type,
            name=called,
            match=None if topic is None else partial(_is_of, topic),
        )
        self.router.add(handler)
        self._topics.setdefault(topic or self.name, []).append(handler)
        return function

    def _check_function(self, function: Callable[..., Any], name: str) -> None:
        """Refuse a function that cannot be a handler of this app."""
        if self.is_in_test:
            raise ConfigError(
                f"handler {name}: register it before app.test(), whose end would forget it"
            )

    def every(
        self,
        cron: str | None = None,
        *,
        zone: str = "UTC",
        seconds: float = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
        missed: Missed = "one",
        name: str | None = None,
    ) -> Callable[[F], F]:
        """Register a handler that is called on a schedule, once, however many processes run.

        `cron` has five fields, in the time of `zone`; else give an interval, the sum of `seconds`,
        `minutes`, `hours` and `days`, which is counted from 1970-01-01 UTC. The handler takes
        nothing, or a `Tick`, and what `on` gives by annotation or by `Depends`; what it returns
        goes into the outbox. `missed` says what happens to ticks that were due while no process
        ran: "one" is called for all of them, or "all" are, or they are skipped. `name` is that of
        the schedule, and of the handler in the inbox.
        """
        if callable(cron):
            raise ConfigError("@app.every needs a schedule: @app.every(minutes=5)")
        interval = 0.0
        for unit, count, length in (
            *(("seconds", seconds, 1), ("minutes", minutes, 60)),
            *(("hours", hours, 3_600), ("days", days, 86_400)),
        ):
            if isinstance(count, bool) or not isinstance(count, (int, float)):
                raise ConfigError(f"@app.every({unit}={count!r:.40}): give a number")
            interval += count * length

        def register(function: F) -> F:
            called = name or function_name(function)
            self._check_function(function, called)
            if called in self._schedules:
                raise ConfigError(f"schedule {called} exists; give this one a name=…")
            schedule = Schedule(called, cron=cron, zone=zone, seconds=interval, missed=missed)
            handler = Handler(
                inject_all(function, called, self._find, Tick),
                Kind.COMMAND,
                source=self.source,
                type=type_of(called),
                name=called,
                match=partial(_is_of, self.name),
            )
            self.router.add(handler)
            self._schedules[called] = (schedule, handler)
            return function

        return register

    @property
    def schedules(self) -> Schedules:
        """Return the schedules, with their state: to list, pause, resume and run them."""
        known = {name: schedule for name, (schedule, _) in self._schedules.items()}
        store = self.store
        return Schedules(known, store.schedules(), self.name, self.source, store.publish)

    def use(self, *middlewares: Middleware) -> None:
        """Add middlewares, each at the place of its stage; without a stage outside the others."""
        for item in middlewares:
            self.router.insert(item)

    def _find(self, kind: Any, is_async: bool) -> Provider | None:
        found = self.store.provider(kind, is_async)
        if found is None:
            return None

        def make() -> Any:  # by the store of the moment: `test()` replaces it
            provider = self.store.provider(kind, is_async)
            assert provider is not None, "it was there at the registration"
            return provider.make()

        return Provider(make, found.form, key=kind)

    def _judge_unknown(self, message: Message[Any]) -> Unknown:
        """Pass over events without a handler; what was sent to this app must have one.

        A tick may be of another release, which runs beside this one and has the handler.
        """
        is_ours = message.topic == self.name and message.attributes.get("kind") in (COMMAND, KIND)
        return "nack" if is_ours else "ack"

    # --- ways to emit -----------------------------------------------------------------------

    @overload
    def emit(
        self,
        transaction: Handle,
        *events: Any,
        topic: str | None = None,
        at: datetime | None = None,
        after: timedelta | float | None = None,
        **attributes: Any,
    ) -> list[str]: ...

    @overload
    def emit(
        self,
        transaction: AsyncHandle,
        *events: Any,
        topic: str | None = None,
        at: datetime | None = None,
        after: timedelta | float | None = None,
        **attributes: Any,
    ) -> Coroutine[Any, Any, list[str]]: ...

    def emit(
        self,
        transaction: Any,
        *events: Any,
        topic: str | None = None,
        at: datetime | None = None,
        after: timedelta | float | None = None,
        **attributes: Any,
    ) -> Any:
        """Write events into the outbox in your transaction; return their ids, in order.

        `transaction` is a `Session`, a `Connection`, or a connection of the driver; with an async
        one, await the result. Nothing is committed. `attributes` are those of each event, as
        `subject="order-7"`; an event may be a `Message`, or a Celery task, as `ship.s("o-1")`.

        `at`, a datetime with a time zone, or `after`, seconds or a timedelta, is when they are
        published at the earliest, by the clock of the database; until then `cancel` takes one back.
        """
        if "id" in attributes and len(events) > 1:
            raise ConfigError("one id for several events: emit them one by one")
        messages = [self.message(event, topic=topic, **attributes) for event in events]
        return self.store.outbox.add(transaction, messages, at=at, after=after)

    def send(
        self,
        command: Any,
        *,
        topic: str | None = None,
        at: datetime | None = None,
        after: timedelta | float | None = None,
        **attributes: Any,
    ) -> str:
        """Store a command, or an event, in the log at once; return its id.

        Raises if it was not stored. If the store's answer was lost, it raises too, and may have
        stored it: send it again with the same `id=…`, and it takes effect once. `topic` is the name
        of the app that it is for, by default this one; without a handler there it is a dead letter.

        With `at` or `after`, as in `emit`, it waits in the outbox until then, also if there is a
        broker. `attributes` are those of the message, as `subject="order-7"`.
        """
        self.store.refuse_inside("send()")
        if is_signature(command):
            raise ConfigError(
                "send() is for the app's own log; send a task by its apply_async(), or emit() it in"
                " a transaction"
            )
        attributes.setdefault("kind", COMMAND)
        message = self.message(command, topic=topic, **attributes)
        delay_all([message], due_of(at, after))
        if is_delayed(message):
            self.store.delay([message])
        else:
            (self.broker or self.store).publish([message])
        return message.id

    async def send_async(
        self,
        command: Any,
        *,
        topic: str | None = None,
        at: datetime | None = None,
        after: timedelta | float | None = None,
        **attributes: Any,
    ) -> str:
        """Do as `send`, in a thread, with the same arguments.

        `topic`, `at`, `after` and `attributes` are as there.
        """
        return await asyncio.to_thread(
            partial(self.send, command, topic=topic, at=at, after=after, **attributes)
        )

    def cancel(self, id: str) -> bool:
        """Take back what was emitted or sent with `at` or `after`; return whether it still waited.

        False means too late: it is published, or about to be, or there never was one of this id.
        In a transaction of your own: `app.store.outbox.cancel(session, id)`.
        """
        self.store.refuse_inside("cancel()")
        return self.store.cancel(id)

    async def cancel_async(self, id: str) -> bool:
        """Do as `cancel`, in a thread."""
        return await asyncio.to_thread(self.cancel, id)

    def message(self, event: Any, *, topic: str | None = None, **attributes: Any) -> Message[Any]:
        """Return an event as a message; id, type and source follow from its class and this app.

        `attributes` replace them, or are added. `topic` is by default the app's own.
        """
        given = event if isinstance(event, Message) else Message(event)
        if attributes:
            if "notbefore" in attributes:
                raise ConfigError("notbefore: say at=… or after=…, or give a Message(notbefore=…)")
            whole = {**given.attributes, **attributes}
            given = Message(given.data, whole, topic=given.topic, notbefore=given.notbefore)
        made = complete(given, self.source)
        if is_task(made):
            topic = None  # the relay finds tasks by their own
        made.topic = topic or made.topic or self.store.outbox.topic_of(made)
        if not made.attributes["type"]:
            raise ConfigError(
                f"{describe(made.attributes)}: {type(given.data).__name__} does not name a type;"
                " use a msgspec Struct, a dataclass or a pydantic model, or add type='order.placed'"
            )
        return made

    # --- the database -----------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        """Return the Engine or AsyncEngine of the app; None on Redis."""
        return self.store.engine

    @property
    def sessions(self) -> Any:
        """Return the sessionmaker or async_sessionmaker of the app; None on Redis."""
        return self.store.sessions

    def create_tables(self) -> None:
        """Create missing tables: of inbox and outbox, and those of `metadata`."""
        self.store.create_tables()

    def check_tables(self) -> None:
        """Raise if a table is missing."""
        missing = self.store.missing_tables()
        if missing:
            raise ConfigError(
                f"{self.store!r} has no table {', '.join(missing)}; create them by conquiet run"
                " --create-tables, or by app.create_tables()"
            )

    # --- workers and relay --------------------------------------------------------------------

    @property
    def topics(self) -> Sequence[str]:
        """Return the topics that the app reads: its own, and those that its handlers name.

        Its own also if no handler is for it: a command that was sent there must not wait unseen.
        """
        return tuple(dict.fromkeys((self.name, *self._topics))) if self.has_handlers else ()

    @property
    def has_handlers(self) -> bool:
        return bool(self._topics or self._schedules)

    @property
    def handlers(self) -> Mapping[str, Sequence[Handler]]:
        """Return the handlers by topic; one that was registered without is at the app's own.

        Those of schedules are not among them: no other service sends ticks.
        """
        return self._topics

    @property
    def scheduled(self) -> Mapping[str, Handler]:
        """Return the handlers of schedules, by name."""
        return {name: handler for name, (_, handler) in self._schedules.items()}

    def describe(self, version: str = "1.0.0") -> dict[str, Any]:
        """Return what the app receives and sends as an AsyncAPI 3 document, with JSON Schemas.

        `version` is that of your application, which the document names.
        """
        from conquiet.app.description import describe

        return describe(self, version)

    @property
    def is_async(self) -> bool:
        """Return whether the database is async, so that workers need an event loop."""
        return self.store.is_async

    def sources(self) -> list[Source]:
        """Open the sources of the app's topics; its workers close them."""
        if not self.has_handlers:
            raise ConfigError(
                f"app {self.name} has no handlers; register one by @app.on, or import the module"
                " that does"
            )
        return (self.broker or self.store).sources(self.topics, self.name)

    def workers(self, **options: Any) -> list[Worker]:
        """Create the workers; `options` are those of `Worker`."""
        return [Worker(source, self.router, **options) for source in self.sources()]

    def relay(self) -> Relay | None:
        """Create the relay; None if there is nothing to publish to, since the outbox is the log.

        With `celery` it publishes tasks there; where the outbox is the log, tasks alone.
        """
        sink = self.store.open_sink() if self.broker is None else self.broker.open_sink()
        if self.celery is None:
            if sink is None:
                return None
            return make_relay(self.store.relay_source(), sink, self.store.figures)
        return make_task_relay(self.store, sink, self.celery, self.name)

    def open(
        self, *, worker: bool = True, relay: bool = True, history: bool = True, **options: Any
    ) -> Running:
        """Create what runs: workers unless there are no handlers, and a relay if one is needed.

        Without `worker` or `relay` that part runs elsewhere, as in a process of its own. `options`
        are those of `Worker`. The schedules run with the workers. `history` keeps what handlers and
        relay did in each minute of a day, for the dashboard.
        """
        self.check_tables()
        workers = self.workers(**options) if worker and self.has_handlers else []
        relaying = self.relay() if relay else None
        if not workers and relaying is None:
            raise ConfigError(
                f"app {self.name} has nothing to run: no handlers, by @app.on, and no broker to"
                " publish to"
            )
        clock = Clock(self.schedules) if workers and self._schedules else None
        recorder = None
        if history:
            from conquiet.operations.history import record

            recorder = record(workers, relaying)
        return Running(workers, relaying, self.store, clock, recorder)

    def run(self, *, worker: bool = True, relay: bool = True, **options: Any) -> bool:
        """Work until SIGTERM, SIGINT or the end of a worker; return whether all was finished.

        `worker` and `relay` are as in `open`, `options` those of `Worker`. It is what
        `conquiet run` does.
        """
        return self.open(worker=worker, relay=relay, **options).run(is_async=self.is_async)

    @property
    def running(self) -> Running | None:
        """Return what `start_async` has started; None if it has not, or if it has ended."""
        return self._running

    async def start_async(
        self, *, worker: bool = True, relay: bool = True, **options: Any
    ) -> Running:
        """Start workers and relay on the running event loop; `stop_async` ends them.

        `options` are those of `Worker`.
        """
        if self._running is not None:
            raise ConfigError(f"app {self.name} runs already")
        running = await asyncio.to_thread(self.open, worker=worker, relay=relay, **options)
        await running.start_async()
        self._running = running
        return running

    async def stop_async(self) -> bool:
        """Finish what is in flight, stop and close; return whether all was finished."""
        running, self._running = self._running, None
        finished = running is None or await running.stop_async()
        if self.broker is not None:
            self.broker.close()
        await self.store.close_async()
        return finished

    async def __aenter__(self) -> App:
        """Start workers and relay on the running event loop, as in the lifespan of a web app."""
        await self.start_async()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop_async()

    def close(self) -> None:
        """Close the connections that the app has opened, not those of an engine that was given."""
        if self.broker is not None:
            self.broker.close()
        self.store.close()

    def test(
        self,
        database: Database | None = None,
        *,
        metadata: MetaData | None = None,
        max_attempts: int = 3,
    ) -> Client:
        """Return a client that runs the app on a SQLite file of its own, without broker and worker.

        Use it as a context manager. `database` is another place for its tables, such as a private
        PostgreSQL. `metadata` has tables that the app's own does not name. After `max_attempts`
        deliveries a failing message is a dead letter.
        """
        from conquiet.app.client import Client

        return Client(self, database, metadata, max_attempts)

    def __repr__(self) -> str:
        return f"<App {self.name} on {self.store!r}>"


def make_health(
    app: App, alive: Callable[[], str | None], *, details: bool, relay: Relay | None = None
) -> Probes:
    """Return the answers of `/healthz`, which `alive` decides, `/readyz`, by the database, and
    `/metrics`, with those of a `relay`."""
    from conquiet.health import Check
    from conquiet.health import Health as Probes

    return Probes(
        {"store": Check(lambda: app.store.reach(), timeout=_CHECK_SECONDS)},
        alive=alive,
        metrics=partial(_read_metrics, relay),
        details=details,
    )


def _read_metrics(relay: Relay | None) -> bytes:
    """Return what the process counts for Prometheus: by `Metrics`, by its relay, and its own."""
    from conquiet.middleware.metrics import exposition

    try:
        own = exposition()
    except ImportError:
        return b"# for metrics: pip install 'conquiet[metrics]'\n"
    relaying = getattr(relay, "metrics", None)
    return own + (b"" if relaying is None else relaying.exposition())


def _is_of(topic: str, message: Message[Any]) -> bool:
    return message.topic == topic


class Running:
    """Workers, relay and clock of an app while they work, in one process."""

    def __init__(
        self,
        workers: Sequence[Worker],
        relay: Relay | None,
        store: Store,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.workers = workers
        self.relay = relay
        self._clock = clock
        self._recorder = recorder
        self._store = store
        self._thread = threading.Thread(target=self._publish, name="conquiet-relay", daemon=True)
        self._crash: BaseException | None = None

    def run(self, *, is_async: bool, ready: Callable[[], object] = lambda: None) -> bool:
        """Work until a signal, or until a worker or the relay ends; return whether all finished.

        `ready` is called when all has started.
        """
        with Signals() as signals:
            if is_async or any(worker.is_async for worker in self.workers):
                return asyncio.run(self._run_async(signals, ready))
            self.start()
            ready()
            while not signals.count and not self.is_over:
                time.sleep(_LOOK_SECONDS)
            finished = self.stop(hurry=lambda: signals.count > 1)
            self._store.close()
            return finished

    async def _run_async(self, signals: Signals, ready: Callable[[], object]) -> bool:
        try:
            await self.start_async()
            ready()
            while not signals.count and not self.is_over:
                await asyncio.sleep(_LOOK_SECONDS)
            return await self.stop_async(hurry=lambda: signals.count > 1)
        finally:
            await self._store.close_async()  # its connections belong to this loop

    def start(self) -> None:
        """Start all in threads; stop what has started if one of them fails."""
        try:
            for worker in self.workers:
                worker.start()
            if self._clock is not None:
                self._clock.start()
        except BaseException:
            self.stop()
            raise
        self._start_relay()

    async def start_async(self) -> None:
        """Start workers on the running event loop, and the relay in a thread; if one of them fails,
        stop what has started."""
        async with AsyncExitStack() as started:
            for worker in self.workers:
                await started.enter_async_context(worker)
            if self._clock is not None:
                await asyncio.to_thread(self._clock.start)
            started.pop_all()
        self._start_relay()

    def _start_relay(self) -> None:
        if self.relay is not None:
            self._thread.start()
        if self._recorder is not None:
            self._recorder.start()

    def _publish(self) -> None:
        assert self.relay is not None, "else there is no thread"
        try:
            self.relay.run()
        except BaseException as error:
            self._crash = error
            logger.exception("the relay failed")

    @property
    def is_over(self) -> bool:
        """Return whether a worker or the relay has ended by itself."""
        ended = any(not health.threads_alive for health in self.health())
        return ended or (self.relay is not None and not self._thread.is_alive())

    def health(self) -> list[Health]:
        return [worker.health() for worker in self.workers]

    def find_trouble(self) -> str | None:
        """Return why the process should be replaced: a part has ended, or a message is stuck."""
        for health in self.health():
            if (trouble := health.find_trouble()) is not None:
                return trouble
        if self.relay is not None and not self._thread.is_alive():
            return "the relay has ended"
        return None

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Stop all at once, softly; after the grace time of each worker, hard."""
        self._stop_clock()
        finished: list[bool] = []
        threads = [
            threading.Thread(
                target=lambda worker=worker: finished.append(worker.stop(hurry=hurry)), daemon=True
            )
            for worker in self.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._stop_relay() and all(finished) and not self._has_failed

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.stop()

    async def stop_async(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        await asyncio.to_thread(self._stop_clock)
        for worker in self.workers:
            worker.stop(hurry=hurry)  # on a loop it sets the grace time, and returns
        await asyncio.gather(*(worker.__aexit__() for worker in self.workers))
        finished = [await asyncio.to_thread(worker.stop) for worker in self.workers]
        has_stopped = await asyncio.to_thread(self._stop_relay)
        return has_stopped and all(finished) and not self._has_failed

    @property
    def _has_failed(self) -> bool:
        """Return whether a bug in a source has ended a worker."""
        return any(worker.failure is not None for worker in self.workers)

    def _stop_relay(self) -> bool:
        has_stopped = self._end_relay()
        if self._recorder is not None:
            self._recorder.close()
        return has_stopped

    def _end_relay(self) -> bool:
        if self.relay is None or self._thread.ident is None:  # it was not started
            return True
        self.relay.stop()
        self._thread.join(_RELAY_SECONDS)
        return not self._thread.is_alive() and self._crash is None
