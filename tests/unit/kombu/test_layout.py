"""Keys, tags and settings: never ambiguous, and decoded to what was encoded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conquiet.kombu.layout import PRIORITIES, Keys, QueueSettings, place_of, tag_of

names = st.text(min_size=1)


@given(names, st.sampled_from(PRIORITIES), names)
def test_the_queue_can_be_told_from_its_stream(queue, priority, prefix):
    keys = Keys(prefix)
    assert keys.queue(keys.stream(queue, priority)) == queue


@given(st.tuples(names, st.sampled_from(PRIORITIES)), st.tuples(names, st.sampled_from(PRIORITIES)))
def test_no_two_queues_share_a_stream(one, other):
    assert (Keys().stream(*one) == Keys().stream(*other)) == (one == other)


@given(names)
def test_the_prefix_stands_before_every_key(prefix):
    keys = Keys(prefix)
    every = [keys.queues, keys.exchanges, keys.leases, *keys.streams("q")]
    assert all(key.startswith(prefix) for key in [*every, keys.bindings("x"), keys.dead("q")])


@given(names, st.sampled_from(PRIORITIES))
def test_a_delivery_tag_says_where_the_message_lies(queue, priority):
    stream = Keys().stream(queue, priority)
    assert place_of(tag_of(stream, "1700000000000-0")) == (stream, "1700000000000-0")


limits = st.none() | st.integers(min_value=0)


@given(limits, limits, limits)
def test_the_settings_of_a_queue_survive_redis(expires, ttl, most):
    settings = QueueSettings(expires, ttl, most)
    assert QueueSettings.decode(settings.encode().encode()) == settings
    assert settings.encode(), "empty is the value of a queue that was never declared"
