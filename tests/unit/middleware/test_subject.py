"""Outputs say what they are about."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.middleware.routers import atomic, nothing, order, placed, router_of

from conquiet import Message
from conquiet.errors import ConfigError, HandlerError
from conquiet.middleware import Subject
from conquiet.testing import deliver


class Heartbeat(msgspec.Struct):
    pass


def subjects(subject, *outputs):
    delivered = deliver(router_of(lambda _: list(outputs), subject), order())
    return [output.attributes.get("subject") for output in delivered.outputs]


def test_a_function_of_the_event_gives_the_subject():
    assert subjects(Subject(lambda event: f"order-{event.order_id}"), placed(7)) == ["order-7"]


def test_a_field_is_named_and_becomes_text():
    assert subjects(Subject("order_id"), placed(7)) == ["7"]


def test_a_field_of_a_dict():
    assert subjects(Subject("order"), Message({"order": "a"}, {"type": "t"})) == ["a"]


def test_an_event_without_that_field_has_no_subject():
    assert subjects(Subject("order_id"), Message(Heartbeat()), Message(b"", {"type": "t"})) == [
        None,
        None,
    ]


def test_what_the_handler_set_stays():
    assert subjects(Subject("order_id"), placed(7, subject="own")) == ["own"]


@pytest.mark.parametrize("empty", [None, ""])
def test_a_function_may_give_none(empty):
    assert subjects(Subject(lambda event: empty), placed(7)) == [None]


def test_a_false_value_is_a_subject():
    assert subjects(Subject(lambda event: 0), placed(7)) == ["0"]


def test_a_function_that_fails_fails_its_message_alone_and_says_what_to_do():
    def handle(message):
        return [placed(1)] if message.id == "1" else [Message(Heartbeat())]

    router = router_of(handle, Subject(lambda event: event.order_id))
    delivered = deliver(router, order(1), order(2))
    assert [m.id for m in delivered.acked] == ["1"]
    assert isinstance(delivered.errors[0], HandlerError)
    assert "return None for events that have no subject" in str(delivered.errors[0])


def test_a_failed_message_does_not_disturb_its_neighbours():
    def handle(message):
        if message.id == "1":
            raise ValueError
        return [placed(2)]

    delivered = deliver(router_of(handle, Subject("order_id")), order(1), order(2))
    assert [output.subject for output in delivered.outputs] == ["2"]


def test_in_a_transaction_a_function_that_fails_rolls_its_message_back_alone():
    def handle(message):
        return [placed(1)] if message.id == "1" else [Message(Heartbeat())]

    chain, store = atomic(Subject(lambda event: event.order_id))
    delivered = deliver(router_of(handle, *chain), order(1), order(2))
    assert [event.subject for event in store.outbox()] == ["1"]
    assert [m.id for m in delivered.nacked] == ["2"]


@pytest.mark.parametrize("wrong", [None, 7, ""])
def test_it_refuses_what_is_neither_a_name_nor_a_function(wrong):
    with pytest.raises(ConfigError, match="order_id"):
        Subject(wrong)


def test_outside_the_outbox_it_is_refused():
    chain, _ = atomic(outside=(Subject("order_id"),))
    with pytest.raises(ConfigError, match=r"Transaction, Inbox, Outbox, Subject\)"):
        router_of(nothing, *chain).start()
