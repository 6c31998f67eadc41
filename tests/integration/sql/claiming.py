"""An outbox filled by hand, and sinks that fail on demand, for the tests of the relay's half."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Engine, create_engine, func, insert, make_url, select

from conquiet.errors import SinkUnavailable
from conquiet.relay import Relay
from conquiet.sql.outbox_source import OutboxSource
from conquiet.sql.schema import inbox_table, outbox_table

OUTBOX = outbox_table()
INBOX = inbox_table()


@contextmanager
def made(url: str, **options) -> Iterator[Engine]:
    """An engine with both tables, disposed at the end."""
    address = make_url(url)
    if address.drivername == "postgresql":
        address = address.set(drivername="postgresql+psycopg")
    engine = create_engine(address, **options)
    OUTBOX.metadata.create_all(engine)
    INBOX.metadata.create_all(engine)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def running(relays: Sequence[Relay]) -> Iterator[None]:
    """Each relay in a thread of its own, all stopped at the end."""
    threads = [threading.Thread(target=relay.run) for relay in relays]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for relay in relays:
            relay.stop()
        for thread in threads:
            thread.join(20)


def row(number: int, **columns) -> dict:
    event_id = f"e-{number}"
    return {
        "topic": "orders",
        "event_type": "order.placed",
        "event_id": event_id,
        "key": None,
        "content_type": "application/json",
        "data": b'{"number": %d}' % number,
        "attributes": {"id": event_id, "type": "order.placed", "source": "/shop"},
        **columns,
    }


def store(engine: Engine, *rows: dict) -> list[int]:
    """Insert rows in one transaction; their ids, in order."""
    with engine.begin() as connection:
        return [
            connection.execute(insert(OUTBOX).values(**values)).inserted_primary_key[0]
            for values in rows
        ]


def fill(engine: Engine, count: int, first: int = 1, **columns) -> None:
    with engine.begin() as connection:
        connection.execute(
            insert(OUTBOX), [row(number, **columns) for number in range(first, first + count)]
        )


def rows(engine: Engine) -> list:
    with engine.connect() as connection:
        return list(connection.execute(select(OUTBOX).order_by(OUTBOX.c.id)))


def the(engine: Engine, event_id: str):
    with engine.connect() as connection:
        return connection.execute(select(OUTBOX).where(OUTBOX.c.event_id == event_id)).one()


def unpublished(engine: Engine) -> int:
    with engine.connect() as connection:
        query = select(func.count()).where(OUTBOX.c.published_at.is_(None))
        return connection.execute(query).scalar_one()


def rested(source: OutboxSource) -> None:
    """Let every failed row be claimable at once."""
    source.backoff._rows.clear()


class ListSink:
    """Keeps what it confirms; fails the ids in `bad`, or everything while `out` is set."""

    def __init__(self) -> None:
        self.sent: list = []
        self.calls: list[int] = []
        self.bad: set[str] = set()
        self.refusal: type[Exception] = ValueError
        self.out = False
        self.closed = False
        self._lock = threading.Lock()

    def publish_each(self, messages):
        if self.out:
            raise SinkUnavailable("the broker is away")
        with self._lock:
            self.calls.append(len(messages))
            answers = []
            for message in messages:
                bad = message.id in self.bad
                if not bad:
                    self.sent.append(message)
                answers.append(self.refusal(f"{message.id} is refused") if bad else None)
            return answers

    @property
    def ids(self) -> list[str]:
        return [message.id for message in self.sent]

    def close(self) -> None:
        self.closed = True
