"""Attributes, topics and names are values wherever they go: never a part of a command."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from tests.security.hostile import fuzzed
from tests.unit.sinks.http_receiver import Receiver

from conquiet import Message
from conquiet.errors import ConfigError, InvalidMessage
from conquiet.kombu.layout import Keys
from conquiet.operations.streams import peek
from conquiet.redis import StreamSink, StreamSource
from conquiet.relay.inspection import Inspection, Search
from conquiet.relay.sinks import HttpSink
from conquiet.relay.sinks.envelope import pack
from conquiet.sql import Cleanup, Inbox, Outbox, OutboxLog, OutboxSource, engine, schema

NASTY = [
    "orders\r\nFLUSHALL\r\n",
    "*3\r\n$3\r\nDEL\r\n",
    "orders{other}:*?[a-z]",
    "'; DROP TABLE outbox; --",
    '"; DROP TABLE outbox; --',
    "$1 %s :id ?",
    "\x1b[2J é \u2028",
]
SQL_NAMES = [
    "outbox; DROP TABLE outbox",
    'out"box',
    "out'box",
    "out box",
    "OUTBOX",
    "a.b.c",
    "x" * 49,
    "",
]


def event(**attributes):
    return Message(b"{}", {"id": "1", "type": "sold", "source": "/shop", **attributes})


# --- SQL ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SQL_NAMES)
def test_names_of_tables_are_checked(name, sqlite_url) -> None:
    made = engine(sqlite_url)
    for make in (
        lambda: Inbox("billing", table=name),
        lambda: Outbox("orders", table=name),
        lambda: OutboxSource(made, name),
        lambda: OutboxLog(made, name),
        lambda: Inspection(made, name),
        lambda: schema.init(made, outbox=name),
        lambda: Cleanup(made, outbox=name, inbox=None),
    ):
        with pytest.raises(ConfigError, match="table name"):
            make()
    made.dispose()


@pytest.mark.parametrize("nasty", NASTY)
def test_values_of_sql(nasty, sqlite_url) -> None:
    made = engine(sqlite_url)
    schema.init(made)
    with made.begin() as connection:
        Outbox(nasty).add(connection, [event(subject=nasty, id=nasty, more=nasty)])
        assert connection.execute(text("SELECT count(*) FROM outbox")).scalar() == 1
    [message] = OutboxLog(made).read()
    assert (message.topic, message.id, message.subject) == (nasty, nasty, nasty)
    inspection = Inspection(made, "outbox")
    assert inspection.show(nasty) is not None
    for search in (Search("any", type=nasty), Search("any", error=nasty), Search("any", id=nasty)):
        inspection.entries(search=search)
    assert inspection.retry([nasty]) == []
    made.dispose()


# --- Redis ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nasty", NASTY)
def test_names_and_values_of_redis(nasty, redis_client) -> None:
    """A topic is the name of a stream, byte for byte, and nothing else is touched."""
    redis_client.set("precious", "1")
    sink = StreamSink(redis_client, nasty)
    assert sink.publish_each([event(subject=nasty, more=nasty)]) == [None]
    sink.close()
    assert sorted(redis_client.keys()) == sorted([b"precious", nasty.encode()])
    source = StreamSource(redis_client, nasty, group=nasty, consumer=nasty)
    [message] = source.read(1, 1.0)
    assert (message.subject, message.attributes["more"]) == (nasty, nasty)
    assert message.ack()
    source.close()
    [entry] = peek(redis_client, nasty)
    assert entry.attributes["subject"] == nasty
    assert redis_client.get("precious") == b"1"


def test_an_attribute_is_no_field_of_ours(redis_client) -> None:
    """`:topic`, `data` and other names that mean something cannot come from an attribute."""
    sink = StreamSink(redis_client, "orders")
    for name in (":topic", "data", "a b", "a\r\nb", "cloudevent:", "Upper", ""):
        [refusal] = sink.publish_each([event(**{name: "x"})])
        assert isinstance(refusal, InvalidMessage), name
    sink.close()
    assert redis_client.exists("orders") == 0


def test_queues_of_kombu_stay_under_their_prefix() -> None:
    for nasty in NASTY:
        keys = Keys("shop:")
        for key in (keys.stream(nasty, 0), keys.dead(nasty), keys.bindings(nasty)):
            assert key.startswith("shop:conquiet:kombu:")


# --- headers --------------------------------------------------------------------------------


@fuzzed(20)
@given(values=st.lists(st.sampled_from(NASTY) | st.text(max_size=20), min_size=3, max_size=3))
def test_headers_of_a_webhook(receiver, values) -> None:
    """A line break in an attribute is percent-encoded, as CloudEvents has it: no new header."""
    sink = HttpSink(receiver.url, timeout=5)
    message = event(subject=values[0], more=values[1], datacontenttype=values[2] or "a/b")
    message.topic = values[0] or None
    receiver.requests.clear()
    [answer] = sink.publish_each([message])
    sink.close()
    assert answer is None
    [(_, _, headers)] = receiver.requests
    names = {name.lower() for name in headers}
    assert names <= {
        *("host", "accept-encoding", "content-length", "content-type", "ce-topic"),
        *(f"ce-{name}" for name in message.attributes),
        *("ce-specversion", "event-id", "event-type"),
    }
    assert all(re.fullmatch(r"[\x20-\x7e]*", value) for value in headers.values())


@pytest.fixture(scope="module")
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest.mark.parametrize("name", ["a\r\nb", "a:b", "a b", "é", "A"])
def test_names_of_headers_are_checked_for_all_sinks(name) -> None:
    """AMQP, Kafka, Pub/Sub and webhooks pack by the same rule."""
    with pytest.raises(InvalidMessage, match="attribute name"):
        pack(event(**{name: "x"}))


@pytest.mark.parametrize("headers", [{"a\r\nb": "c"}, {"a": "b\r\nc"}, {"a": "é"}])
def test_headers_of_the_settings_are_checked(headers) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        HttpSink("https://127.0.0.1/", headers=headers)


def test_the_path_of_a_webhook_holds_no_line_break() -> None:
    sink = HttpSink("http://127.0.0.1:1/a\r\nx-evil: 1")
    assert "\r" not in sink._path
    assert "\n" not in sink._path
