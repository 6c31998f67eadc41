"""Outputs carry the thread that their input belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.middleware.routers import atomic, nothing, order, placed, router_of

from conquiet.errors import ConfigError
from conquiet.middleware import Correlation
from conquiet.testing import deliver


def correlations(*messages, handle=lambda m: [placed(1), placed(2)]):
    delivered = deliver(router_of(handle, Correlation()), *messages)
    return [output.attributes.get("correlationid") for output in delivered.outputs]


def test_outputs_get_the_correlation_of_their_input():
    assert correlations(order(correlationid="thread")) == ["thread", "thread"]


def test_an_input_without_one_begins_a_thread_with_its_id():
    assert correlations(order(7)) == ["7", "7"]


def test_each_message_of_a_batch_has_its_own_thread():
    batch = order(1, correlationid="a"), order(2), order(3, correlationid="c")
    assert correlations(*batch) == ["a", "a", "2", "2", "c", "c"]


def test_what_the_handler_set_stays():
    assert correlations(order(), handle=lambda _: [placed(1, correlationid="own")]) == ["own"]


def test_a_failed_message_does_not_disturb_its_neighbours():
    def handle(message):
        if message.id == "1":
            raise ValueError
        return [placed(2)]

    assert correlations(order(1), order(2), handle=handle) == ["2"]


def test_an_input_without_id_leaves_its_outputs_as_they_are():
    assert correlations(order(id=None)) == [None, None]


@given(st.one_of(st.none(), st.integers(), st.booleans(), st.binary(), st.lists(st.text())))
def test_a_correlation_of_the_wrong_kind_never_reaches_an_output(value):
    message = order()
    message.attributes["correlationid"] = value
    message.attributes["id"] = value
    [[output]] = Correlation()(lambda _: [[placed()]])([message])
    assert "correlationid" not in output.attributes


def test_it_marks_what_the_outbox_stores():
    chain, store = atomic(Correlation())
    deliver(router_of(lambda _: [placed()], *chain), order(1), order(2))
    assert [event.correlationid for event in store.outbox()] == ["1", "2"]


def test_outside_the_outbox_it_would_mark_nothing_so_the_order_is_refused():
    chain, _ = atomic(outside=(Correlation(),))
    with pytest.raises(ConfigError, match=r"Transaction, Inbox, Outbox, Correlation\)"):
        router_of(nothing, *chain).start()
