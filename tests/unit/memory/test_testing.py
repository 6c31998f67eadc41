"""`conquiet.testing`: what it gives to users' tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from conquiet import Router
from conquiet.errors import NoHandler
from conquiet.memory import Inbox, Log, Outbox, Store, Transaction
from conquiet.testing import deliver, eventually, message
from conquiet.testing.contracts import SourceContract


@dataclass
class OrderPlaced:
    order: int


def test_an_event_becomes_a_complete_message():
    made = message(OrderPlaced(7), subject="s")
    assert (made.data, made.type, made.subject) == (b'{"order":7}', "order.placed", "s")
    assert made.id
    assert made.source
    assert made.time is not None


def test_an_attribute_given_as_none_is_left_out():
    assert "id" not in message(id=None).attributes


def test_bytes_stay_as_they_are():
    assert message(b"\x00\xff").data == b"\x00\xff"
    assert message({"a": 1}, type="x").data == b'{"a":1}'


def test_a_delivery_tells_what_became_of_each_message():
    router = Router()

    @router.command(source="/shop")
    def place(order: OrderPlaced) -> list[OrderPlaced]:
        if order.order < 0:
            raise ValueError("no such order")
        return [OrderPlaced(order.order + 1)]

    delivered = deliver(router, OrderPlaced(1), OrderPlaced(-1), message(type="unknown"))
    assert [item.data for item in delivered.acked] == [b'{"order":1}']
    assert [type(error) for error in delivered.errors] == [ValueError, NoHandler]
    assert delivered.events == [OrderPlaced(2)]


def test_outputs_of_a_chain_with_an_outbox_are_in_the_store():
    store, router = Store(), Router()
    router.use(Transaction(store), Inbox("shop"), Outbox("orders"))

    @router.command(source="/shop")
    def place(order: OrderPlaced) -> list[OrderPlaced]:
        return [order]

    assert deliver(router, OrderPlaced(1)).outputs == []
    assert [event.data for event in store.outbox()] == [b'{"order":1}']


def test_eventually_explains_what_did_not_happen():
    with pytest.raises(AssertionError, match="the moon is full"):
        eventually(lambda: False, timeout=0.02, message="the moon is full")


def test_a_binding_that_hides_a_part_of_the_contract_is_refused():
    with pytest.raises(TypeError, match="take"):

        class Broken(SourceContract):
            def open(self, lease):
                return Log().source("group")

            def publish(self, messages): ...

            def take(self): ...
