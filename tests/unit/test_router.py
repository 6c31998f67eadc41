"""The router: the chain, its order, and when messages are settled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.chains import (
    Ledger,
    ListInbox,
    ListOutbox,
    ListTransaction,
    PlaceOrder,
    place_two,
    router_with,
    succeed,
)

from conquiet import ConquietError, Message, Router, Worker
from conquiet.cli.logs import ConsoleFormatter, JsonFormatter
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
from conquiet.matcher import sources
from conquiet.memory import Log
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


def fail(order: PlaceOrder) -> None:
    raise ValueError("no stock")


# --- the chain and the ack --------------------------------------------------------------------


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
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    fields = {name: line[name] for name in ("event_id", "event_type", "handler", "attempt")}
    assert fields == {"event_id": "1", "event_type": "place.order", "handler": "fail", "attempt": 1}
    assert "event_id=" not in ConsoleFormatter().format(record)  # its text names them


@pytest.mark.parametrize("ack", ["", "auto", None])
def test_an_unknown_strategy_is_refused(ack):
    with pytest.raises(ConfigError, match="choose one of on_success, manual, forward"):
        Router(ack=ack)


# --- orders that cannot work ------------------------------------------------------------------


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


def test_a_router_without_handlers_is_refused_at_start():
    with pytest.raises(ConfigError, match="the router has no handlers"):
        Router().start()
    with pytest.raises(ConfigError, match="the router has no handlers"):
        Worker(Log().source("g"), Router()).start()


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
