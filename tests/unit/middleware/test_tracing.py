"""A span per message that continues the producer's trace, and is current for its handler."""

from __future__ import annotations

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.unit.middleware.routers import Order, atomic, nothing, order, placed, router_of

from conquiet import Message, Router
from conquiet.errors import ConfigError, GivenBack
from conquiet.middleware import Deadline, Retry, Tracing
from conquiet.testing import deliver, message

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Traced:
    """A provider whose finished spans can be looked at."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def middleware(self):
        return Tracing(self.provider)

    @property
    def spans(self):
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def traced():
    return Traced()


def hexadecimal(span):
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def test_the_span_continues_the_trace_of_the_message(traced):
    original = order(traceparent=TRACEPARENT, tracestate="vendor=1")
    deliver(router_of(nothing, traced.middleware()), original)
    [span] = traced.spans
    assert hexadecimal(span)[0] == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state.get("vendor") == "1"
    assert span.kind is SpanKind.CONSUMER


def test_a_message_without_trace_begins_one(traced):
    deliver(router_of(nothing, traced.middleware()), order())
    assert traced.spans[0].parent is None


@pytest.mark.parametrize("broken", ["", "garbage", "00-0-0-00", 5, b"x"])
def test_a_broken_traceparent_begins_a_trace_and_fails_nobody(traced, broken):
    original = order()
    original.attributes["traceparent"] = broken
    [result] = traced.middleware()(lambda batch: [()])([original])
    assert result == ()
    assert traced.spans[0].parent is None


def test_the_span_says_what_was_processed(traced):
    original = order(7, subject="a", correlationid="c")
    original.topic = "commands"
    original.deliveries = 3
    deliver(router_of(nothing, traced.middleware()), original)
    [span] = traced.spans
    assert span.name == "process commands"
    assert dict(span.attributes) == {
        "messaging.system": "conquiet",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "commands",
        "messaging.message.id": "7",
        "messaging.message.conversation_id": "c",
        "cloudevents.event_id": "7",
        "cloudevents.event_type": "order",
        "cloudevents.event_source": "/test",
        "cloudevents.event_subject": "a",
        "conquiet.handler": "handle",
        "conquiet.delivery": 3,
    }


def test_in_a_batch_each_handler_runs_in_the_span_of_its_message(traced):
    current = {}

    def handle(message):
        current[message.id] = hexadecimal(trace.get_current_span())[1]

    deliver(router_of(handle, traced.middleware()), order(1), order(2), order(3))
    by_id = {s.attributes["messaging.message.id"]: hexadecimal(s)[1] for s in traced.spans}
    assert current == by_id
    assert len(set(current.values())) == 3
    assert not trace.get_current_span().get_span_context().is_valid


def test_an_async_handler_runs_in_the_span_of_its_message(traced):
    current = {}
    router = Router()
    router.use(traced.middleware())

    @router.raw(type="order")
    async def handle(order: Message) -> None:
        current[order.id] = hexadecimal(trace.get_current_span())[1]

    deliver(router, order(1), order(2))
    router.close()
    assert current == {
        s.attributes["messaging.message.id"]: hexadecimal(s)[1] for s in traced.spans
    }


def test_outputs_carry_the_span_of_their_input(traced):
    original = order(traceparent=TRACEPARENT, tracestate="vendor=1")
    delivered = deliver(router_of(lambda _: [placed(), placed()], traced.middleware()), original)
    [span] = traced.spans
    trace_id, span_id = hexadecimal(span)
    for output in delivered.outputs:
        assert output.attributes["traceparent"] == f"00-{trace_id}-{span_id}-01"
        assert output.attributes["tracestate"] == "vendor=1"


def test_a_traceparent_that_the_handler_set_stays(traced):
    router = router_of(lambda _: [placed(traceparent=TRACEPARENT)], traced.middleware())
    assert deliver(router, order()).outputs[0].attributes["traceparent"] == TRACEPARENT


def test_what_the_outbox_stores_carries_the_trace(traced):
    chain, store = atomic(outside=(traced.middleware(),))
    deliver(router_of(lambda _: [placed()], *chain), order(1), order(2))
    parents = [event.attributes["traceparent"].split("-")[2] for event in store.outbox()]
    assert parents == [hexadecimal(span)[1] for span in traced.spans]


def test_an_error_is_recorded_on_the_span_of_its_message_alone(traced):
    def handle(message):
        if message.id == "2":
            raise ValueError("no")

    deliver(router_of(handle, traced.middleware()), order(1), order(2))
    fine, failed = traced.spans
    assert fine.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "ValueError: no"
    assert failed.attributes["error.type"] == "ValueError"
    [event] = failed.events
    assert "in handle" in event.attributes["exception.stacktrace"]


def test_a_message_that_is_given_back_has_not_failed(traced):
    back = GivenBack("not yet")
    traced.middleware()(lambda batch: [back])([order()])
    [span] = traced.spans
    assert span.status.status_code is StatusCode.UNSET
    assert span.events


def test_a_message_that_nobody_takes_has_a_span_too(traced):
    deliver(router_of(nothing, traced.middleware()), message(type="unknown"))
    [span] = traced.spans
    assert span.attributes["error.type"] == "NoHandler"


def test_a_chain_that_raises_ends_all_spans(traced):
    def broken(batch):
        raise ValueError("broken")

    with pytest.raises(ValueError):
        traced.middleware()(broken)([order(1), order(2)])
    assert [span.status.status_code for span in traced.spans] == [StatusCode.ERROR] * 2


def test_all_tries_of_a_message_share_its_span(traced):
    tries = []

    def handle(message):
        tries.append(hexadecimal(trace.get_current_span())[1])
        if len(tries) < 3:
            raise ValueError

    deliver(router_of(handle, traced.middleware(), Retry(3, first=0)), order())
    [span] = traced.spans
    assert set(tries) == {hexadecimal(span)[1]}
    assert span.status.status_code is StatusCode.UNSET


def test_a_batch_handler_has_a_span_linked_to_those_of_its_messages(traced):
    current = []
    router = Router()
    router.use(traced.middleware())

    @router.command(source="/shop")
    def handle(orders: list[Order]) -> list[list[Message]]:
        current.append(hexadecimal(trace.get_current_span())[1])
        return [[placed(one.id)] for one in orders]

    delivered = deliver(router, order(1), order(2))
    call, first, second = traced.spans
    assert hexadecimal(call)[1] == current[0]
    assert [link.context for link in call.links] == [first.context, second.context]
    assert call.attributes["messaging.batch.message_count"] == 2
    parents = [output.attributes["traceparent"].split("-")[2] for output in delivered.outputs]
    assert parents == [hexadecimal(first)[1], hexadecimal(second)[1]]


@pytest.mark.usefixtures("untraced")
def test_an_interrupted_handler_leaves_no_span_behind(traced):
    def never_ends(message):
        while True:
            pass

    for chain in ((traced.middleware(), Deadline(0.02)), (Deadline(0.02), traced.middleware())):
        deliver(router_of(never_ends, *chain), order())
        assert not trace.get_current_span().get_span_context().is_valid
    assert all(s.attributes["error.type"] == "DeadlineExceeded" for s in traced.spans)


def test_without_an_sdk_it_passes_the_trace_on():
    router = router_of(lambda _: [placed()], Tracing())
    [output] = deliver(router, order(traceparent=TRACEPARENT)).outputs
    assert output.attributes["traceparent"] == TRACEPARENT


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'conquiet\[otel\]'"):
        Tracing()
