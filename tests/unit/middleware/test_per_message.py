"""One decorated function is a middleware; it sees one message, the chain sees the batch."""

from __future__ import annotations

import pytest
from tests.unit.middleware.routers import atomic, nothing, order, placed, router_of

from conquiet.errors import ConfigError, GivenBack, HandlerError
from conquiet.handler import NOTHING
from conquiet.middleware import Correlation, per_message
from conquiet.middleware.per_message import PerMessage
from conquiet.stage import Stage
from conquiet.testing import deliver


@per_message
def passes(message):
    yield


def process_of(middleware, rest):
    return middleware(rest)


def all_fine(batch):
    return [NOTHING for _ in batch]


def test_the_rest_of_the_chain_runs_once_for_the_whole_batch():
    calls = []

    def rest(batch):
        calls.append(len(batch))
        return all_fine(batch)

    passes(rest)([order(1), order(2), order(3)])
    assert calls == [3]


def test_all_start_then_the_chain_runs_then_all_end():
    steps = []

    @per_message
    def traced(message):
        steps.append(f"in {message.id}")
        yield
        steps.append(f"out {message.id}")

    router = router_of(lambda m: steps.append(f"run {m.id}"), traced)
    deliver(router, order(1), order(2))
    assert steps == ["in 1", "in 2", "run 1", "run 2", "out 1", "out 2"]


def test_yield_gives_the_outputs():
    seen = []

    @per_message
    def watch(message):
        outputs = yield
        seen.append([output.data.order_id for output in outputs])

    deliver(router_of(lambda m: [placed(int(m.id))], watch), order(1), order(2))
    assert seen == [[1], [2]]


def test_to_end_without_a_value_keeps_the_outputs():
    assert deliver(router_of(lambda _: [placed(1)], passes), order()).outputs


def test_to_return_a_list_replaces_the_outputs():
    @per_message
    def doubles(message):
        outputs = yield
        return [*outputs, placed(2)]

    delivered = deliver(router_of(lambda _: [placed(1)], doubles), order())
    assert [event.order_id for event in delivered.events] == [1, 2]


def test_to_return_before_the_yield_skips_the_rest_for_this_message_alone():
    ran = []

    @per_message
    def skips_odd(message):
        if int(message.id) % 2:
            return [placed(100)]
        yield
        return None

    delivered = deliver(router_of(lambda m: ran.append(m.id), skips_odd), order(1), order(2))
    assert ran == ["2"]
    assert [event.order_id for event in delivered.events] == [100]
    assert len(delivered.acked) == 2


def test_the_error_of_a_message_is_raised_at_its_yield():
    seen = {}

    @per_message
    def watch(message):
        try:
            yield
        except ValueError as error:
            seen[message.id] = str(error)
            raise

    def handle(message):
        if message.id == "2":
            raise ValueError("no")

    delivered = deliver(router_of(handle, watch), order(1), order(2), order(3))
    assert seen == {"2": "no"}
    assert [m.id for m in delivered.nacked] == ["2"]


def failing(message):
    raise ValueError(message.id)


def test_to_return_outputs_swallows_an_error():
    @per_message
    def forgiving(message):
        try:
            yield
        except ValueError:
            return []

    assert deliver(router_of(failing, forgiving), order()).acked


def test_to_end_without_a_value_does_not_swallow_an_error():
    @per_message
    def logs(message):
        try:
            yield
        except ValueError:
            pass

    delivered = deliver(router_of(failing, logs), order())
    assert isinstance(delivered.errors[0], ValueError)


def test_to_raise_another_error_replaces_it():
    @per_message
    def translates(message):
        try:
            yield
        except ValueError as error:
            raise KeyError("translated") from error

    delivered = deliver(router_of(failing, translates), order())
    assert isinstance(delivered.errors[0], KeyError)


def test_a_message_that_was_not_handled_cannot_be_swallowed():
    @per_message
    def forgiving(message):
        try:
            yield
        except Exception:
            return []

    back = GivenBack("not yet")
    assert forgiving(lambda batch: [back])([order()]) == [back]


def test_a_failure_before_the_yield_fails_this_message_alone():
    @per_message
    def refuses_two(message):
        if message.id == "2":
            raise ValueError("two")
        yield

    delivered = deliver(router_of(nothing, refuses_two), order(1), order(2), order(3))
    assert [m.id for m in delivered.acked] == ["1", "3"]


def test_later_messages_of_a_key_wait_for_one_that_failed_before_its_yield():
    ran = []

    @per_message
    def refuses_one(message):
        if message.id == "1":
            raise ValueError("one")
        yield

    router = router_of(lambda m: ran.append(m.id), refuses_one)
    delivered = deliver(router, order(1, key="a"), order(2, key="a"), order(3, key="b"))
    assert ran == ["3"]
    assert isinstance(delivered.errors[1], GivenBack)


