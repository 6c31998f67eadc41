"""Messages without the attributes that everybody relies on are refused."""

from __future__ import annotations

import pytest
from tests.unit.middleware.routers import atomic, nothing, order, router_of

from conquiet.errors import ConfigError, InvalidMessage
from conquiet.middleware import Required
from conquiet.testing import deliver


def test_a_message_that_has_them_passes():
    assert deliver(router_of(nothing, Required("subject")), order(subject="a")).acked


def test_one_that_lacks_some_is_refused_with_all_that_it_lacks():
    router = router_of(nothing, Required("subject", "time", "correlationid"))
    delivered = deliver(router, order())
    assert isinstance(delivered.errors[0], InvalidMessage)
    assert "lacks subject, correlationid;" in str(delivered.errors[0])


def test_the_neighbours_in_the_batch_pass():
    delivered = deliver(router_of(nothing, Required("subject")), order(1, subject="a"), order(2))
    assert [m.id for m in delivered.acked] == ["1"]


@pytest.mark.parametrize("value", [0, False, "a", b"x"])
def test_a_value_that_is_there_counts_whatever_it_is(value):
    assert deliver(router_of(nothing, Required("count")), order(count=value)).acked


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_value_counts_as_missing(value):
    message = order()
    message.attributes["count"] = value
    assert deliver(router_of(nothing, Required("count")), message).nacked


def test_a_refused_message_costs_its_neighbours_no_second_transaction():
    runs = []
    chain, _ = atomic(Required("subject"))
    router = router_of(lambda m: runs.append(m.id), *chain)
    deliver(router, order(1, subject="a"), order(2), order(3, subject="c"))
    assert runs == ["1", "3"]


@pytest.mark.parametrize("wrong", ["", "partition_key", "größe", 7])
def test_it_refuses_names_that_no_attribute_can_have(wrong):
    with pytest.raises(ConfigError, match="a-z and 0-9"):
        Required(wrong)


def test_it_refuses_to_require_nothing():
    with pytest.raises(ConfigError, match="needs the names"):
        Required()
