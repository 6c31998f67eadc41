"""Publish an outbox: claim → publish → settle, until stopped.

    claim ──▶ publish ──▶ confirmed ──▶ ack
                 │ one of several failed ──▶ nack, which costs it an attempt
                 └ nothing was published ──▶ an outage: nack without cost, pause, smaller batches

An unreachable sink costs no message an attempt. Neither does a batch of which nothing was
published; the next batch is half as large, down to a single message. That message is suspected and
costs an attempt; but if other messages fail alone as well, with nothing published in between, the
sink is at fault, and they cost nothing. So an outage does not use up the attempts of a backlog.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from conquiet.acking import Acking, Error, settle
from conquiet.backoff import Backoff
from conquiet.errors import Blameless, ConfigError, GivenBack, SinkUnavailable
from conquiet.message import Message, describe, printable
from conquiet.sink import Sink, collect_answers
from conquiet.source import EndOfSource, Source

logger = logging.getLogger("conquiet.relay")

_READ_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts the results of one batch."""

    published: int = 0
    """Messages that the sink confirmed."""
    failed: int = 0
    """Messages that failed by their own fault; each cost an attempt."""
    outage: Exception | None = None
    """Why nothing was published; it cost no attempt."""


Observe: TypeAlias = Callable[
    [Sequence[Message[Any]], Sequence[Error], Exception | None, float], None
]
"""Called before a batch is settled, with messages, answers, the outage if any, and seconds."""


