"""EventsOutbox: what handlers return is stored with their other effects, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, insert, select

from conquiet import Message, Router, memory, sql
from conquiet.errors import HandlerError
from conquiet.events import Event, EventSource, EventsOutbox, InvalidEvent
from conquiet.events.table import events_table
from conquiet.middleware import DeadLetter
from conquiet.relay import Relay
from conquiet.sql import Inbox, Transaction
from conquiet.sql import schema as sql_schema
from marketplace.catalog import CATALOG, MediaUploaded

SIZES = Table("sizes", MetaData(), Column("bytes", Integer))
EVENTS = events_table(CATALOG)


class RecordUpload(msgspec.Struct):
    media_id: UUID
    size_bytes: int
    kind: str = "photo"


def ask(size: int, **more) -> Message:
    data = msgspec.json.encode(RecordUpload(uuid4(), size, **more))
    return Message(data, {"id": str(uuid4()), "type": "record.upload", "source": "/test"})


@pytest.fixture
def uploads(engine: Engine):
    """A router that writes a row and emits an event for each upload; and its dead letters."""
    sql_schema.init(engine, outbox=None)
    SIZES.create(engine)
    dead = memory.Log()
    router = Router()
    router.use(DeadLetter(dead.sink()), Transaction(engine), Inbox("uploads"), EventsOutbox())

    @router.command(source="/uploads")
    def record_upload(command: RecordUpload) -> list[Event]:
        with sql.connection(engine) as connection:
            connection.execute(insert(SIZES), {"bytes": command.size_bytes})
        data = MediaUploaded(
            media_id=command.media_id, store_id=uuid4(), kind=command.kind,
            mime_type="image/png", size_bytes=command.size_bytes, uploaded_at=datetime.now(UTC),
        )  # fmt: skip
        return [CATALOG.event(data, aggregate_id=command.media_id)]

    return router, dead


def stored(engine: Engine) -> tuple[list[int], list[int]]:
    with engine.connect() as connection:
        sizes = connection.execute(select(SIZES.c.bytes).order_by(SIZES.c.bytes)).scalars()
        events = connection.execute(select(EVENTS.c.payload_json)).scalars()
        return list(sizes), sorted(one["data"]["size_bytes"] for one in events)


def test_events_of_a_batch_are_there_with_what_their_handlers_wrote(uploads, engine) -> None:
    router, _ = uploads
    first, second = ask(1), ask(2)
    router.process([first, second, first])  # delivered again, and known
    assert stored(engine) == ([1, 2], [1, 2])
    relay = Relay(EventSource(engine), memory.LogSink(memory.Log()))
    assert relay.run_once(0.0).published == 2
    relay.source.close()


def test_a_refused_event_takes_its_own_command_along_and_no_other(uploads, engine) -> None:
    router, dead = uploads
    router.process([ask(1), ask(2, kind="a\0b"), ask(3)])
    assert stored(engine) == ([1, 3], [1, 3])
    [letter] = dead.replay()
    assert InvalidEvent.__name__ in letter.attributes["deadreason"]


def test_what_is_no_event_is_the_handler_s_fault(engine) -> None:
    router = Router()
    router.use(Transaction(engine), EventsOutbox())

    class Uploaded(msgspec.Struct):
        size: int

    @router.command(source="/uploads")
    def record_upload(command: RecordUpload) -> list[Uploaded]:
        return [Uploaded(command.size_bytes)]

    [failed] = router.process([ask(1)])
    assert isinstance(failed, HandlerError)
    assert "not Uploaded" in str(failed)
