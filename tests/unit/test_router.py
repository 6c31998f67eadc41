"""The router: routes, the gate, the chain, and when messages are settled (A1 to A6)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.chains import (
    Ledger,
    ListInbox,
    ListOutbox,
    ListTransaction,
    OrderPlaced,
    PlaceOrder,
)

from conquiet import ConquietError, Message, Router
from conquiet.errors import (
    ConfigError,
    GivenBack,
    HandlerError,
    InvalidMessage,
    NoHandler,
    PermanentError,
    StoreError,
)
from conquiet.handler import Process
from conquiet.matcher import all_of, any_of, attribute, sources, types
from conquiet.stage import Stage


def naming(name: str, trace: list[str]) -> Any:
    def middleware(next: Process) -> Process:
        def process(batch):
            trace.append(f"{name} in")
            results = next(batch)
            trace.append(f"{name} out")
            return results

        return process

    return middleware


def router_with(function: Any, *middlewares: Any, **options: Any) -> Router:
    router = Router(**options)
    router.use(*middlewares)
    router.command(source="/orders")(function)
    return router


def succeed(order: PlaceOrder) -> None: ...


def fail(order: PlaceOrder) -> None:
    raise ValueError("no stock")


# --- the chain and the ack ---------------------------------------------------------------------


def test_a1_the_first_middleware_is_the_outermost_and_the_ack_comes_last():
    ledger = Ledger()
    router = router_with(succeed, naming("first", ledger.trace), naming("second", ledger.trace))
    router.process([ledger.message(1)])
    assert ledger.trace == ["first in", "second in", "second out", "first out", ("ack", "1")]


def test_a1_commit_comes_before_ack():
    ledger = Ledger()
    router_with(succeed, ListTransaction(ledger.trace)).process([ledger.message(1)])
    assert ledger.trace == [("begin", 1), "commit", ("ack", "1")]


def test_a2_success_without_outputs_is_acked():
    ledger = Ledger()
    router_with(succeed).process([ledger.message(1)])
    assert (ledger.acked, ledger.nacked) == (["1"], {})


def test_a2_a_handlers_error_is_a_nack_with_that_error():
    ledger = Ledger()
    router_with(fail).process([ledger.message(1)])
    assert ledger.acked == []
    assert str(ledger.nacked["1"]) == "no stock"


def test_a2_a_failed_commit_is_a_nack():
    ledger = Ledger()
    transaction = ListTransaction()
    transaction.failures = 99
    router_with(succeed, transaction).process([ledger.message(1)])
    assert isinstance(ledger.nacked["1"], StoreError)


def test_a2_no_handler_is_a_nack_that_names_the_known_types():
    ledger = Ledger()
    router_with(succeed).process([ledger.message(1, type="unknown.thing")])
    assert isinstance(ledger.nacked["1"], NoHandler)
    assert not isinstance(ledger.nacked["1"], PermanentError)  # the next release may know it
    assert "unknown.thing id=1" in str(ledger.nacked["1"])
    assert "known are: place.order" in str(ledger.nacked["1"])


def test_a2_a_matcher_that_refuses_is_a_nack_that_names_the_handler():
    ledger = Ledger()
    router = Router()
    router.event(match=sources("/eu/*"))(succeed)
    router.process([ledger.message(1, source="/us/1"), ledger.message(2, source="/eu/1")])
    assert ledger.acked == ["2"]
    assert "the matchers of succeed refused it" in str(ledger.nacked["1"])


def test_a2_manual_leaves_the_ack_to_the_handler():
    ledger = Ledger()

    def settle_it(order: PlaceOrder, message: Message) -> None:
        if order.id == 1:
            message.ack()
        if order.id == 2:
            message.nack(ValueError("mine"))

    router_with(settle_it, ack="manual").process(ledger.batch(3))
    assert ledger.acked == ["1"]
    assert str(ledger.nacked["2"]) == "mine"


def test_a2_manual_still_nacks_what_failed():
    ledger = Ledger()
    router_with(fail, ack="manual").process([ledger.message(1)])
    assert "1" in ledger.nacked


def place_two(order: PlaceOrder) -> list[OrderPlaced]:
    return [OrderPlaced(1), OrderPlaced(2)]


def test_a3_forward_acks_the_input_when_every_output_is_acked():
    ledger = Ledger()
    [outputs] = router_with(place_two, ack="forward").process([ledger.message(1)])
    outputs[0].ack()
    outputs[0].ack()
    assert ledger.acked == []
    outputs[1].ack()
    assert ledger.acked == ["1"]


def test_a3_forward_nacks_the_input_at_the_first_nack():
    ledger = Ledger()
    [outputs] = router_with(place_two, ack="forward").process([ledger.message(1)])
    outputs[1].nack(ValueError("broker"))
    assert str(ledger.nacked["1"]) == "broker"


def test_a3_forward_without_outputs_acks_at_once():
    ledger = Ledger()
    router_with(succeed, ack="forward").process([ledger.message(1)])
    assert ledger.acked == ["1"]


def test_a_batch_is_settled_in_one_call():
    ledger = Ledger()

    def odd_fails(order: PlaceOrder) -> None:
        if order.id % 2:
            raise ValueError

    router_with(odd_fails).process(ledger.batch(10))
    assert ledger.calls == 1
    assert ledger.acked == ["0", "2", "4", "6", "8"]
    assert list(ledger.nacked) == ["1", "3", "5", "7", "9"]


def test_a_settling_that_fails_does_not_raise(caplog):
    class Broken(Ledger):
        def settle(self, acked, nacked):
            raise ConnectionError("gone")

    router_with(succeed).process([Broken().message(1)])
    assert "will be delivered again" in caplog.text


def test_a_failure_is_logged_with_message_and_handler(caplog):
    router_with(fail).process([Ledger().message(1)])
    assert "nack handler=fail delivery=1: place.order id=1 source=/test" in caplog.text
    assert "no stock" in caplog.text


@pytest.mark.parametrize("ack", ["", "auto", None])
def test_an_unknown_strategy_is_refused(ack):
    with pytest.raises(ConfigError, match="choose one of on_success, manual, forward"):
        Router(ack=ack)


# --- several handlers for one type (A6) --------------------------------------------------------


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


# --- matchers ----------------------------------------------------------------------------------


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


# --- bad input at the gate ---------------------------------------------------------------------


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
        (Ledger().message(1, b'{"id": 1}' + b" " * 100), "at most 64 are taken"),
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


# --- transactions ------------------------------------------------------------------------------


def handler_failing_on(*bad: int, transaction: ListTransaction) -> Any:
    def effect(order: PlaceOrder) -> None:
        transaction.pending.append(order.id)
        if order.id in bad:
            raise ValueError(f"bad {order.id}")

    return effect


def test_a_batch_is_one_transaction():
    ledger, transaction = Ledger(), ListTransaction()
    router_with(handler_failing_on(transaction=transaction), transaction).process(ledger.batch(5))
    assert transaction.trace == [("begin", 5), "commit"]
    assert transaction.effects == [0, 1, 2, 3, 4]


def test_a_failing_message_leads_to_single_runs_and_costs_its_neighbours_nothing():
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_failing_on(1, transaction=transaction)
    router_with(handler, transaction).process(ledger.batch(3))
    assert transaction.trace == [
        ("begin", 3),
        "rollback",
        ("begin", 1),
        "commit",
        ("begin", 1),
        "rollback",
        ("begin", 1),
        "commit",
    ]
    assert transaction.effects == [0, 2]
    assert ledger.acked == ["0", "2"]
    assert str(ledger.nacked["1"]) == "bad 1"


def test_a_router_inside_a_transaction_does_not_ack_before_the_commit():
    outer, inner, transaction = Ledger(), Ledger(), ListTransaction()
    nested = router_with(succeed)

    def pass_on(order: PlaceOrder) -> None:
        nested.process([inner.message(order.id)])

    router_with(pass_on, transaction).process([outer.message(1)])
    assert inner.acked == []
    assert "ack before the commit" in str(outer.nacked["1"])


def test_inside_a_transaction_the_first_failure_ends_the_batch():
    ran: list[int] = []

    def effect(order: PlaceOrder) -> None:
        ran.append(order.id)
        if order.id == 0:
            raise ValueError

    router_with(effect, ListTransaction()).process(Ledger().batch(3))
    assert ran == [0, 0, 1, 2]


def test_without_a_transaction_nothing_runs_twice():
    ran: list[int] = []

    def effect(order: PlaceOrder) -> None:
        ran.append(order.id)
        if order.id == 1:
            raise ValueError

    ledger = Ledger()
    router_with(effect).process(ledger.batch(3))
    assert ran == [0, 1, 2]
    assert ledger.acked == ["0", "2"]


def test_a_store_that_fails_is_tried_again_and_no_message_is_blamed():
    ledger, transaction = Ledger(), ListTransaction()
    transaction.failures = 1
    router_with(handler_failing_on(transaction=transaction), transaction).process(ledger.batch(2))
    assert transaction.trace == [("begin", 2), "rollback", ("begin", 2), "commit"]
    assert transaction.effects == [0, 1]


def test_a_store_that_keeps_failing_gives_the_batch_back_whole():
    ledger, transaction = Ledger(), ListTransaction()
    transaction.failures = 99
    router_with(handler_failing_on(transaction=transaction), transaction).process(ledger.batch(3))
    assert transaction.trace.count(("begin", 3)) == transaction.store_tries
    assert transaction.effects == []
    assert all(isinstance(error, StoreError) for error in ledger.nacked.values())
    assert len(ledger.nacked) == 3


def test_a_store_that_dies_during_single_runs_is_not_asked_for_each_of_the_rest():
    ledger, transaction = Ledger(), ListTransaction()
    begun: list[int] = []

    def effect(order: PlaceOrder) -> None:
        begun.append(order.id)
        if order.id == 0 and transaction.trace.count("rollback") == 0:
            transaction.failures = 99
            raise ValueError("the batch fails, and then the store does")

    router_with(effect, transaction).process(ledger.batch(20))
    assert set(begun) == {0}
    assert len(ledger.nacked) == 20
    assert all(isinstance(error, StoreError) for error in ledger.nacked.values())


def test_a_message_in_progress_elsewhere_is_given_back_and_not_its_neighbours():
    ledger, transaction = Ledger(), ListTransaction()

    def effect(order: PlaceOrder) -> None:
        if order.id == 1:
            raise GivenBack("in progress elsewhere")
        transaction.pending.append(order.id)

    router_with(effect, transaction).process(ledger.batch(3))
    assert transaction.effects == [0, 2]
    assert list(ledger.nacked) == ["1"]


def test_a_matcher_that_fails_refuses_its_message_and_no_other(caplog):
    ledger = Ledger()
    router = Router()
    router.event(match=lambda message: message.attributes["region"] == "eu")(succeed)
    router.process([ledger.message(1), ledger.message(2, region="eu")])
    assert ledger.acked == ["2"]
    assert isinstance(ledger.nacked["1"], NoHandler)
    assert "the matcher of succeed failed" in caplog.text


def test_a_raw_handler_may_pass_its_input_on_and_it_does_not_go_back_to_its_topic():
    ledger = Ledger()
    router = Router(ack="forward")

    @router.raw()
    def pass_on(message: Message) -> list[Message]:
        return [message, message.copy(subject="twin")]

    message = ledger.message(1)
    message.topic, acking = "inputs", message.acking
    [[same, twin]] = router.process([message])
    assert (same.topic, twin.topic) == (None, None)
    assert message.acking is acking
    same.ack()
    twin.ack()
    assert ledger.acked == ["1"]


def test_ordered_messages_of_a_failed_key_wait_for_it():
    ledger, transaction = Ledger(), ListTransaction()
    batch = ledger.batch(4)
    for message, key in zip(batch, "aabb", strict=True):
        message.order_key = key
    handler = handler_failing_on(0, transaction=transaction)
    router_with(handler, transaction).process(batch)
    assert transaction.effects == [2, 3]
    assert isinstance(ledger.nacked["1"], GivenBack)


def test_ordered_messages_wait_without_a_transaction_and_behind_the_gate_too():
    for bad in (b'{"id": 0}', b"not json"):
        ledger, ran = Ledger(), []

        def effect(order: PlaceOrder, ran: list[int] = ran) -> None:
            ran.append(order.id)
            if order.id == 0:
                raise ValueError

        batch = [ledger.message(9, bad), ledger.message(1), ledger.message(2)]
        for message, key in zip(batch, "aab", strict=True):
            message.order_key = key
        router_with(effect).process(batch)
        assert 1 not in ran
        assert 2 in ran
        assert isinstance(ledger.nacked["1"], GivenBack)


# --- inbox and outbox --------------------------------------------------------------------------


def test_a_duplicate_is_skipped_and_acked():
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_failing_on(transaction=transaction)
    router = router_with(handler, transaction, ListInbox(transaction))
    router.process([ledger.message(1)])
    router.process([ledger.message(1)])
    assert transaction.effects == [1]
    assert ledger.acked == ["1", "1"]


def test_a_duplicate_is_acked_under_manual_too_since_its_handler_does_not_run():
    ledger, transaction = Ledger(), ListTransaction()

    def settle_it(order: PlaceOrder, message: Message) -> None:
        message.ack()

    router = router_with(settle_it, transaction, ListInbox(transaction), ack="manual")
    router.process([ledger.message(1)])
    router.process([ledger.message(1)])
    assert ledger.acked == ["1", "1"]


def test_a_message_that_stands_twice_in_one_batch_takes_effect_once():
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_failing_on(transaction=transaction)
    router = router_with(handler, transaction, ListInbox(transaction))
    router.process([ledger.message(1), ledger.message(2), ledger.message(1)])
    assert transaction.effects == [1, 2]
    assert ledger.acked == ["1", "2", "1"]


def test_s16_a_message_without_id_is_a_permanent_error_before_begin():
    ledger, transaction = Ledger(), ListTransaction()
    router = router_with(succeed, transaction, ListInbox(transaction))
    message = ledger.message(1)
    del message.attributes["id"]
    router.process([message])
    assert isinstance(ledger.nacked["1"], PermanentError)
    assert "the inbox needs an id" in str(ledger.nacked["1"])
    assert transaction.trace == []


def test_the_same_id_from_two_sources_is_two_messages():
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_failing_on(transaction=transaction)
    router = router_with(handler, transaction, ListInbox(transaction))
    router.process([ledger.message(1, source="/a"), ledger.message(1, source="/b")])
    assert transaction.effects == [1, 1]


def test_outputs_go_into_the_outbox_and_no_further():
    ledger, transaction = Ledger(), ListTransaction()
    router = router_with(place_two, transaction, ListInbox(transaction), ListOutbox(transaction))
    results = router.process(ledger.batch(2))
    assert [list(result) for result in results] == [[], []]
    assert [output.topic for output in transaction.effects] == ["orders"] * 4
    assert ledger.acked == ["0", "1"]


def test_an_output_that_names_its_topic_keeps_it():
    def place(order: PlaceOrder) -> Message:
        return Message(OrderPlaced(1), topic="audit")

    transaction = ListTransaction()
    router_with(place, transaction, ListOutbox(transaction)).process([Ledger().message(1)])
    assert [output.topic for output in transaction.effects] == ["audit"]


def test_outputs_of_a_failed_message_are_not_stored():
    ledger, transaction = Ledger(), ListTransaction()

    def place(order: PlaceOrder) -> list[OrderPlaced]:
        if order.id == 1:
            raise ValueError
        return [OrderPlaced(order.id)]

    router = router_with(place, transaction, ListInbox(transaction), ListOutbox(transaction))
    router_results = router.process(ledger.batch(3))
    assert isinstance(router_results[1], ValueError)
    assert [output.data.id for output in transaction.effects] == [0, 2]


def test_s3_an_inbox_without_outbox_refuses_declared_outputs_at_start():
    router = router_with(place_two, t := ListTransaction(), ListInbox(t))
    with pytest.raises(ConfigError, match=r"router.use\(Transaction, Inbox, Outbox\)"):
        router.start()


def test_s3_an_inbox_without_outbox_refuses_undeclared_outputs_and_rolls_back():
    def place(order: PlaceOrder):
        return [OrderPlaced(1)]

    ledger, transaction = Ledger(), ListTransaction()
    router_with(place, transaction, ListInbox(transaction)).process([ledger.message(1)])
    assert isinstance(ledger.nacked["1"], HandlerError)
    assert "Add an Outbox" in str(ledger.nacked["1"])
    assert transaction.trace == [("begin", 1), "rollback"]


# --- orders that cannot work -------------------------------------------------------------------


class Retryish:
    stage = Stage.RETRY

    def __call__(self, next: Process) -> Process:
        return next


class Claimish(Retryish):
    stage = Stage.CLAIM


class Correlationish:
    stage = Stage.OUTPUT

    def __call__(self, next: Process) -> Process:
        return next


@pytest.mark.parametrize(
    ("chain", "right"),
    [
        (lambda t: (t, Retryish()), "Retryish, ListTransaction"),
        (lambda t: (t, Claimish()), "Claimish, ListTransaction"),
        (lambda t: (Claimish(), Retryish(), t), "Retryish, Claimish, ListTransaction"),
        (lambda t: (ListInbox(t), t), "ListTransaction, ListInbox"),
        (lambda t: (t, ListOutbox(t), ListInbox(t)), "ListTransaction, ListInbox, ListOutbox"),
        (
            lambda t: (t, ListInbox(t), Correlationish(), ListOutbox(t)),
            "ListTransaction, ListInbox, ListOutbox, Correlationish",
        ),
    ],
)
def test_a5_a_wrong_order_is_refused_at_start_with_the_right_one_shown(chain, right):
    router = router_with(succeed, *chain(ListTransaction()))
    with pytest.raises(ConfigError) as refused:
        router.start()
    assert f"router.use({right})" in str(refused.value)


def test_an_inbox_without_a_transaction_is_refused_at_start():
    with pytest.raises(ConfigError, match="the chain has none"):
        router_with(succeed, ListInbox(ListTransaction())).start()


def test_nothing_can_be_registered_after_the_start():
    router = router_with(succeed)
    router.start()
    with pytest.raises(ConfigError, match="has started"):
        router.use(Retryish())
    with pytest.raises(ConfigError, match="has started"):
        router.event()(fail)


def test_what_cannot_be_called_is_no_middleware():
    with pytest.raises(ConfigError, match="not a middleware"):
        Router().use("retry")  # type: ignore[arg-type]


def test_a_command_without_source_and_names_that_are_empty_are_refused():
    with pytest.raises(ConfigError, match="source='/orders'"):
        Router().command(source="")
    with pytest.raises(ConfigError, match="'billing'"):
        ListInbox(ListTransaction(), "")
    with pytest.raises(ConfigError, match="max_data_bytes=0"):
        Router(max_data_bytes=0)


def test_a_middleware_that_raises_fails_the_batch_and_not_the_router():
    def broken(next: Process) -> Process:
        def process(batch):
            raise RuntimeError("bug")

        return process

    ledger = Ledger()
    router_with(succeed, broken).process(ledger.batch(2))
    assert len(ledger.nacked) == 2


def test_a_middleware_that_loses_results_fails_the_batch():
    def lossy(next: Process) -> Process:
        return lambda batch: next(batch)[:-1]

    ledger = Ledger()
    router_with(succeed, lossy).process(ledger.batch(2))
    assert all("one per message" in str(error) for error in ledger.nacked.values())


def test_every_error_of_ours_is_a_conquiet_error():
    for kind in (ConfigError, GivenBack, HandlerError, InvalidMessage, NoHandler, StoreError):
        assert issubclass(kind, ConquietError)
