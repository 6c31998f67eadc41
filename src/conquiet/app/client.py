"""Run an app in a test: deliver, deliver again, and look at effects, outbox and dead letters.

    with app.test() as shop:
        shop.send(PlaceOrder("o-1", 4200))
        shop.redeliver()
        assert shop.rows("SELECT id FROM orders") == [("o-1",)]

Inside the block the app has a database of its own, also for `app.send`, `app.emit`, `app.engine`
and `app.sessions`. Messages go through the same chain, log and retries as in a worker.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from conquiet import bridge
from conquiet.app.store import SqlStore, replace_engine
from conquiet.errors import ConfigError, HandlerError
from conquiet.handler import SKIPPED, LoopThread
from conquiet.message import Message, describe
from conquiet.worker import Publish, allow_delays

if TYPE_CHECKING:
    from sqlalchemy import MetaData

    from conquiet.app.app import App
    from conquiet.sql.log_source import LogSource

T = TypeVar("T")

_WAIT_SECONDS = 0.01


class DeadLetter(NamedTuple):
    """A message that failed for good, and why."""

    message: Message[Any]
    error: str


class Client:
    """Delivers messages to an app and shows what came of them; `App.test` creates it.

    `app` is left as it is when the client is closed. `database` is an engine or a URL, or None for
    a SQLite file in a temporary directory. The tables of `metadata` are created there. A message is
    a dead letter after `max_attempts` deliveries.
    """

    def __init__(
        self, app: App, database: Any, metadata: MetaData | None, max_attempts: int
    ) -> None:
        if not isinstance(app.store, SqlStore):
            raise ConfigError(
                "app.test() needs an app on SQL; test one on Redis with a private server:"
                " conquiet.embedded.redis()"
            )
        self.app = app
        self._database = database
        self._metadata = metadata
        self._max_attempts = max_attempts
        self._open: ExitStack | None = None
        self._delivered: list[Message[Any]] = []
        self._last = ""
        self._loop = LoopThread()

    def __enter__(self) -> Client:
        with ExitStack() as opening:
            app = self.app
            former, broker, router = app.store, app.broker, app.router
            was_in_test = app.is_in_test
            assert isinstance(former, SqlStore), "refused by __init__"
            database = self._database
            if database is None:
                folder = opening.enter_context(tempfile.TemporaryDirectory(prefix="conquiet-"))
                database = replace_engine(former, f"{folder}/test.sqlite")
            self._store = SqlStore(database, app.name, app.metadata)
            self._store.outbox.takes_tasks = app.celery is not None
            opening.callback(self._dispose)
            self._store.create_tables()
            if self._metadata is not None:
                self._metadata.create_all(self._store.log_engine)

            ours = dict(zip(former.middlewares, self._store.middlewares, strict=True))
            app.store, app.broker, app.is_in_test = self._store, None, True
            app.router = router.copy(*(ours.get(item, item) for item in router.middlewares))

            def restore() -> None:
                app.router.close()
                app.store, app.broker, app.router = former, broker, router
                app.is_in_test = was_in_test

            opening.callback(restore)
            if app.topics:  # else it has no handlers, and emits only
                self._chain = self._call(app.router.start, Publish(None, app.router))
            self._sources: list[LogSource] = self._open_sources()
            for source in self._sources:
                opening.callback(source.close)
                allow_delays(source, app.router, ordered=False)
            self._delivered = []
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _check_open(self) -> None:
        """Refuse what would reach the app's own database and broker."""
        if self._open is None:
            raise ConfigError(
                f"the client of {self.app.name} is not open; write `with app.test() as client:`,"
                " and use it inside the block"
            )

    def send(self, event: Any, *, topic: str | None = None, **attributes: Any) -> str:
        """Send a command or an event to the app, and handle all that waits; return its id.

        `topic` and `attributes` are as for `App.send`.
        """
        self._check_open()
        sent = self.app.send(event, topic=topic, **attributes)
        self.deliver()
        return sent

    def tick(self, name: str, time: datetime | None = None) -> str:
        """Write a tick of the schedule `name`, and handle all that waits; return its id.

        Two ticks of one `time` take effect once. Without a time it is the present one.
        """
        sent = self.app.schedules.run(name, None if time is None else time.timestamp())
        self.deliver()
        return sent

    def deliver(self, timeout: float = 30.0) -> None:
        """Handle what waits in the log, and what comes of it, until nothing is left to retry.

        Raises if there is still something after `timeout` seconds: events that cause each other
        without end, or a database that gives all back.
        """
        self._check_open()
        deadline = time.monotonic() + timeout
        while sum(self._deliver(source) for source in self._sources):
            if time.monotonic() > deadline:
                raise HandlerError(
                    f"messages of {self.app.name} are left after {timeout:g} s; the last one:"
                    f" {self._last}"
                )

    def deliver_delayed(self) -> int:
        """Let the time pass: handle all delayed events as if they were due; return how many.

        Events that these delay in turn are left.
        """
        from sqlalchemy import text

        from conquiet.sql.promotion import Promoter

        table = self._store.outbox.delayed.fullname
        with self._store.log_engine.begin() as connection:
            statement = f"UPDATE {table} SET due_at = '2000-01-01 00:00:00.000000'"
            count = connection.execute(text(statement)).rowcount
        promoter = Promoter(self._store.log_engine)
        while promoter.promote(count):
            pass
        self.deliver()
        return count

    def _deliver(self, source: LogSource) -> bool:
        is_waiting = self._waits(source)
        if is_waiting:
            source.hurry()  # in a test no message waits for its time
        messages = source.read(100, _WAIT_SECONDS if is_waiting else 0.0)
        self._handle(messages)
        return bool(messages) or self._waits(source)

    def _waits(self, source: LogSource) -> bool:
        with self._store.log_engine.connect() as connection:
            return source.tables.count_retries(connection)[0] > 0

    def redeliver(self) -> int:
        """Deliver all messages again that took effect; return how many took effect once more."""
        self._check_open()
        again = [
            Message(message.data, dict(message.attributes), topic=message.topic, deliveries=2)
            for message in self._delivered
        ]
        return self._handle(again, remember=False)

    def _handle(self, messages: Sequence[Message[Any]], *, remember: bool = True) -> int:
        if not messages:
            return 0
        router = self.app.router

        def handle() -> int:
            handled = router.run(messages, self._chain)
            router.settle(handled)
            pairs = list(zip(handled.messages, handled.results, strict=True))
            message, result = pairs[-1]
            failed = f": {result}" if isinstance(result, Exception) else ""
            self._last = f"{describe(message.attributes)}{failed}"
            if remember:
                done = [m.origin for m, result in pairs if not isinstance(result, Exception)]
                self._delivered += {id(message): message for message in done}.values()
            return sum(result is not SKIPPED for _, result in pairs)

        return self._call(handle)

    # --- what came of it --------------------------------------------------------------------

    def rows(self, statement: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT; `statement` is a text, or SQLAlchemy's."""
        from sqlalchemy import text

        self._check_open()
        query = text(statement) if isinstance(statement, str) else statement
        with self._store.log_engine.connect() as connection:
            return [tuple(row) for row in connection.execute(query)]

    @property
    def outbox(self) -> list[Message[Any]]:
        """Return the events that handlers returned or `emit` wrote, and commands to other apps.

        Without ticks. Their data is as JSON gives it.
        """
        found = [self._message(row) for row in self._select_outbox()]
        return [message for message in found if not self._was_sent_here(message)]

    def _was_sent_here(self, message: Message[Any]) -> bool:
        kinds = ("command", "tick")
        return message.attributes.get("kind") in kinds and message.topic in self.app.topics

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Return the messages that failed `max_attempts` times, or with a permanent error."""
        from conquiet.sql.log import Position

        self._check_open()
        letters: list[DeadLetter] = []
        for source in self._sources:
            with self._store.log_engine.connect() as connection:
                rows = source.tables.dead_letters(connection, Position(), 1_000)
            letters += [DeadLetter(self._message(row), str(row.last_error or "")) for row in rows]
        return letters

    def _select_outbox(self) -> Sequence[Any]:
        from sqlalchemy import text

        self._check_open()
        statement = text(
            "SELECT topic, event_type, event_id, key, content_type, data,"
            f" CAST(attributes AS TEXT) AS attributes FROM {self._store.outbox.table.fullname}"
            " ORDER BY id"
        )
        with self._store.log_engine.connect() as connection:
            return connection.execute(statement).all()

    def _message(self, row: Any) -> Message[Any]:
        import msgspec

        from conquiet.codec import is_json
        from conquiet.sql.outbox_source import stored_message

        message: Message[Any] = stored_message(row, None, 1)
        message.topic = getattr(row, "topic", None)
        if is_json(message.datacontenttype):
            message.data = msgspec.json.decode(message.data)
        return message

    # --- opening and closing ----------------------------------------------------------------

    def _open_sources(self) -> list[LogSource]:
        from conquiet.sql import LogSource

        return [
            LogSource(
                self._store.log_engine,
                topic,
                self.app.name,
                partitions=1,
                wakeup=False,
                max_attempts=self._max_attempts,
                backoff=0.0,
            )
            for topic in self.app.topics
        ]

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what may wait for the database: of an async app on an event loop."""
        if not self._store.is_async:
            return function(*arguments)
        return self._loop.run(bridge.run(function, *arguments))

    def _dispose(self) -> None:
        if self._store.is_async:
            self._loop.run(self._store.engine.dispose())
        else:
            self._store.engine.dispose()
        self._loop.close()
        self._store.close()
