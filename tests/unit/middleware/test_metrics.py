"""How many, how long, how it ended."""

from __future__ import annotations

import sys
from io import BytesIO

import pytest
from prometheus_client import CollectorRegistry, Counter
from tests.unit.middleware.routers import Order, atomic, nothing, order, placed, router_of, sum_of

from conquiet import Message, Router, Worker
from conquiet.codec import to_json
from conquiet.errors import ConfigError, GivenBack, PermanentError, StoreError
from conquiet.jsonlines import LinesSource
from conquiet.memory import Log
from conquiet.middleware import DeadLetter, Metrics, Retry, metrics
from conquiet.testing import deliver, message


@pytest.fixture
def registry():
    return CollectorRegistry()


def outcomes(registry):
    return {
        (sample.labels["handler"], sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "conquiet_messages_total"
    }


def by_id(errors):
    def handle(message):
        if message.id in errors:
            raise errors[message.id]

    return handle


def test_messages_are_counted_by_handler_and_outcome(registry):
    errors = {
        "2": ValueError(),
        "3": PermanentError(),
        "4": GivenBack(),
        "5": StoreError(),
        "6": ValueError(),
    }
    deliver(router_of(by_id(errors), Metrics(registry)), *(order(n) for n in range(1, 8)))
    assert outcomes(registry) == {
        ("handle", "ok"): 2,
        ("handle", "error"): 2,
        ("handle", "permanent"): 1,
        ("handle", "given_back"): 2,
    }


def test_what_went_to_the_dead_letters_is_counted_as_that(registry):
    router = router_of(
        by_id({"1": PermanentError()}), Metrics(registry), DeadLetter(Log().sink("dead"))
    )
    deliver(router, order(1), order(2))
    assert outcomes(registry) == {("handle", "dead_letter"): 1, ("handle", "ok"): 1}


def test_no_word_from_a_message_becomes_a_label(registry):
    router = router_of(nothing, Metrics(registry))
    deliver(router, *(message(type=f"unknown-{number}") for number in range(50)))
    assert outcomes(registry) == {("(none)", "error"): 50}


def test_dead_letters_of_a_source_are_counted_by_the_handler_that_failed_last(registry):
    lines = b"".join(to_json(order(number)) + b"\n" for number in (1, 2)) + b"no JSON\n"
    source = LinesSource(BytesIO(lines), Log().sink("dead"), max_attempts=2)
    worker = Worker(source, router_of(by_id({"1": ValueError()}), Metrics(registry)))
    metrics.instruments_of(registry).watch(worker)
    assert worker.run()
    for _ in range(2):  # what was counted is not counted again
        metrics.exposition(registry)
    name = "conquiet_source_dead_letters_total"
    assert sum_of(registry, name, handler="handle") == 1
    assert sum_of(registry, name, handler="(none)", type="(any)") == 1
    assert sum_of(registry, name, handler="handle", type="order") == 1
    assert sum_of(registry, name) == 2


def test_each_call_of_a_handler_is_timed(registry):
    deliver(router_of(nothing, Metrics(registry)), order(1), order(2), order(3))
    count = sum_of(registry, "conquiet_handler_seconds_count", handler="handle")
    assert count == 3


def test_a_batch_handler_is_timed_per_call(registry):
    router = Router()
    router.use(Metrics(registry))

    @router.event()
    def handle(orders: list[Order]) -> None: ...

    deliver(router, order(1), order(2), order(3))
    count = sum_of(registry, "conquiet_handler_seconds_count", handler="handle")
    assert count == 1


def test_a_failed_call_is_timed_too(registry):
    deliver(router_of(by_id({"1": ValueError()}), Metrics(registry)), order(1))
    assert sum_of(registry, "conquiet_handler_seconds_count", handler="handle") == 1


def test_batches_are_measured(registry):
    router = router_of(nothing, Metrics(registry))
    deliver(router, order(1), order(2), order(3))
    deliver(router, order(4))
    assert registry.get_sample_value("conquiet_batch_size_count") == 2
    assert registry.get_sample_value("conquiet_batch_size_sum") == 4


def test_messages_in_flight_are_seen_while_they_are_in_the_chain(registry):
    seen = []

    def look(_):
        metrics.exposition(registry)
        seen.append(
            (
                sum_of(registry, "conquiet_messages_in_flight", handler="handle"),
                sum_of(registry, "conquiet_oldest_in_flight_seconds", handler="handle") > 0,
            )
        )

    deliver(router_of(look, Metrics(registry)), order(1), order(2))
    assert seen == [(2, True), (2, True)]
    metrics.exposition(registry)
    assert sum_of(registry, "conquiet_messages_in_flight") == 0
    assert sum_of(registry, "conquiet_oldest_in_flight_seconds") == 0


def test_a_call_with_a_message_that_failed_before_is_a_retry(registry):
    failing = iter([ValueError(), ValueError(), None])

    def handle(message):
        if message.id == "1" and (error := next(failing)) is not None:
            raise error

    router = router_of(handle, Metrics(registry), Retry(max_attempts=3, first=0))
    deliver(router, order(1), order(2))
    assert sum_of(registry, "conquiet_retries_total", handler="handle") == 2


def test_the_type_of_a_message_is_that_of_its_handler(registry):
    router = Router()
    router.use(Metrics(registry))

    @router.event(type="order.placed")
    def place(data: Order) -> None: ...

    @router.fallback()
    def others(message: Message[bytes]) -> None: ...

    deliver(router, message(Order(), type="order.placed"), message(type="else"))
    assert sum_of(registry, "conquiet_messages_total", handler="place", type="order.placed") == 1
    assert sum_of(registry, "conquiet_messages_total", handler="others", type="(any)") == 1


def test_all_metrics_are_exported_under_their_names_and_labels(registry):
    Metrics(registry)
    families = {family.name: family for family in registry.collect()}
    for metric in metrics.METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.meaning


def test_a_chain_that_raises_is_counted_and_still_raises(registry):
    def broken(batch):
        raise ValueError

    with pytest.raises(ValueError):
        Metrics(registry)(broken)([order(1), order(2)])
    assert outcomes(registry) == {("(none)", "error"): 2}
    assert sum_of(registry, "conquiet_messages_in_flight") == 0


def test_an_empty_result_is_no_error(registry):
    assert Metrics(registry)(lambda batch: [()])([order()]) == [()]
    assert outcomes(registry) == {("(none)", "ok"): 1}


def test_two_on_one_registry_count_together(registry):
    for _ in range(2):
        deliver(router_of(nothing, Metrics(registry)), order())
    assert outcomes(registry) == {("handle", "ok"): 2}


def test_a_second_copy_of_the_module_counts_into_the_same_metrics(registry):
    deliver(router_of(nothing, Metrics(registry)), order())
    metrics._known.clear()  # as if it had been loaded anew
    deliver(router_of(nothing, Metrics(registry)), order())
    assert outcomes(registry) == {("handle", "ok"): 2}


def test_a_name_that_somebody_else_has_taken_is_refused_at_start(registry):
    Counter("conquiet_batch_size", "Not ours.", registry=registry)
    with pytest.raises(ConfigError, match="registry of its own"):
        Metrics(registry)


def test_a_metric_that_fails_costs_no_message(registry, monkeypatch):
    def fails(*_):
        raise OSError("no space left on device")

    middleware = Metrics(registry)
    for instrument in ("_messages", "_seconds", "_batch_size"):
        monkeypatch.setattr(middleware._instruments, instrument, None)
    monkeypatch.setattr(middleware._instruments._in_flight, "labels", fails)
    assert deliver(router_of(nothing, middleware), order()).acked


def test_it_sees_commits_and_rollbacks(registry):
    chain, _ = atomic(outside=(Metrics(registry),))
    router = router_of(lambda m: [placed()] if m.id == "1" else 1 / 0, *chain)
    deliver(router, order(1), order(2))
    assert outcomes(registry) == {("handle", "ok"): 1, ("handle", "error"): 1}


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'conquiet\[metrics\]'"):
        Metrics()
