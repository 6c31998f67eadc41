"""A router's transactions: batches, single runs, order, inbox and outbox."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.chains import (
    Ledger,
    ListInbox,
    ListOutbox,
    ListTransaction,
    OrderPlaced,
    PlaceOrder,
    place_two,
    router_with,
    succeed,
)

from conquiet import Message, Router
from conquiet.errors import (
    Blameless,
    ConfigError,
    Conflict,
    GivenBack,
    HandlerError,
    InvalidMessage,
    PermanentError,
    StoreError,
)
from conquiet.memory import Log
from conquiet.middleware import DeadLetter
from conquiet.transaction import MAX_BLAMELESS


def handler_failing_on(*bad: int, transaction: ListTransaction) -> Any:
    def effect(order: PlaceOrder) -> None:
        transaction.pending.append(order.id)
        if order.id in bad:
            raise ValueError(f"bad {order.id}")

    return effect


def test_a_second_transaction_in_a_chain_is_refused_at_start():
    router = router_with(succeed, ListTransaction(), ListTransaction())
    with pytest.raises(ConfigError, match=r"2 transactions in one chain.*one database per chain"):
        router.start()


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


# --- settlements in a handler wait for the commit ---------------------------------------------


def acking_by(settle: Any, transaction: ListTransaction, **options: Any) -> Router:
    """A router whose handler settles its message inside the transaction."""

    def handle(order: PlaceOrder, message: Message) -> None:
        settle(message)

    return router_with(handle, transaction, **options)


@pytest.mark.parametrize("ack", ["manual", "on_success"])
def test_an_ack_in_a_handler_waits_for_the_commit(ack):
    ledger = Ledger()
    router = acking_by(Message.ack, ListTransaction(ledger.trace), ack=ack)
    router.process(ledger.batch(2))
    assert ledger.trace == [("begin", 2), "commit", ("ack", "0"), ("ack", "1")]


def test_a_nack_in_a_handler_waits_for_the_commit():
    ledger = Ledger()
    router = acking_by(
        lambda message: message.nack(ValueError("mine")),
        ListTransaction(ledger.trace),
        ack="manual",
    )
    router.process([ledger.message(1)])
    assert ledger.trace == [("begin", 1), "commit", ("nack", "1")]
    assert str(ledger.nacked["1"]) == "mine"


@pytest.mark.parametrize("ack", ["manual", "on_success"])
def test_a_message_that_was_acked_in_a_transaction_that_fails_is_nacked(ack):
    ledger, transaction = Ledger(), ListTransaction()
    transaction.failures = 99
    acking_by(Message.ack, transaction, ack=ack).process([ledger.message(1)])
    assert ledger.acked == []
    assert isinstance(ledger.nacked["1"], StoreError)


def test_a_handler_that_acks_and_fails_is_nacked():
    ledger = Ledger()

    def ack_and_fail(message: Message[Any]) -> None:
        assert message.ack() is True
        assert message.ack() is False
        raise ValueError("too early")

    acking_by(ack_and_fail, ListTransaction(), ack="manual").process(ledger.batch(2))
    assert ledger.acked == []
    assert [str(error) for error in ledger.nacked.values()] == ["too early"] * 2


def test_an_attempt_that_was_rolled_back_leaves_no_settlement_to_the_next():
    ledger, transaction = Ledger(), ListTransaction()
    transaction.failures = 1
    answers = [lambda message: message.nack(ValueError("first")), Message.ack]
    router = acking_by(lambda message: answers.pop(0)(message), transaction, ack="manual")
    router.process([ledger.message(1)])
    assert (ledger.acked, ledger.nacked) == (["1"], {})


def test_a_thread_of_a_handler_waits_for_the_commit_too():
    ledger = Ledger()

    def ack_elsewhere(message: Message[Any]) -> None:
        with ThreadPoolExecutor(1) as executor:  # it does not copy the context
            assert executor.submit(message.ack).result(10) is True

    router = acking_by(ack_elsewhere, ListTransaction(ledger.trace), ack="manual")
    router.process([ledger.message(1)])
    assert ledger.trace == [("begin", 1), "commit", ("ack", "1")]


def test_an_async_handler_waits_for_the_commit_too():
    ledger = Ledger()

    async def handle(order: PlaceOrder, message: Message) -> None:
        message.ack()

    router = router_with(handle, ListTransaction(ledger.trace), ack="manual")
    router.process([ledger.message(1)])
    router.close()
    assert ledger.trace == [("begin", 1), "commit", ("ack", "1")]


def test_a_handler_that_acks_earlier_messages_acks_them_after_its_commit():
    ledger = Ledger()
    kept: list[Message[Any]] = []

    def ack_all_at_the_second(message: Message[Any]) -> None:
        kept.append(message)
        if len(kept) == 2:
            for earlier in kept:
                earlier.ack()

    router = acking_by(ack_all_at_the_second, ListTransaction(ledger.trace), ack="manual")
    router.process([ledger.message(1)])
    router.process([ledger.message(2)])
    assert ledger.trace[-3:] == ["commit", ("ack", "1"), ("ack", "2")]


def test_in_a_transaction_inside_another_settlements_wait_for_the_outer_commit():
    ledger = Ledger()
    inner = ListTransaction(ledger.trace)

    def handle(order: PlaceOrder, message: Message) -> None:
        inner.commit(lambda batch: [(), batch[0].ack()][:1], [message])

    router_with(handle, ListTransaction(ledger.trace), ack="manual").process([ledger.message(1)])
    assert ledger.trace[-3:] == ["commit", "commit", ("ack", "1")]


@pytest.mark.parametrize("outcome", ["done", "dead"])
def test_what_a_router_in_a_handler_settles_waits_for_the_commit(outcome):
    ledger, dead = Ledger(), Log()

    def end(order: PlaceOrder) -> None:
        if outcome == "dead":
            raise InvalidMessage("never")

    nested = router_with(end, DeadLetter(dead.sink()))

    def pass_on(order: PlaceOrder, message: Message) -> None:
        nested.settle(nested.run([message]))

    router_with(pass_on, ListTransaction(ledger.trace), ack="manual").process([ledger.message(1)])
    assert ledger.trace == [("begin", 1), "commit", ("ack", "1")]


def test_a_settlement_after_the_commit_that_fails_runs_nothing_again(caplog):
    class Away(Ledger):
        def settle(self, acked, nacked):
            raise ConnectionError("away")

    transaction = ListTransaction()
    acking_by(Message.ack, transaction, ack="manual").process([Away().message(1)])
    assert transaction.trace == [("begin", 1), "commit"]
    assert "will be delivered again" in caplog.text


def test_after_a_rollback_a_middleware_outside_may_settle():
    ledger = Ledger()

    def forgive(next: Any) -> Any:
        def process(batch: Any) -> Any:
            next(batch)
            for message in batch:
                assert message.ack() is True
            return [()] * len(batch)

        return process

    def fail(order: PlaceOrder) -> None:
        raise ValueError

    router_with(fail, forgive, ListTransaction(), ack="manual").process([ledger.message(1)])
    assert ledger.acked == ["1"]


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
    assert transaction.trace.count(("begin", 3)) == transaction.max_store_attempts
    assert transaction.effects == []
    assert all(isinstance(error, StoreError) for error in ledger.nacked.values())
    assert len(ledger.nacked) == 3


def test_a_store_that_dies_during_single_runs_is_not_asked_for_each_of_the_rest():
    ledger, transaction = Ledger(), ListTransaction()
    begun: list[int] = []

    def effect(order: PlaceOrder) -> None:
        begun.append(order.id)
        if order.id == 0:
            transaction.is_away = True
            raise ValueError("the batch fails, and then the store does")

    router_with(effect, transaction).process(ledger.batch(20))
    assert set(begun) == {0}
    assert len(transaction.trace) <= 2 + transaction.max_store_attempts
    assert len(ledger.nacked) == 20
    assert all(isinstance(error, StoreError) for error in ledger.nacked.values())


# --- who is to blame ---------------------------------------------------------------------------


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conquiet.transaction._RETRY_SECONDS", 0)


def handler_that_meets(error: type[StoreError], *bad: int, transaction: ListTransaction) -> Any:
    def effect(order: PlaceOrder) -> None:
        transaction.pending.append(order.id)
        if order.id in bad:
            raise error(f"could not obtain lock, says {order.id}")

    return effect


@pytest.mark.parametrize("bad", [(0,), (7,), (19,), (0, 1, 2, 3, 4), (3, 9, 18)])
def test_a_message_that_fails_alone_as_the_store_while_others_commit_is_to_blame(bad):
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_that_meets(StoreError, *bad, transaction=transaction)
    router_with(handler, transaction).process(ledger.batch(20))
    assert transaction.effects == [number for number in range(20) if number not in bad]
    assert list(ledger.nacked) == [str(number) for number in bad]
    for error in ledger.nacked.values():
        assert not isinstance(error, Blameless)
        assert "fails alone while other messages are committed" in str(error)
        assert "could not obtain lock" in str(error)


@pytest.mark.parametrize("failures", range(1, 14))
@pytest.mark.usefixtures("no_pauses")
def test_an_outage_that_ends_between_two_groups_blames_no_message(failures):
    ledger, transaction = Ledger(), ListTransaction()
    transaction.failures = failures
    router_with(handler_failing_on(transaction=transaction), transaction).process(ledger.batch(8))
    assert all(isinstance(error, StoreError) for error in ledger.nacked.values())
    assert sorted(transaction.effects) == sorted(int(name) for name in ledger.acked)


@pytest.mark.usefixtures("no_pauses")
def test_a_message_that_failed_as_the_store_is_blamed_later_if_others_were_committed_since():
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_that_meets(StoreError, 0, transaction=transaction)
    router = router_with(handler, transaction)
    errors = []
    for number in (0, 0, 1, 0, 0):
        router.process([ledger.message(number)])
        errors.append(type(ledger.nacked["0"]))
    assert errors == [StoreError, StoreError, StoreError, HandlerError, HandlerError]


@pytest.mark.usefixtures("no_pauses")
def test_blameless_deliveries_of_one_message_are_bounded():
    ledger, transaction = Ledger(), ListTransaction()
    handler = handler_that_meets(StoreError, 0, transaction=transaction)
    router = router_with(handler, transaction)
    errors = []
    for _ in range(MAX_BLAMELESS + 1):
        router.process([ledger.message(0)])
        errors.append(ledger.nacked["0"])
    blamed = [not isinstance(error, Blameless) for error in errors]
    assert blamed == [False] * (MAX_BLAMELESS - 1) + [True] * 2


@pytest.mark.usefixtures("no_pauses")
def test_a_store_that_commits_nothing_blames_no_message_however_often_it_fails():
    ledger, transaction = Ledger(), ListTransaction()
    transaction.failures = 10_000
    router = router_with(handler_failing_on(transaction=transaction), transaction)
    for _ in range(2 * MAX_BLAMELESS):
        router.process(ledger.batch(2))
    assert all(isinstance(error, StoreError) for error in ledger.nacked.values())


def test_a_blamed_message_that_succeeds_in_the_end_is_acked():
    ledger, transaction, tries = Ledger(), ListTransaction(), []

    def effect(order: PlaceOrder) -> None:
        tries.append(order.id)
        if order.id == 0 and tries.count(0) < 9:
            raise StoreError("could not obtain lock")
        transaction.pending.append(order.id)

    router = router_with(effect, transaction)
    router.process(ledger.batch(2))
    router.process([ledger.message(0)])
    assert transaction.effects == [1, 0]
    assert ledger.acked == ["1", "0"]


def test_ordered_messages_wait_for_one_that_failed_as_the_store():
    ledger, transaction = Ledger(), ListTransaction()
    batch = ledger.batch(4)
    for message, key in zip(batch, "aabb", strict=True):
        message.order_key = key
    handler = handler_that_meets(StoreError, 0, transaction=transaction)
    router_with(handler, transaction).process(batch)
    assert transaction.effects == [2, 3]
    assert isinstance(ledger.nacked["1"], GivenBack)


def sizes(transaction: ListTransaction) -> list[int]:
    return [step[1] for step in transaction.trace if step != "commit" and step != "rollback"]


def test_after_a_conflict_groups_are_smaller_and_stay_so_for_a_while():
    ledger, transaction = Ledger(), ListTransaction()
    largest = 2

    def effect(order: PlaceOrder) -> None:
        transaction.pending.append(order.id)
        if len(transaction.pending) > largest:
            raise Conflict("deadlock detected")

    router = router_with(effect, transaction)
    router.process(ledger.batch(15))
    assert sizes(transaction) == [15, 3, *[1] * 15]
    assert transaction.effects == list(range(15))
    transaction.trace.clear()
    router.process(ledger.batch(15))
    assert sizes(transaction) == [1] * 15
    largest = 100
    for _ in range(200):
        router.process(ledger.batch(15))
    transaction.trace.clear()
    router.process(ledger.batch(15))
    assert sizes(transaction) == [15]


def test_a_single_message_outlasts_many_conflicts():
    ledger, transaction, tries = Ledger(), ListTransaction(), []

    def effect(order: PlaceOrder) -> None:
        tries.append(order.id)
        if len(tries) < 10:
            raise Conflict("could not serialize access")

    router_with(effect, transaction).process([ledger.message(0)])
    assert (len(tries), ledger.acked) == (10, ["0"])


def test_a_message_in_progress_elsewhere_is_given_back_and_not_its_neighbours():
    ledger, transaction = Ledger(), ListTransaction()

    def effect(order: PlaceOrder) -> None:
        if order.id == 1:
            raise GivenBack("in progress elsewhere")
        transaction.pending.append(order.id)

    router_with(effect, transaction).process(ledger.batch(3))
    assert transaction.effects == [0, 2]
    assert list(ledger.nacked) == ["1"]


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


# --- inbox and outbox -------------------------------------------------------------------------


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
