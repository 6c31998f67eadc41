"""Looking at entries, and freeing what a dead consumer holds."""

from __future__ import annotations

import pytest

from conquiet.errors import NotFound
from conquiet.operations.streams import claim, list_pending, peek, read_entries, read_entry


def test_peek_shows_events_from_either_end(redis_client, publish) -> None:
    publish(5)
    first, second = peek(redis_client, "orders", limit=2)
    assert (first.event_id, first.event_type, first.data) == ("m-0", "sold", '{"n": 0}')
    assert first.is_event
    assert first.attributes["source"] == "/shop"
    assert [item.event_id for item in peek(redis_client, "orders", second.id, 2)] == ["m-1", "m-2"]
    assert [item.event_id for item in peek(redis_client, "orders", limit=2, newest=True)] == [
        *("m-4", "m-3")
    ]
    assert read_entry(redis_client, "orders", second.id) == second


def test_peek_shows_whatever_lies_there(redis_client) -> None:
    redis_client.xadd("queue", {"data": b"\xff\x00", "colour": "blue"}, id="5-1")
    [found] = peek(redis_client, "queue")
    assert (found.is_event, found.data, found.data_is_base64) == (False, "/wA=", True)
    assert found.attributes == {"colour": "blue"}
    with pytest.raises(NotFound, match="no entry 5-2"):
        read_entry(redis_client, "queue", "5-2")
    with pytest.raises(NotFound, match="does not exist"):
        peek(redis_client, "nowhere")


def test_entries_by_their_ids_without_what_is_too_long_for_a_list(redis_client, publish) -> None:
    publish(3)
    redis_client.xadd("orders", {"data": "x" * 1000})
    first, second, _, last = (key.decode() for key, _ in redis_client.xrange("orders"))
    redis_client.xdel("orders", second)
    found = read_entries(redis_client, "orders", [last, second, first], max_bytes=50)
    assert list(found) == [last, first]
    assert (found[first].event_id, found[first].data) == ("m-0", '{"n": 0}')
    assert found[last].data == "x" * 50
    assert read_entries(redis_client, "orders", [], max_bytes=50) == {}
    assert read_entries(redis_client, "nowhere", [first], max_bytes=50) == {}


def test_pending_by_idle_time_and_consumer(redis_client, publish, source) -> None:
    publish(3)
    source(consumer="a").read(2, 1.0)
    source(consumer="b").read(1, 1.0)
    found = list_pending(redis_client, "orders", "billing")
    assert [item.consumer for item in found] == ["a", "a", "b"]
    assert found[0].deliveries == 1
    assert len(list_pending(redis_client, "orders", "billing", consumer="a", limit=1)) == 1
    assert (
        list_pending(redis_client, "orders", "billing", after=found[0].id, limit=1)[0].id
        == found[1].id
    )
    assert list_pending(redis_client, "orders", "billing", after=found[2].id) == []
    assert list_pending(redis_client, "orders", "billing", min_idle=3600) == []
    with pytest.raises(NotFound, match="does not exist"):
        list_pending(redis_client, "orders", "nobody")


def test_what_a_dead_consumer_holds_is_freed_for_the_living(redis_client, publish, source) -> None:
    publish(3)
    source(consumer="dead", lease=3600).read(3, 1.0)
    assert claim(redis_client, "orders", "billing", min_idle=60).ids == ()
    tried = claim(redis_client, "orders", "billing", min_idle=0, limit=2, dry_run=True)
    living = source(consumer="living", lease=60, claim_interval=0.01)
    assert not living.read(3, 0.05)
    assert claim(redis_client, "orders", "billing", min_idle=0, limit=2) == tried
    taken = living.read(3, 1.0)
    assert [message.id for message in taken] == ["m-0", "m-1"]
    assert [message.deliveries for message in taken] == [2, 2]


def test_entries_are_handed_to_a_named_consumer(redis_client, publish, source) -> None:
    publish(2)
    source(consumer="dead").read(2, 1.0)
    [first, _] = list_pending(redis_client, "orders", "billing")
    done = claim(redis_client, "orders", "billing", min_idle=0, ids=[first.id], to="pod-2")
    assert (done.ids, done.to) == ((first.id,), "pod-2")
    assert [message.id for message in source(consumer="pod-2").read(9, 0.05)] == ["m-0"]