class Relay:
    """Publishes the messages of a source to a sink.

    `ordered` keeps the order within a key also when a message fails: later messages of the key
    wait. Unless the sink does so by itself (`keeps_order = True`), messages of one key are
    published one by one, those of different keys together; messages that are not begun within
    `publish_seconds` are left for the next batch, so that published ones are marked in time.

    `conquiet relay run` runs it as a process, with settings, health and signals.

    A batch is `batch_size` messages at most, fewer after an outage. Pauses in an outage double up
    to `longest_pause` seconds. `observe` is called after each batch with its messages, their
    errors, the outage if there was one, and the seconds that the sink took.
    """

    def __init__(
        self,
        source: Source,
        sink: Sink,
        *,
        batch_size: int = 100,
        ordered: bool = False,
        longest_pause: float = 10.0,
        publish_seconds: float = 10.0,
        observe: Observe | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r}: must be a whole number from 1 on")
        if getattr(source, "is_async", False) or getattr(sink, "is_async", False):
            raise ConfigError("a relay runs in a thread: give its source and sink a redis.Redis")
        self.source = source
        self.sink = sink
        self.batch_size = batch_size
        self.ordered = ordered
        self.published = 0
        self.failed = 0
        self.last_error: Exception | None = None
        self.in_outage = False
        """Whether the last batch met an outage."""
        self.read_seconds = _READ_SECONDS
        """How long one read may wait; `stop()` takes effect after it."""
        self._publish_seconds = publish_seconds
        self._observe = observe
        self._limit = batch_size
        self._suspect: str | None = None
        self._pauses = Backoff(first=0.1, cap=longest_pause)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Publish until `stop()`; then close the source and the sink."""
        try:
            while not self._stopping.is_set():
                try:
                    outcome = self.run_once(self.read_seconds)
                except EndOfSource:
                    break
                if outcome.outage is not None:
                    wait = self._pauses.next()
                    logger.warning(
                        "outage, retry in %.1f s: %s", wait, printable(str(outcome.outage))
                    )
                    self._stopping.wait(wait)
        finally:
            self.source.close()
            self.sink.close()

    def run_once(self, timeout: float = 0.0) -> Outcome:
        """Publish one batch, waiting up to `timeout` seconds for it; errors are in the outcome."""
        try:
            outcome = publish_messages(
                self._read(timeout),
                self.sink,
                ordered=self.ordered,
                seconds=self._publish_seconds,
                observe=self._observe,
                blames=self._blames,
            )
        except EndOfSource:
            raise
        except Exception as error:  # noqa: BLE001 - an unreachable database is an outage too
            outcome = Outcome(outage=error)
        self._learn(outcome)
        return outcome

    def stop(self) -> None:
        """End `run()` after the current batch."""
        self._stopping.set()
        end_waiting = getattr(self.source, "stop", None)
        if end_waiting is not None:
            end_waiting()

    def _read(self, timeout: float) -> Sequence[Message[Any]]:
        return self.source.read(self._limit, timeout)

    def _blames(self, message: Message[Any]) -> bool:
        """Return whether a message that failed alone is at fault: one until the next success."""
        if self._suspect is None:
            self._suspect = message.id
        return self._suspect == message.id

    def _learn(self, outcome: Outcome) -> None:
        self.published += outcome.published
        self.failed += outcome.failed
        if outcome != Outcome():
            self.in_outage = outcome.outage is not None
        if outcome.published:
            self._suspect = None
            self._pauses.reset()
            self._limit = min(self.batch_size, self._limit * 2)
        elif outcome.outage is not None:
            self.last_error = outcome.outage
            self._limit = max(1, self._limit // 2)


def publish_batch(
    source: Source,
    sink: Sink,
    limit: int,
    timeout: float = 0.0,
    *,
    ordered: bool = False,
    observe: Observe | None = None,
) -> Outcome:
    """Claim up to `limit` messages, publish them, settle them.

    Waits up to `timeout` seconds for the first. `ordered` and `observe` are as for `Relay`. Raises
    the errors of the source, from reading and from settling: messages that were published and could
    not be marked will be published again.
    """
    return publish_messages(source.read(limit, timeout), sink, ordered=ordered, observe=observe)


def publish_messages(
    messages: Sequence[Message[Any]],
    sink: Sink,
    *,
    ordered: bool = False,
    seconds: float = 10.0,
    observe: Observe | None = None,
    blames: Callable[[Message[Any]], bool] = lambda message: True,
) -> Outcome:
    """Publish claimed messages and settle them; `blames` judges one that failed alone."""
    if not messages:
        return Outcome()
    began = time.perf_counter()
    if ordered and not getattr(sink, "keeps_order", False):
        answers = _publish_in_order(sink, messages, began + seconds)
    else:
        answers = collect_answers(sink, messages)
    acked: list[Acking] = []
    nacked: list[tuple[Acking, Error]] = []
    outage = _outage(messages, answers, blames)
    if observe is not None:
        observe(messages, answers, outage, time.perf_counter() - began)
    for message, answer in zip(messages, answers, strict=True):
        if message.acking is None:
            continue
        if answer is None:
            acked.append(message.acking)
        elif outage is None or isinstance(answer, Blameless):
            _log(message, answer)
            nacked.append((message.acking, answer))
        else:
            nacked.append((message.acking, outage))
    if outage is None:
        _log_waiting(answers)
    settle(acked, nacked)
    failed = sum(1 for _, error in nacked if not isinstance(error, Blameless))
    return Outcome(len(acked), failed, outage)


def _outage(
    messages: Sequence[Message[Any]],
    answers: Sequence[Error],
    blames: Callable[[Message[Any]], bool],
) -> Exception | None:
    """Return why nothing was published, unless the only tried message is at fault."""
    tried = [
        (message, answer)
        for message, answer in zip(messages, answers, strict=True)
        if not isinstance(answer, GivenBack)
    ]
    if any(answer is None for _, answer in tried):
        return None
    message, first = tried[0] if tried else (messages[0], answers[0])
    assert first is not None
    if isinstance(first, Blameless):
        return first
    if len(tried) == 1 and blames(message):
        return None
    outage = SinkUnavailable(
        f"none of {len(tried)} messages was published: {first!r:.300}"
        if len(tried) > 1
        else f"nothing was published since another message failed: {first!r:.300}"
    )
    outage.__cause__ = first
    return outage


def _log(message: Message[Any], answer: Exception) -> None:
    if not isinstance(answer, Blameless):
        logger.warning(
            "not published, attempt %d: %s: %r",
            message.deliveries,
            describe(message.attributes),
            answer,
            extra=log_fields(message, reason=type(answer).__name__),
        )


def _log_waiting(answers: Sequence[Error]) -> None:
    """Log messages that wait for a part of the sink while others were published."""
    waiting = [answer for answer in answers if isinstance(answer, SinkUnavailable)]
    if waiting:
        logger.warning(
            "%d of %d not published, retried later: %s",
            len(waiting),
            len(answers),
            printable(str(waiting[0])),
        )


def _publish_in_order(
    sink: Sink, messages: Sequence[Message[Any]], deadline: float
) -> Sequence[Error]:
    """Publish in rounds, each with the next message of every key that has not failed."""
    not_tried = GivenBack("an earlier message of its key failed, or took all the time")
    answers: list[Error] = [not_tried] * len(messages)
    waiting: dict[object, list[int]] = {}
    for index, message in enumerate(messages):
        waiting.setdefault(message.key or index, []).append(index)
    turn = 0
    while waiting and (turn == 0 or time.perf_counter() < deadline):
        indexes = [indexes[turn] for indexes in waiting.values()]
        keys = list(waiting)
        turn += 1
        given = collect_answers(sink, [messages[index] for index in indexes])
        for key, index, answer in zip(keys, indexes, given, strict=True):
            answers[index] = answer
            if answer is not None or len(waiting[key]) == turn:
                del waiting[key]
    return answers


def log_fields(message: Message[Any], **more: Any) -> dict[str, Any]:
    """Return the `extra=` of a log line about an event."""
    attributes = message.attributes
    return {
        "event_id": attributes.get("id", ""),
        "event_type": attributes.get("type", ""),
        "aggregate_type": _either(attributes, "aggregate_type", "aggregatetype"),
        "aggregate_id": _either(attributes, "aggregate_id", "aggregateid", "subject"),
        "attempt": message.deliveries,
        **more,
    }


def _either(attributes: dict[str, Any], *names: str) -> str:
    return next((str(attributes[name]) for name in names if attributes.get(name)), "")
