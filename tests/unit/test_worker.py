"""The worker: outputs, batches, threads, order by key, leases, health."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.chains import OrderPlaced, PlaceOrder, place_two, router_with
from tests.unit.workers import blocking_router, drained, log_of, order, recording, refusing, start
from tests.waiting import eventually

from conquiet import Message, Router, Worker
from conquiet.errors import ConfigError
from conquiet.intake import ByKey, InFlight
from conquiet.memory import Log, Outbox, Store, Transaction
from conquiet.middleware import DeadLetter, per_message
from conquiet.stage import Stage
from conquiet.testing import deliver, message


def test_messages_flow_from_the_source_through_the_router(workers):
    log, seen = log_of(250), []
    start(workers, log.source("g"), recording(seen), batch_size=100)
    eventually(lambda: drained(log))
    assert seen == list(range(250))


def test_outputs_go_to_the_sink_before_the_input_is_acked(workers):
    log, events = log_of(3), Log()
    router = Router()

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    sink = events.sink("orders")
    sink.fail_next(1)
    start(workers, log.source("g"), router, sink)
    eventually(lambda: drained(log))
    published = [message.data for message in events.replay()]
    assert published == [b'{"id":0}', b'{"id":1}', b'{"id":2}']


@pytest.mark.parametrize("ack", ["on_success", "forward"])
def test_an_output_that_fails_gives_back_only_its_own_input(workers, ack):
    log = log_of(3)
    answers: list[list[int]] = []

    class Picky:
        def publish_each(self, messages: Sequence[Message[Any]]) -> list[Exception | None]:
            answers.append([message.data.id for message in messages])
            first = len(answers) == 1
            return [
                ValueError("no") if first and message.data.id == 1 else None for message in messages
            ]

        def close(self) -> None: ...

    router = Router(ack=ack)

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    start(workers, log.source("g"), router, Picky())
    eventually(lambda: drained(log))
    assert answers == [[0, 1, 2], [1]]


def test_a_worker_without_destination_for_declared_outputs_is_refused_at_start():
    worker = Worker(log_of(1).source("g"), router_with(place_two))
    with pytest.raises(ConfigError, match=r"place_two returns events.*a sink.*an outbox"):
        worker.start()


def test_outputs_may_have_a_destination_of_ones_own(workers):
    log, kept = log_of(1), []

    @per_message(stage=Stage.PUBLISH)
    def keep(message: Message) -> Any:
        kept.extend((yield))
        return []

    start(workers, log.source("g"), router_with(place_two, keep))
    eventually(lambda: drained(log))
    assert len(kept) == 2


@pytest.mark.parametrize("in_transaction", [False, True])
def test_outputs_that_no_hint_declares_need_a_sink_and_their_effects_are_rolled_back(
    workers, in_transaction
):
    log, letters, store = log_of(2), Log(), Store()

    def place(order: PlaceOrder):
        store.add("effects")
        return OrderPlaced(order.id) if order.id == 0 else None

    router = Router()
    router.use(DeadLetter(letters.sink(), max_attempts=3))
    if in_transaction:
        router.use(Transaction(store))
    router.command(source="/orders")(place)
    start(workers, log.source("g"), router)
    eventually(lambda: drained(log))
    [letter] = letters.replay()
    assert "give the worker a sink, or the router an outbox" in letter.attributes["deadreason"]
    assert store.get("effects") == (1 if in_transaction else 4)


def ids_of(router: Router, *, deliveries: int = 2) -> list[list[str]]:
    """The ids of the outputs of one message, per delivery."""
    return [
        [output.id for output in deliver(router, message(PlaceOrder(1), id="m-1")).outputs]
        for _ in range(deliveries)
    ]


def test_without_an_outbox_ids_of_outputs_stay_with_each_delivery():
    [first, second] = ids_of(router_with(place_two))
    assert first == second
    assert len(set(first)) == 2


def test_ids_of_outputs_differ_by_input_and_handler():
    router = router_with(place_two)
    router.command(source="/orders", name="other")(place_two)
    batch = [message(PlaceOrder(1), id=name) for name in ("m-1", "m-2")]
    batch += [message(PlaceOrder(1), id="m-1", source="/elsewhere")]
    ids = [output.id for output in deliver(router, *batch).outputs]
    assert len(set(ids)) == len(ids) == 12


def test_handlers_of_one_name_in_two_modules_do_not_share_ids():
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(1)]

    [[first]] = ids_of(router_with(place), deliveries=1)
    place.__module__ = "shipping"
    [[second]] = ids_of(router_with(place), deliveries=1)
    assert first != second


def test_ids_of_outputs_of_a_batch_handler_stay_too_and_those_that_are_given_are_kept():
    def place(orders: list[PlaceOrder]) -> list[list[Message]]:
        given = Message(OrderPlaced(1), {"id": "mine"})
        return [[given, Message(OrderPlaced(1))] for _ in orders]

    [first, second] = ids_of(router_with(place))
    assert first == second
    assert first[0] == "mine" != first[1]


def test_an_output_of_a_message_without_id_has_a_new_id():
    router = router_with(place_two)
    nameless = [message(PlaceOrder(1), id=None) for _ in range(2)]
    for item in nameless:
        item.attributes.pop("id", None)
    ids = [output.id for output in deliver(router, *nameless).outputs]
    assert len(set(ids)) == 4


def test_with_an_outbox_ids_of_outputs_are_new_and_increase():
    store = Store()
    router = router_with(place_two, Transaction(store), Outbox("orders"))
    deliver(router, message(PlaceOrder(1), id="m-1"), message(PlaceOrder(1), id="m-1"))
    ids = [event.id for event in store.outbox()]
    assert ids == sorted(ids)
    assert len(set(ids)) == 4


def test_a_redelivery_publishes_its_outputs_under_the_same_ids(workers):
    log, events = log_of(1), Log()
    sink = events.sink("orders")
    publish, answers = sink.publish_each, [[None, ConnectionError("lost")]]

    def lose_a_reply(messages: Sequence[Message[Any]]) -> Sequence[Exception | None]:
        confirmed = publish(messages)
        return answers.pop() if answers else confirmed

    sink.publish_each = lose_a_reply
    start(workers, log.source("g"), router_with(place_two), sink)
    eventually(lambda: drained(log))
    ids = [event.id for event in events.replay()]
    assert len(ids) == 4
    assert ids[:2] == ids[2:]


def test_what_cannot_be_published_goes_to_the_dead_letters(workers):
    log, letters = log_of(2), Log()

    class Refusing:
        def publish_each(self, messages: Sequence[Message[Any]]) -> list[Exception | None]:
            return [ValueError("too large") if m.data.id == 0 else None for m in messages]

        def close(self) -> None: ...

    router = Router()
    router.use(DeadLetter(letters.sink(), max_attempts=2))

    @router.command(source="/orders")
    def place(order: PlaceOrder) -> list[OrderPlaced]:
        return [OrderPlaced(order.id)]

    start(workers, log.source("g"), router, Refusing())
    eventually(lambda: drained(log))
    [letter] = letters.replay()
    assert letter.data == b'{"id":0}'
    assert "too large" in letter.attributes["deadreason"]


def test_outputs_that_a_middleware_adds_outside_the_publishing_are_refused(workers):
    def add_late(next: Any) -> Any:
        return lambda batch: [[Message(b"", {"type": "late"})] for _ in next(batch)]

    log, letters = log_of(1), Log()
    router = recording([])
    router.use(add_late, DeadLetter(letters.sink(), max_attempts=100))
    worker = start(workers, log.source("g"), router, Log().sink("t"))
    eventually(lambda: "after DeadLetter and Retry" in worker.health().last_error)
    assert not drained(log)


def test_a_sink_that_does_not_answer_for_every_message_has_confirmed_none(workers):
    log, answers = log_of(1), [[], [None]]
    router, sink = Router(), Log().sink()

    @router.command(source="/orders")
    def place(order: PlaceOrder, message: Message) -> OrderPlaced:
        assert message.deliveries == 1  # it was not its fault
        return OrderPlaced(order.id)

    sink.publish_each = lambda messages: answers.pop(0)
    worker = start(workers, log.source("g"), router, sink)
    eventually(lambda: drained(log))
    assert answers == []
    assert "0 answers to 1 messages" in worker.health().last_error


def test_batches_are_no_larger_than_asked_and_wait_for_more_if_asked(workers):
    sizes: list[int] = []
    router = Router()

    @router.event()
    def record(orders: list[PlaceOrder]) -> None:
        sizes.append(len(orders))

    log = log_of(25)
    start(workers, log.source("g"), router, batch_size=10, batch_wait=30.0)
    eventually(lambda: sizes == [10, 10])
    log.sink("commands").publish([order(number) for number in range(5)])
    eventually(lambda: sizes == [10, 10, 10])


def test_threads_work_at_the_same_time(workers):
    together = threading.Barrier(3)
    router = Router()

    @router.event()
    def meet(order: PlaceOrder) -> None:
        together.wait(20)

    log = log_of(3)
    start(workers, log.source("g"), router, threads=3, batch_size=1)
    eventually(lambda: drained(log))
    assert not together.broken


def test_nothing_is_read_ahead_of_the_handlers(workers):
    release = threading.Event()
    router = Router()

    @router.event()
    def wait(order: PlaceOrder) -> None:
        release.wait(20)

    log = log_of(100)
    worker = start(workers, log.source("g"), router, threads=2, batch_size=5)
    eventually(lambda: worker.health().in_flight == 10)
    assert worker.health().in_flight == 10
    release.set()
    eventually(lambda: drained(log))


# --- order by key -----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_order_by_key_holds_while_messages_fail(workers, threads):
    log = Log()
    log.sink("commands").publish([order(n, partitionkey=f"k{n % 7}") for n in range(350)])
    done: dict[str, list[int]] = defaultdict(list)
    failed: set[int] = set()
    router = Router()

    @router.event()
    def record(order: PlaceOrder, message: Message) -> None:
        if order.id % 5 == 0 and order.id not in failed:
            failed.add(order.id)
            raise ValueError("once")
        done[message.key].append(order.id)

    source = log.source("g", ordered=False)
    start(workers, source, router, threads=threads, ordered=True, batch_size=20)
    eventually(lambda: drained(log), timeout=60)
    assert {key: sorted(ids) for key, ids in done.items()} == done
    assert sum(map(len, done.values())) == 350


def test_a_message_that_was_acked_before_it_failed_does_not_hold_its_key(workers):
    log, done = Log(), []
    log.sink("commands").publish([order(number, partitionkey="k") for number in range(3)])
    router = Router(ack="manual")

    @router.event()
    def ack_early(order: PlaceOrder, message: Message) -> None:
        message.ack()
        done.append(order.id)
        if order.id == 0:
            raise ValueError("too late")

    start(workers, log.source("g"), router, ordered=True, batch_size=1)
    eventually(lambda: drained(log))
    assert done == [0, 1, 2]


def test_a_stuck_key_holds_up_only_its_lane(workers):
    release = threading.Event()
    done: list[str] = []
    router = Router()

    @router.event()
    def work(order: PlaceOrder, message: Message) -> None:
        if message.key == "stuck":
            release.wait(20)
        done.append(message.key)

    log = Log()
    log.sink("c").publish([order(0, partitionkey="stuck")])
    log.sink("c").publish([order(n, partitionkey=f"k{n}") for n in range(40)])
    start(workers, log.source("g"), router, threads=4, ordered=True, batch_size=5)
    eventually(lambda: len(done) >= 20)
    assert "stuck" not in done
    release.set()
    eventually(lambda: drained(log))


def test_a_function_may_name_the_key(workers):
    seen: list[int] = []
    log = log_of(10)
    start(
        workers, log.source("g"), recording(seen), threads=3, ordered=lambda message: message.type
    )
    eventually(lambda: drained(log))
    assert seen == list(range(10))


def test_a_key_of_the_wrong_kind_is_refused_by_the_router_and_loses_nothing(workers):
    seen: list[int] = []
    log = Log()
    log.sink("c").publish([order(0, subject=7), order(1)])
    worker = start(workers, log.source("g"), recording(seen), ordered=True)
    eventually(lambda: seen == [1])
    eventually(lambda: "'subject' must be a string" in worker.health().last_error)
    assert len(log.unsettled("g")) == 1
    assert worker.health().ok


def test_a_key_may_be_a_number(workers):
    seen: list[int] = []
    log = log_of(10, customer=7)
    start(
        workers,
        log.source("g"),
        recording(seen),
        threads=3,
        ordered=lambda message: message.attributes["customer"],
    )
    eventually(lambda: drained(log))
    assert seen == list(range(10))


def test_a_key_function_that_fails_is_logged_and_loses_nothing(workers, caplog):
    log, seen = log_of(1), []
    start(
        workers, log.source("g"), recording(seen), ordered=lambda message: message.attributes["no"]
    )
    eventually(lambda: drained(log))
    assert seen == [0]
    assert "the order of this message is not kept: place.order" in caplog.text


def test_a_source_that_does_not_hear_of_what_comes_back_loses_nothing_that_may_run():
    log = Log()
    log.append([order(0, id="early", subject="a"), order(1, subject="a"), order(2, subject="b")])
    source = log.source("g")
    in_flight = InFlight()
    intake = ByKey(source, in_flight, 1, lambda message: message.key)
    [early] = intake.read(0, 1, 0, 0)
    intake.note_failed([early])
    source.settle = refusing
    taken = intake.read(0, 10, 0, 0)
    assert [message.key for message in taken] == ["b"]
    assert set(map(id, in_flight.messages())) == {id(early), id(taken[0])}


# --- leases, health, settings -----------------------------------------------------------------


def test_a_handler_longer_than_its_lease_keeps_it(workers):
    log, ran, release = log_of(1), [], threading.Event()
    router = Router()

    @router.event()
    def long(order: PlaceOrder) -> None:
        ran.append(order.id)
        release.wait(20)

    start(workers, log.source("g", lease=0.3), router)
    eventually(lambda: ran == [0])
    rival = log.source("g", lease=0.3)
    assert list(rival.read(1, 1.5)) == []  # five leases long
    release.set()
    eventually(lambda: drained(log))
    assert ran == [0]


def test_leases_are_kept_even_if_the_hook_for_stuck_handlers_fails(workers, caplog):
    log, running, release = log_of(1), threading.Event(), threading.Event()
    router = blocking_router(running, release)

    def broken(health: Any) -> None:
        raise RuntimeError("the pager is down")

    start(workers, log.source("g", lease=0.3), router, stuck_after=0.1, on_stuck=broken)
    eventually(lambda: "the hook `on_stuck` failed" in caplog.text)
    assert list(log.source("g", lease=0.3).read(1, 1.0)) == []
    release.set()
    eventually(lambda: drained(log))


def test_health_tells_what_is_going_on_and_what_is_stuck(workers):
    log, running, release = log_of(1), threading.Event(), threading.Event()
    router = blocking_router(running, release)
    told: list[Any] = []
    worker = start(workers, log.source("g"), router, stuck_after=0.2, on_stuck=told.append)
    assert running.wait(10)
    eventually(lambda: told)
    health = worker.health()
    assert not health.ok
    assert health.in_flight == 1
    assert "place.order" in health.oldest
    release.set()
    eventually(lambda: worker.health().ok)
    assert worker.health().handled == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size": 0},
        {"batch_size": True},
        {"batch_size": 1.5},
        {"threads": 0},
        {"batch_wait": -1},
        {"grace": float("nan")},
        {"stuck_after": 0},
        {"ordered": "subject"},
    ],
)
def test_a_wrong_setting_is_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Worker(Log().source("g"), recording([]), **setting)
