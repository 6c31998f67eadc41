"""Which handlers a message goes to, and what never reaches one (matchers, the gate)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.chains import Ledger, ListInbox, ListTransaction, PlaceOrder, router_with, succeed

from conquiet import Message, Router
from conquiet.errors import ConfigError, InvalidMessage, NoHandler
from conquiet.matcher import all_of, any_of, attribute, sources, types

# --- several handlers for one type -------------------------------------------------------


def test_a6_every_handler_of_a_type_runs_and_the_message_is_acked_once():
    ledger, ran = Ledger(), []
    router = Router()

    @router.event()
    def bill(order: PlaceOrder) -> None:
        ran.append("bill")

    @router.event()
    def ship(order: PlaceOrder) -> None:
        ran.append("ship")

    router.process([ledger.message(1)])
    assert ran == ["bill", "ship"]
    assert ledger.acked == ["1"]


def test_a6_each_handler_has_its_own_inbox_name_so_only_the_failed_one_runs_again():
    ledger, transaction, ran = Ledger(), ListTransaction(), []
    trucks: list[str] = []
    router = Router()
    router.use(transaction, ListInbox(transaction, "shop"))

    @router.event()
    def bill(order: PlaceOrder) -> None:
        ran.append("bill")

    @router.event()
    def ship(order: PlaceOrder) -> None:
        ran.append("ship")
        if not trucks:
            raise ValueError("no truck")

    router.process([ledger.message(1)])
    assert str(ledger.nacked["1"]) == "no truck"
    assert transaction.marks == {("shop/bill", "/test 1")}
    trucks.append("red")
    ran.clear()
    router.process([ledger.message(1)])
    assert ran == ["ship"]
    assert ledger.acked == ["1"]


def test_two_handlers_of_one_name_are_refused():
    router = Router()
    router.event()(succeed)
    with pytest.raises(ConfigError, match="give one of them name="):
        router.event()(succeed)


# --- matchers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matcher", "expected"),
    [
        (types("place.order"), True),
        (types("place.*"), True),
        (types("*.order", "x"), True),
        (types("place"), False),
        (types("place?order"), False),  # only the star is special
        (sources("/te*"), True),
        (sources("*/test/*"), False),
        (attribute("region", "eu*"), True),
        (attribute("missing", "*"), False),
        (all_of(types("place.*"), sources("/test")), True),
        (all_of(types("place.*"), sources("/other")), False),
        (any_of(types("other"), sources("/test")), True),
        (any_of(types("other"), sources("/other")), False),
    ],
)
def test_matchers_look_at_attributes(matcher, expected):
    assert matcher(Ledger().message(1, region="eu-1")) is expected


def test_a_matcher_without_patterns_is_refused():
    with pytest.raises(ConfigError, match="at least one pattern"):
        types()


def test_a_handler_may_match_instead_of_naming_a_type():
    ledger, seen = Ledger(), []
    router = Router()

    @router.event(match=types("place.*", "ship.*"))
    def audit(data: dict) -> None:
        seen.append(data["id"])

    router.process([ledger.message(1), ledger.message(2, type="ship.order")])
    assert seen == [1, 2]


def test_a_matcher_that_fails_refuses_its_message_and_no_other(caplog):
    ledger = Ledger()
    router = Router()
    router.event(match=lambda message: message.attributes["region"] == "eu")(succeed)
    router.process([ledger.message(1), ledger.message(2, region="eu")])
    assert ledger.acked == ["2"]
    assert isinstance(ledger.nacked["1"], NoHandler)
    assert "the matcher of succeed failed" in caplog.text


# --- bad input at the gate --------------------------------------------------------------------


def named_by_a_number() -> Message[Any]:
    message = Ledger().message(1)
    message.attributes[7] = "x"  # as a source might that decodes another format
    return message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Ledger().message(1, type=None), "no type"),
        (Ledger().message(1, type=""), "no type"),
        (Ledger().message(1, type=7), "'type' must be a string, not int"),
        (Ledger().message(1, subject=7), "'subject' must be a string, not int"),
        (named_by_a_number(), "the name of an attribute must be a string, not int"),
        (Ledger().message(1, shoe=["a"]), "'shoe' must be a string, a number .* not list"),
        (Ledger().message(1, b'{"id": "x"}'), r"not a valid PlaceOrder.*\$.id"),
        (Ledger().message(1, b"{"), "not a valid PlaceOrder"),
        (Ledger().message(1, b'{"id": 1}' + b" " * 100), "at most 64 are accepted"),
    ],
)
def test_bad_input_never_opens_a_transaction_and_costs_its_neighbours_nothing(message, reason):
    transaction = ListTransaction()
    ledger = Ledger()
    router = router_with(succeed, transaction, max_data_bytes=64)
    results = router.process([ledger.message("a", b'{"id": 1}'), message, ledger.message(3)])
    assert isinstance(results[1], InvalidMessage)
    with pytest.raises(InvalidMessage, match=reason):
        raise results[1]
    assert ledger.acked == ["a", "3"]
    assert transaction.trace == [("begin", 2), "commit"]


def test_fifty_megabytes_are_refused_by_default_with_the_setting_named():
    [result] = router_with(succeed).process([Ledger().message(1, b"x" * 50_000_000)])
    assert isinstance(result, InvalidMessage)
    assert "50,000,000 bytes of data" in str(result)
    assert "Router(max_data_bytes=…)" in str(result)


def test_types_from_outside_do_not_fill_the_memory():
    router = router_with(succeed)
    for number in range(11_000):
        router.run([Message(b"", {"type": f"t{number}"})])
    assert len(router._routes) <= 10_000
