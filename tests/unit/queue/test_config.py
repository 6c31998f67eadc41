"""Section 4 of the seed: the settings, refused when they are made."""

from __future__ import annotations

import dataclasses

import pytest

from conquiet.queue import InvalidSettingError, QueueConfig, QueueError


def config(**changes):
    return QueueConfig(
        **{"stream_key": "orders", "consumer_group": "billing", "consumer_name": "b-1"} | changes
    )


def test_4_1_fields_and_defaults_are_those_of_the_seed():
    assert dataclasses.asdict(QueueConfig("orders", "billing", "b-1")) == {
        "stream_key": "orders",
        "consumer_group": "billing",
        "consumer_name": "b-1",
        "block_ms": 5_000,
        "max_read_count": 1,
        "claim_idle_ms": 60_000,
    }


@pytest.mark.parametrize("name", ["stream_key", "consumer_group", "consumer_name"])
@pytest.mark.parametrize("value", ["", None, 7, b"orders", "\ud800"])
def test_4_1_a_name_must_be_text_that_is_not_empty(name, value):
    with pytest.raises(InvalidSettingError, match=rf"^{name}=.* is not allowed: .* a string"):
        config(**{name: value})


@pytest.mark.parametrize("name", ["block_ms", "max_read_count", "claim_idle_ms"])
@pytest.mark.parametrize("value", [0, -1, 2**63, True, False, 1.0, "1", None])
def test_4_1_a_number_must_be_a_positive_integer(name, value):
    with pytest.raises(InvalidSettingError, match=rf"^{name}=.* an integer of at least 1"):
        config(**{name: value})


def test_4_1_the_message_says_why_zero_is_refused():
    with pytest.raises(QueueError, match=r"block_ms=0 .* \(0 makes Redis wait for ever"):
        config(block_ms=0)


def test_4_1_refused_settings_are_value_errors_too():
    with pytest.raises(ValueError):
        config(consumer_name="")
