"""Which handlers a message goes to, and what never reaches one (matchers, the gate)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.chains import Ledger, ListInbox, ListTransaction, PlaceOrder, router_with, succeed
from tests.unit.workers import drained, start
from tests.waiting import eventually

from conquiet import Message, Router
from conquiet.errors import (
    ConfigError,
    GivenBack,
    InvalidMessage,
    NoHandler,
    PermanentError,
    StoreError,
)
from conquiet.matcher import all_of, any_of, attribute, sources, types
from conquiet.memory import Log
from conquiet.middleware import DeadLetter, Retry

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


def two_handlers(*middlewares: Any, bill: Any, ship: Any) -> Router:
    """A router of two handlers, which do what these functions of the message do."""
    router = Router()
    router.use(*middlewares)

    @router.raw(name="bill")
    def run_bill(message: Message) -> None:
        bill(message)

    @router.raw(name="ship")
    def run_ship(message: Message) -> None:
        ship(message)

    return router


def fail(message: Message[Any]) -> None:
    raise ValueError(message.id)


def keyed(ledger: Ledger, *numbers: int) -> list[Message[Any]]:
    batch = [ledger.message(number) for number in numbers]
    for message in batch:
        message.order_key = "k"
    return batch


@pytest.mark.parametrize("with_transaction", [False, True])
def test_a_handler_that_fails_does_not_keep_the_other_one_from_its_message(with_transaction):
    ledger, shipped = Ledger(), []
    chain = [ListTransaction()] if with_transaction else []
    router = two_handlers(*chain, bill=fail, ship=lambda message: shipped.append(message.id))
    router.process(keyed(ledger, 1, 2))
    assert shipped[-1] == "1"
    assert "2" not in shipped  # it waits for the first
    assert isinstance(ledger.nacked["1"], ValueError)
    assert isinstance(ledger.nacked["2"], GivenBack)


def test_a_retry_of_one_handler_does_not_wait_for_the_other():
    ledger, tries = Ledger(), []

    def at_last(message: Message[Any]) -> None:
        tries.append(message.id)
        if len(tries) < 3:
            raise ValueError(message.id)

    def hopeless(message: Message[Any]) -> None:
        raise InvalidMessage("never")

    retry = Retry(max_attempts=3, first=0)
    two_handlers(retry, bill=hopeless, ship=at_last).process(keyed(ledger, 1))
    assert tries == ["1", "1", "1"]


def test_data_that_one_handler_refuses_reaches_the_other_one():
    ledger, seen = Ledger(), []
    router = Router()

    @router.event(type="place.order")
    def strict(order: PlaceOrder) -> None: ...

    @router.event(type="place.order")
    def lenient(data: dict) -> None:
        seen.append(data)

    [message] = keyed(ledger, 1)
    message.data = b'{"id": "x"}'
    router.process([message])
    assert seen == [{"id": "x"}]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("error", [ValueError("for ever"), InvalidMessage("for ever")])
def test_a_message_that_is_dead_for_one_handler_is_one_dead_letter(workers, ordered, error):
    log, dead, shipped = Log(), Log(), []
    messages = [Ledger().message(number, subject="k") for number in range(3)]
    log.sink("orders").publish(messages)

    def fail_first(message: Message[Any]) -> None:
        if message.id == "0":
            raise error

    def ship_later(message: Message[Any]) -> None:
        if message.id == "0" and message.deliveries < 3:
            raise ConnectionError("no truck")
        shipped.append(message.id)

    letters = DeadLetter(dead.sink(), max_attempts=4)
    router = two_handlers(letters, bill=fail_first, ship=ship_later)
    worker = start(workers, log.source("g", ordered=ordered), router, ordered=ordered)
    eventually(lambda: drained(log))
    [letter] = dead.replay()
    assert letter.attributes["deadhandler"] == "bill"
    assert set(shipped) == {"0", "1", "2"}
    assert worker.health().ok


def test_a_store_that_is_away_for_one_handler_does_not_bury_the_other_ones_message_again():
    dead, ledger = Log(), Ledger()

    def away(message: Message[Any]) -> None:
        raise StoreError("away")

    router = two_handlers(DeadLetter(dead.sink(), max_attempts=1), bill=fail, ship=away)
    for _ in range(3):
        router.process([ledger.message(1)])
    assert len(dead) == 0
    assert isinstance(ledger.nacked["1"], (StoreError, ValueError))


@pytest.mark.parametrize("bill_error", [InvalidMessage("never"), ValueError("now and then")])
@pytest.mark.parametrize("first", ["bill", "ship"])
def test_a_source_hears_of_the_handler_that_can_be_retried(bill_error, first):
    """Else it would bury the message, and the other handler would never run."""
    ledger = Ledger()

    def bill(message: Message[Any]) -> None:
        raise bill_error

    def ship(message: Message[Any]) -> None:
        raise StoreError("away")

    run = {"bill": bill, "ship": ship} if first == "bill" else {"bill": ship, "ship": bill}
    two_handlers(**run).process([ledger.message(1)])
    assert isinstance(ledger.nacked["1"], StoreError)


def test_a_failure_of_two_handlers_holds_their_key_no_longer_than_until_it_is_handled(workers):
    log, done = Log(), []
    log.sink("orders").publish([Ledger().message(number, subject="k") for number in range(3)])

    def first_time(message: Message[Any]) -> None:
        if message.deliveries == 1 and message.id == "0":
            raise ValueError("the first time")
        done.append(message.id)

    router = two_handlers(bill=first_time, ship=first_time)
    start(workers, log.source("g"), router, ordered=True, batch_size=1)
    eventually(lambda: drained(log), timeout=20)
    assert done == ["0", "0", "1", "1", "2", "2"]


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


# --- what no handler takes --------------------------------------------------------------------


def test_unknown_types_can_be_passed_over():
    ledger = Ledger()
    router = router_with(succeed, unknown="ack", ack="manual")
    router.process([ledger.message(1, type="other.thing"), ledger.message(2, type=None)])
    assert ledger.acked == ["1"]
    assert isinstance(ledger.nacked["2"], InvalidMessage)  # without a type it is broken


def test_a_message_that_all_matchers_refuse_is_unknown_too():
    ledger = Ledger()
    router = Router(unknown="ack")
    router.event(match=sources("/eu/*"))(succeed)
    router.process([ledger.message(1, source="/us/1")])
    assert ledger.acked == ["1"]


def test_unknown_types_can_be_dead_letters_at_once():
    ledger, dead = Ledger(), Log()
    router = router_with(succeed, DeadLetter(dead.sink()), unknown="dead")
    router.process([ledger.message(1, type="other.thing"), ledger.message(2)])
    [letter] = dead.replay()
    assert letter.id == "1"
    assert "UnknownType" in letter.attributes["deadreason"]
    assert sorted(ledger.acked) == ["1", "2"]


def test_unknown_types_are_nacked_by_default():
    ledger = Ledger()
    [result] = router_with(succeed).process([ledger.message(1, type="other.thing")])
    assert isinstance(result, NoHandler)
    assert not isinstance(result, PermanentError)
    assert "@router.fallback()" in str(result)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="choose one of nack, dead, ack"):
        Router(unknown="skip")


def test_a_fallback_runs_only_if_no_other_handler_takes_a_message():
    ledger, known, rest = Ledger(), [], []
    router = Router()

    @router.event(match=sources("/test"))
    def place(order: PlaceOrder) -> None:
        known.append(order.id)

    @router.fallback()
    def others(message: Message) -> None:
        rest.append(message.id)

    router.process(
        [
            ledger.message(1),
            ledger.message(2, type="other.thing"),
            ledger.message(3, source="/elsewhere"),
        ]
    )
    assert (known, rest) == ([1], ["2", "3"])
    assert ledger.acked == ["1", "2", "3"]


def test_a_router_has_one_fallback_whose_name_is_its_own():
    def others(message: Message) -> None: ...

    router = Router()
    router.raw(name="others")(others)
    with pytest.raises(ConfigError, match="two handlers are called others"):
        router.fallback()(others)
    router.fallback(name="rest")(others)
    with pytest.raises(ConfigError, match="a router has one fallback, and it is rest"):
        router.fallback(name="more")(others)


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
