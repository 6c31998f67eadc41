"""Whatever lies in a queue of Kombu becomes a message or a dead letter; the consumer lives."""

from __future__ import annotations

import json
from unittest.mock import Mock

import kombu
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.kombu.brokers import Taken, connected, drain, put
from tests.security.hostile import HURTING, damaged, fuzzed, values

from conquiet.kombu import inspection
from conquiet.kombu.channel import Channel
from conquiet.kombu.layout import Entry, Keys, decode_fetch, decode_read
from conquiet.kombu.reader import Delivery
from conquiet.kombu.settlement import Settlement

some = st.sampled_from(["properties", "headers", "body", "content-type", "content-encoding"])
messages = st.dictionaries(
    some, values | st.dictionaries(st.sampled_from(["body_encoding", "delivery_info"]), values)
).map(lambda message: {"properties": {}, **message})
documents = messages.map(lambda message: json.dumps(message).encode())
payloads = st.none() | st.binary(max_size=40) | documents | damaged(documents)


class Unconnected(Channel):
    """A channel as far as messages need one."""

    def __init__(self):
        pass


def delivery(settlement):
    """Decode as a channel does, without a server."""
    channel = Unconnected()
    return Delivery(
        Mock(),
        settlement,
        qos=Mock(),
        new_message=lambda payload: channel.Message(payload, channel=channel),
        confirm_lease=lambda: None,
        pulse=Mock(),
    )


@fuzzed()
@given(payloads, st.booleans())
def test_messages(payload, redelivered) -> None:
    settlement = Settlement(Keys(""), "me", Mock())
    message = delivery(settlement).decode(Entry("mail", "mail:{0}", "1-1", redelivered, payload))
    if message is None:
        [(stream, entry, reason)] = settlement._rest
        assert (stream, entry) == ("mail:{0}", "1-1")
        assert len(reason.encode()) < 1_000
    else:
        assert not settlement


@fuzzed()
@given(
    st.lists(
        st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=20)), max_size=4), max_size=3
    )
)
def test_entries_of_strangers(found) -> None:
    """Redis gives names and values in pairs; a stranger's entry has no message, and says so."""
    flat = [[item for pair in pairs for item in pair] for pairs in found]
    entries = decode_read([[b"mail", [(b"1-1", fields) for fields in flat]]], str)
    assert [entry.payload for entry in entries] == [dict(pairs).get(b"m") for pairs in found]
    assert decode_fetch([0], ["mail"], str) == []


def test_what_hurts_is_buried_and_the_next_message_comes(redis_client, redis_url) -> None:
    """On a real server, under a consumer that also gets something good."""
    with connected(redis_url) as connection:
        put(connection, "mail", "first")
        for value in HURTING.values():
            redis_client.xadd(Keys("").stream("mail", 0), {b"m": b'{"properties":%s}' % value})
        taken = Taken()
        put(connection, "mail", "last")
        with connection.Consumer([kombu.Queue("mail")], callbacks=[taken], accept=["json"]):
            assert sorted(drain(connection, taken, 2)) == ["first", "last"]
    letters = inspection.dead_letters(redis_client, "mail")
    assert len(letters) == len(HURTING)
    assert all(letter.message is not None and len(letter.reason) < 1_000 for letter in letters)
