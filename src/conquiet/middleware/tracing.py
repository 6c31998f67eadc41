"""Trace each message in a span that continues the producer's trace, by OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from conquiet.errors import ConfigError, GivenBack
from conquiet.handler import AROUND, Process, Result
from conquiet.message import Message

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

SPAN = "conquiet.span"
"""The name of a message's span in its locals."""

_PROPAGATED = ("traceparent", "tracestate")
_RECORDED = {
    "id": ("messaging.message.id", "cloudevents.event_id"),
    "type": ("cloudevents.event_type",),
    "source": ("cloudevents.event_source",),
    "subject": ("cloudevents.event_subject",),
    "correlationid": ("messaging.message.conversation_id",),
}


class Tracing:
    """Gives each message a consumer span, and its outputs the span's `traceparent`.

    The span continues the trace of the message's own `traceparent`, lasts until the message is
    committed or has failed, and is the current span while its handler runs, also in a batch. A
    batch handler has a span of its own, linked to those of its messages.

    Put it first, or right after Metrics: it then sees the final outcome of each message.

    `provider` replaces OpenTelemetry's global tracer provider.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                "Tracing needs the package opentelemetry-api: pip install 'conquiet[otel]'"
            ) from error
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("conquiet", tracer_provider=provider)

    def __call__(self, next: Process) -> Process:
        def process(batch: Sequence[Message[Any]]) -> Sequence[Result]:
            spans = [self._begin(message) for message in batch]
            # Outside a deadline: an interrupt must not come between a span and its end.
            token = AROUND.set((self._current, *AROUND.get()))
            results: Sequence[Result] = ()
            try:
                results = next(batch)
                return results
            except BaseException as error:
                for span in spans:
                    self._fail(span, error)
                raise
            finally:
                AROUND.reset(token)
                for span, result in zip(spans, results, strict=False):
                    if isinstance(result, Exception):
                        self._fail(span, result)
                for span in spans:
                    span.end()

        return process

    def _begin(self, message: Message[Any]) -> Span:
        attributes = message.attributes
        carrier = {
            name: value for name in _PROPAGATED if isinstance(value := attributes.get(name), str)
        }
        span = self._tracer.start_span(
            _span_name(message),
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.CONSUMER,
            attributes=_span_attributes(message),
        )
        message.locals[SPAN] = span
        return span

    def _current(
        self, messages: Sequence[Message[Any]], call: Callable[[], Sequence[Result]]
    ) -> Sequence[Result]:
        if len(messages) == 1:
            # No error is recorded here: a retry may succeed, and `_fail` comes last.
            with self._trace.use_span(
                messages[0].locals[SPAN], record_exception=False, set_status_on_exception=False
            ):
                results = call()
        else:
            results = self._call_of_many(messages, call)
        for message, result in zip(messages, results, strict=True):
            if result and not isinstance(result, Exception):
                self._inject(message.locals[SPAN], result)
        return results

    def _call_of_many(
        self, messages: Sequence[Message[Any]], call: Callable[[], Sequence[Result]]
    ) -> Sequence[Result]:
        links = [self._trace.Link(message.locals[SPAN].get_span_context()) for message in messages]
        with self._tracer.start_as_current_span(
            _span_name(messages[0]),
            links=links,
            attributes={
                "messaging.system": "conquiet",
                "messaging.operation.type": "process",
                "messaging.batch.message_count": len(messages),
            },
        ):
            return call()

    def _inject(self, span: Span, outputs: Sequence[Message[Any]]) -> None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._trace.set_span_in_context(span))
        for output in outputs:
            if not output.attributes.get("traceparent"):
                output.attributes.update(carrier)

    def _fail(self, span: Span, error: BaseException) -> None:
        span.record_exception(error)
        if not isinstance(error, GivenBack):  # not handled, which is no failure
            span.set_status(self._trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500])
            span.set_attribute("error.type", type(error).__name__)


def _span_name(message: Message[Any]) -> str:
    """Return `process` and the topic of the message, or the name of its handler."""
    name = message.topic or (message.handler.name if message.handler is not None else "message")
    return f"process {name}"


def _span_attributes(message: Message[Any]) -> dict[str, str | int]:
    recorded: dict[str, str | int] = {
        "messaging.system": "conquiet",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "conquiet.delivery": message.deliveries,
    }
    if message.topic is not None:
        recorded["messaging.destination.name"] = message.topic
    if message.handler is not None:
        recorded["conquiet.handler"] = message.handler.name
    for name, keys in _RECORDED.items():
        value = message.attributes.get(name)
        if isinstance(value, str) and value:
            for key in keys:
                recorded[key] = value
    return recorded
