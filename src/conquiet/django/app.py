"""An app whose database is Django's: handlers use models, `emit` joins `transaction.atomic()`.

The log and the relay are read by connections of their own, opened with Django's settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from django.conf import settings
from django.db import connections

from conquiet.app.app import App as BaseApp
from conquiet.app.injection import Provider, is_coroutine
from conquiet.app.store import SqlStore, inside_error
from conquiet.app.store import Store as BaseStore
from conquiet.delay import delay_all, due_of
from conquiet.django.transaction import Inbox, Outbox, Transaction
from conquiet.errors import ConfigError
from conquiet.message import Message
from conquiet.schedule import States
from conquiet.source import Source
from conquiet.sql.dialect import engine as open_engine
from conquiet.sql.notification import notify_relays
from conquiet.sql.schema import INBOX_TABLE, OUTBOX_TABLE
from conquiet.transaction import ATOMIC

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from conquiet.relay.inspection import Figures

_OF_DJANGO = ("assume_role", "cursor_factory", "isolation_level", "pool", "server_side_binding")
"""The OPTIONS of PostgreSQL that Django takes for itself."""


class App(BaseApp):
    """Handles messages with effects in Django's models, inbox and outbox in one transaction.

    `using` is the alias of a database of Django, PostgreSQL with psycopg 3 or SQLite. Without a
    `broker` its outbox is the log. `celery` is the Celery application that tasks are sent by. Name
    the app in the settings, for `manage.py conquiet run` and the admin:
    `CONQUIET_APP = "shop.messages:app"`.
    """

    store: Store

    def __init__(
        self,
        name: str,
        broker: str | None = None,
        *,
        using: str = "default",
        celery: Any = None,
    ) -> None:
        super().__init__(name, Store(name, using), broker, celery=celery)
        self.using = using

    def emit(  # type: ignore[override]  # the connection is Django's
        self,
        *events: Any,
        topic: str | None = None,
        at: datetime | None = None,
        after: timedelta | float | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Write events into the outbox in the running `transaction.atomic()`; return their ids.

        `topic` and `attributes` are those of each event. With `at` or `after` they are published
        then at the earliest.
        """
        if not connections[self.using].in_atomic_block:
            raise ConfigError(
                "emit() needs transaction.atomic(), or the event is stored although the change"
                " fails; ATOMIC_REQUESTS = True does as well"
            )
        messages = [self.message(event, topic=topic, **attributes) for event in events]
        delay_all(messages, due_of(at, after))
        self.store.outbox.store(messages)
        return [message.id for message in messages]

    def check_tables(self) -> None:
        missing = self.store.missing_tables()
        if missing:
            raise ConfigError(
                f"database {self.using} has no table {', '.join(missing)}; add conquiet.django to"
                " INSTALLED_APPS, and run manage.py migrate"
            )

    def test(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse, with any `arguments` and `options`: use the test database of Django."""
        raise ConfigError(
            "app.test() is for apps without Django; call the handler in a django.test.TestCase,"
            " whose database the migrations have prepared"
        )

    def _check_function(self, function: Callable[..., Any], name: str) -> None:
        super()._check_function(function, name)
        if is_coroutine(function):
            raise ConfigError(
                f"handler {name} is async, and a transaction of Django belongs to one thread; leave"
                " `async` away"
            )


class Store(BaseStore):
    """Keeps effects, inbox and outbox in a database of Django."""

    def __init__(self, name: str, using: str) -> None:
        super().__init__()
        self.using = using
        self._name = name
        self._lock = threading.Lock()
        self._log: SqlStore | None = None
        self.outbox = Outbox(name, using, f"/{name}", self._notify)
        tables = (INBOX_TABLE, OUTBOX_TABLE)
        self.middlewares = (Transaction(using, tables), Inbox(name, using), self.outbox)

    @property
    def log(self) -> SqlStore:
        """Return the log in the same database, read by connections of its own."""
        with self._lock:
            if self._log is None:
                self._log = SqlStore(_open_engine(self.using), self._name, None)
            return self._log

    def _notify(self, table: str) -> None:
        if connections[self.using].vendor != "sqlite":  # a reader sees the change of the file
            notify_relays(self.log.log_engine, table)

    def find(self, kind: Any, is_async: bool) -> Provider | None:
        return None

    def publish(self, messages: Sequence[Message[Any]]) -> None:
        self.log.publish(messages)

    def delay(self, messages: Sequence[Message[Any]]) -> None:
        self.log.delay(messages)

    def cancel(self, id: str) -> bool:
        return self.log.cancel(id)

    def sources(self, topics: Sequence[str], group: str) -> list[Source]:
        return self.log.sources(topics, group)

    def schedules(self) -> States:
        return self.log.schedules()

    def relay_source(self) -> Source:
        return self.log.relay_source()

    def figures(self) -> Figures | None:
        return self.log.figures()

    def missing_tables(self) -> list[str]:
        return self.log.missing_tables()

    def create_tables(self) -> None:
        raise ConfigError("the tables are created by manage.py migrate; leave --create-tables away")

    def reach(self) -> None:
        self.log.reach()

    def refuse_inside(self, what: str) -> None:
        if ATOMIC.get():
            raise inside_error(what)

    def close(self) -> None:
        with self._lock:
            log, self._log = self._log, None
        if log is not None:
            log.log_engine.dispose()

    def __repr__(self) -> str:
        return f"Django's database {self.using}"


def find_app() -> App:
    """Return the app that the settings name."""
    from conquiet.processes import resolve

    target = getattr(settings, "CONQUIET_APP", None)
    if not target:
        raise ConfigError(
            "the settings name no app; add CONQUIET_APP = 'shop.messages:app', module and name"
        )
    found = resolve(target)
    if not isinstance(found, App):
        raise ConfigError(
            f"CONQUIET_APP: {target} is {found!r:.80}; it must be a conquiet.django.App"
        )
    return found


def _open_engine(using: str) -> Engine:
    """Open the database of an alias without Django."""
    from sqlalchemy import URL

    given = connections[using].settings_dict
    name = str(given["NAME"])
    if connections[using].vendor == "sqlite":
        if connections[using].is_in_memory_db():
            raise ConfigError(
                f"database {using} is SQLite in memory, which belongs to one connection; a worker"
                " needs a file"
            )
        return open_engine(URL.create("sqlite", database=name))
    host = given["HOST"] or None
    is_socket = host is not None and host.startswith("/")
    url = URL.create(
        "postgresql",
        username=given["USER"] or None,
        password=given["PASSWORD"] or None,
        host=None if is_socket else host,
        port=int(given["PORT"]) if given["PORT"] else None,
        database=name or None,
        query={"host": host} if is_socket and host is not None else {},
    )
    options = {key: value for key, value in given["OPTIONS"].items() if key not in _OF_DJANGO}
    return open_engine(url, connect_args=options)
