"""Every transport option has a meaning here, has none for a reason, or is refused for one."""

from __future__ import annotations

import pytest
from kombu.transport import redis as lists

from conquiet.errors import ConquietError
from conquiet.kombu import OptionError, options
from conquiet.kombu.channel import SentinelChannel


def test_every_option_of_kombus_redis_transport_is_in_the_table():
    known = {option.name for option in options.TABLE}
    assert set(lists.SentinelChannel.from_transport_options) <= known
    assert set(lists.Channel.from_transport_options) <= known


def test_every_option_of_the_seed_is_in_the_table():
    known = {option.name for option in options.TABLE}
    assert {
        "consumer_group_prefix",
        "consumer_id",
        "stream_maxlen",
        "autoclaim_interval",
        "prefetch_count",
    } <= known


def test_no_option_has_two_meanings():
    names = [option.name for option in options.TABLE]
    assert len(names) == len(set(names))


def test_what_the_channel_takes_is_what_the_table_promises():
    means_something = {option.name for option in options.OURS + options.KEPT}
    taken = set(SentinelChannel.from_transport_options) | {
        *("lease", "polling_interval", "reauth_check_interval")
    }
    without = {option.name for option in options.NOTHING}
    assert means_something <= taken
    assert taken - means_something <= without


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stream_maxlen": 10_000}, r"no consumer has read them; .* max_length=n"),
        ({"consumer_group_prefix": "mine"}, r"would run each task twice; .* global_keyprefix"),
        ({"lease": 0}, "at least 1 second"),
        ({"lease": "60"}, "at least 1 second"),
        ({"lease": True}, "at least 1 second"),
        ({"autoclaim_interval": 0}, "more than 0 seconds"),
        ({"delivery_limit": -1}, "a whole number"),
        ({"delivery_limit": 2.5}, "a whole number"),
        ({"prefetch_count": -1}, "a whole number"),
        ({"lease": float("inf")}, "at least 1 second"),
        ({"lease": float("nan")}, "at least 1 second"),
        ({"delivery_limit": float("nan")}, "a whole number"),
        ({"priority_steps": []}, "from 0 to 9"),
        ({"priority_steps": [0, 10]}, "from 0 to 9"),
        ({"priority_steps": "0369"}, "from 0 to 9"),
        ({"consumer_id": "~back"}, "~ is reserved"),
        ({"consumer_id": ""}, "must be a name"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(given, message):
    with pytest.raises(OptionError, match=message) as caught:
        options.check(given)
    assert next(iter(given)) in str(caught.value)
    assert isinstance(caught.value, ConquietError)


def test_all_others_pass():
    options.check({})
    options.check(dict.fromkeys(("stream_maxlen", "lease", "delivery_limit")))
    options.check({"unacked_key": "mine", "max_retries": 3, "unknown": object()})
    options.check({"lease": 1.5, "delivery_limit": 0, "prefetch_count": 4, "consumer_id": "shop"})
    options.check({"priority_steps": tuple(range(10))})