def test_yielding_twice_is_an_error_that_names_the_function():
    closed = []

    @per_message
    def stutters(message):
        try:
            yield
            yield
        finally:
            closed.append(message.id)

    delivered = deliver(router_of(nothing, stutters), order())
    assert isinstance(delivered.errors[0], HandlerError)
    assert "stutters yielded twice" in str(delivered.errors[0])
    assert closed == ["1"]


@pytest.mark.parametrize("wrong", [7, placed(1), [1], "text"])
def test_to_return_something_else_is_an_error_that_says_what_to_return(wrong):
    @per_message
    def returns_wrong(message):
        yield
        return wrong

    delivered = deliver(router_of(nothing, returns_wrong), order())
    assert "return a list of messages" in str(delivered.errors[0])


def test_a_function_without_yield_is_refused_when_it_is_decorated():
    with pytest.raises(ConfigError, match="has no yield"):
        per_message(lambda message: None)


def test_an_async_generator_is_refused():
    async def asynchronous(message):
        yield

    with pytest.raises(ConfigError, match="async"):
        per_message(asynchronous)


def test_it_keeps_its_name_and_takes_a_stage():
    @per_message(stage=Stage.OUTPUT)
    def marks(message):
        """Marks outputs."""
        yield

    assert isinstance(marks, PerMessage)
    assert marks.__name__ == "marks"
    assert marks.__doc__ == "Marks outputs."
    assert marks.stage is Stage.OUTPUT


def test_its_stage_is_checked_when_the_router_starts():
    @per_message(stage=Stage.OUTPUT)
    def marks(message):
        yield

    chain, _ = atomic(outside=(marks,))
    with pytest.raises(ConfigError, match=r"Transaction, Inbox, Outbox, marks\)"):
        router_of(nothing, *chain).start()


def test_in_a_transaction_a_failed_batch_closes_them_and_then_each_meets_its_own_outcome():
    outcomes = []

    @per_message
    def watch(message):
        try:
            yield
            outcomes.append(f"{message.id} fine")
        except Exception as error:
            outcomes.append(f"{message.id} {error}")
            raise
        finally:
            outcomes.append(f"{message.id} end")

    def handle(message):
        if message.id == "2":
            raise ValueError("no")
        return [placed(int(message.id))]

    chain, store = atomic(watch)
    delivered = deliver(router_of(handle, *chain), order(1), order(2))
    assert outcomes[:2] == ["1 end", "2 end"]  # closed: whose error it was is not known yet
    assert outcomes[2:] == ["1 fine", "1 end", "2 no", "2 end"]
    assert [m.id for m in delivered.acked] == ["1"]
    assert len(store.outbox()) == 1


def test_in_a_transaction_a_failure_before_the_yield_runs_nobody():
    ran = []

    @per_message
    def refuses_two(message):
        if message.id == "2":
            raise ValueError("two")
        yield

    chain, _ = atomic(refuses_two)
    delivered = deliver(router_of(lambda m: ran.append(m.id), *chain), order(1), order(2))
    assert ran == ["1"]  # only in the second round, one by one
    assert [m.id for m in delivered.nacked] == ["2"]


def test_in_a_transaction_of_one_message_an_error_can_be_swallowed():
    @per_message
    def forgiving(message):
        try:
            yield
        except ValueError:
            return []

    chain, _ = atomic(forgiving)
    assert deliver(router_of(failing, *chain), order()).acked


def test_when_the_chain_is_interrupted_the_generators_are_closed():
    closed = []

    @per_message
    def watch(message):
        try:
            yield
        finally:
            closed.append(message.id)

    def interrupted(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(interrupted)([order(1), order(2)])
    assert closed == ["1", "2"]


def test_a_generator_that_fails_while_it_is_closed_does_not_hide_the_reason():
    @per_message
    def breaks(message):
        try:
            yield
        finally:
            raise RuntimeError("while closing")

    def interrupted(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        breaks(interrupted)([order(1)])


def test_what_the_chain_raises_outside_a_transaction_is_the_error_of_each():
    seen = []

    @per_message
    def watch(message):
        try:
            yield
        except ValueError:
            seen.append(message.id)
            raise

    def broken(batch):
        raise ValueError

    results = watch(broken)([order(1), order(2)])
    assert seen == ["1", "2"]
    assert all(isinstance(result, ValueError) for result in results)


def test_several_work_together_with_the_others():
    @per_message(stage=Stage.OUTPUT)
    def stamp(message):
        outputs = yield
        for output in outputs:
            output.attributes["stamp"] = message.id

    chain, store = atomic(Correlation(), stamp)
    deliver(router_of(lambda m: [placed(int(m.id))], *chain), order(1), order(2))
    marks = [(e.attributes["stamp"], e.correlationid) for e in store.outbox()]
    assert marks == [("1", "1"), ("2", "2")]
