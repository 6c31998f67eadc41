"""One event by its id, from the outbox to the log to its consumers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from sqlalchemy import insert
from tests.integration.operations.conftest import numbered

from conquiet.errors import ConfigError, StoreError
from conquiet.events import Idempotency
from conquiet.message import new_id
from conquiet.operations import log_search
from conquiet.operations.trace import trace_event
from conquiet.redis import Readers, StreamSink
from conquiet.sql import engine as make_engine
from conquiet.sql import schema
from conquiet.sql.schema import inbox_table, outbox_table


@pytest.fixture(params=["postgresql", "sqlite"])
def shop(request, redis_client):
    """An event that was published and taken by one of two groups."""
    kind = "database_url" if request.param == "postgresql" else "sqlite_url"
    url = request.getfixturevalue(kind)
    schema.init(url)
    engine = make_engine(url)
    event_id = new_id()
    [message] = numbered(1)
    message.attributes["id"] = event_id
    StreamSink(redis_client, "orders").publish([*numbered(3), message, *numbered(3, 3)])
    with engine.begin() as connection:
        row = {
            "topic": "orders", "event_type": "sold", "event_id": event_id, "key": "c-1",
            "content_type": "application/json", "data": b"{}", "attributes": message.attributes,
            "published_at": datetime.now(UTC), "attempts": 1,
        }  # fmt: skip
        connection.execute(insert(outbox_table()).values(**row))
        for subscriber, identity in (
            ("billing/bill", message.identity),
            ("billing/bill", "/shop other"),
            ("mail/send", "/shop other"),
        ):
            values = {"subscriber": subscriber, "message_id": identity}
            connection.execute(insert(inbox_table()).values(**values))
    yield SimpleNamespace(engine=engine, id=event_id, client=redis_client)
    engine.dispose()


def test_an_event_is_followed_from_the_outbox_to_its_consumers(shop, source, redis_client) -> None:
    for message in source(group="billing").read(4, 1.0):
        message.ack()
    source(group="mail", consumer="mailer-1").read(9, 1.0)
    source(group="late")
    Readers(redis_client, "orders").register("spark/shop")
    found = trace_event(shop.id, client=redis_client, engine=shop.engine)
    [row] = found.written
    assert (row.table, row.state, row.attempts, row.source) == ("outbox", "published", 1, "/shop")
    [entry] = found.logged
    assert (entry.stream, entry.event_type, entry.source) == ("orders", "sold", "/shop")
    assert {(taker.name, taker.state, taker.consumer) for taker in entry.takers} == {
        ("billing", "acked", ""),
        ("late", "unread", ""),
        ("mail", "pending", "mailer-1"),
        ("spark/shop", "unread", ""),
    }
    [remembered] = found.remembered
    assert (remembered.subscriber, remembered.state) == ("billing/bill", "done")
    assert found.found
    Readers(redis_client, "orders").advance("spark/shop", entry.id)
    [entry] = trace_event(shop.id, client=redis_client, engine=shop.engine).logged
    assert entry.takers[-1].state == "passed"


def test_without_a_database_the_time_in_the_id_tells_where_to_look(shop) -> None:
    found = trace_event(shop.id, client=shop.client)
    assert [entry.stream for entry in found.logged] == ["orders"]
    assert found.written == ()


def test_an_id_that_tells_no_time_is_searched_for_only_when_asked(redis_client, publish) -> None:
    publish(3)
    found = trace_event("m-1", client=redis_client)
    assert not found.found
    assert "--full" in found.notes[0]
    assert len(trace_event("m-1", client=redis_client, full=True).logged) == 1
    assert not trace_event("m", client=redis_client, full=True).found


def test_an_event_that_nobody_published_says_why(shop) -> None:
    with shop.engine.begin() as connection:
        row = {
            "topic": "orders", "event_type": "sold", "event_id": "e-2", "data": b"",
            "content_type": "text/plain", "attributes": {"id": "e-2", "source": "/shop"},
            "attempts": 10, "last_error": "Refused: no", "parked_at": datetime.now(UTC),
        }  # fmt: skip
        connection.execute(insert(outbox_table()).values(**row))
    found = trace_event("e-2", client=shop.client, engine=shop.engine)
    [row] = found.written
    assert (row.state, row.last_error, found.logged) == ("parked", "Refused: no", ())


def test_dead_letters_and_inboxes_in_redis_are_part_of_it(redis_client, bury) -> None:
    event_id = new_id()
    bury(1, id=event_id)
    Idempotency(redis_client).check_and_mark_processed("failing", event_id)
    redis_client.set(f"conquiet:inbox:{{shop}}:shop/bill:/shop {event_id}", "processing:x")
    found = trace_event(event_id, client=redis_client)
    assert [letter.reason for letter in found.buried] == ["ValueError: no such customer"]
    assert [(item.subscriber, item.state) for item in found.remembered] == [("failing", "done")]
    found = trace_event(event_id, client=redis_client, full=True)
    assert {(item.subscriber, item.state) for item in found.remembered} == {
        ("failing", "done"),
        ("shop/bill", "processing"),
    }


def test_a_search_that_ends_early_says_so(redis_client, publish, monkeypatch) -> None:
    event_id = new_id()
    publish(10)
    publish(1, id=event_id)
    monkeypatch.setattr(log_search, "_PAGE", 2)
    monkeypatch.setattr(log_search, "MOST", 4)
    found = trace_event(event_id, client=redis_client)
    assert found.logged == ()
    assert [part.stream for part in found.searched] == ["orders"]


def test_what_is_old_is_not_searched(shop) -> None:
    old = datetime.now(UTC) - timedelta(days=1)
    with shop.engine.begin() as connection:
        connection.execute(outbox_table().update().values(published_at=old))
    assert trace_event(shop.id, client=shop.client, engine=shop.engine).logged == ()
    assert trace_event(shop.id, client=shop.client, engine=shop.engine, full=True).logged != ()


def test_an_outbox_that_cannot_be_searched_does_not_end_the_trace(shop) -> None:
    with shop.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE outbox RENAME COLUMN last_error TO gone")
    found = trace_event(shop.id, client=shop.client, engine=shop.engine)
    assert [entry.stream for entry in found.logged] == ["orders"]
    assert "outbox could not be searched" in found.notes[0]


def test_a_trace_needs_somewhere_to_look(tmp_path) -> None:
    with pytest.raises(ConfigError, match="a Redis client or a database"):
        trace_event("e-1")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
        trace_event("e-1", engine=make_engine("postgresql://u:top-secret@127.0.0.1:1/d"))
