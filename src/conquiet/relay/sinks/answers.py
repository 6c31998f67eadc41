"""Collect a sink's answers for a batch: confirmed, refused alone, or an outage of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from conquiet.acking import Error
from conquiet.errors import ConquietError, GivenBack, SinkUnavailable
from conquiet.message import Message
from conquiet.relay.sinks.envelope import Envelope, pack


def not_tried() -> GivenBack:
    """Return the answer for messages that a slow sink left no time for."""
    return GivenBack("not tried: earlier messages of the batch took all the time")


class Answers:
    """Holds one answer per message, `None` for each that was confirmed.

    After `seconds` no message is begun any more, so that a batch ends also with a slow receiver.
    """

    def __init__(self, messages: Sequence[Message[Any]], seconds: float) -> None:
        self._messages = messages
        self._deadline = time.monotonic() + seconds
        self._answers: list[Error] = [SinkUnavailable("the receiver did not answer")] * len(
            messages
        )
        self._sent: list[int] = []
        self._open: set[int] = set()

    @property
    def are_late(self) -> bool:
        """Return whether messages that are not begun must be given back."""
        return time.monotonic() > self._deadline

    def pack_all(
        self, check: Callable[[Message[Any], Envelope], object]
    ) -> list[tuple[int, Envelope]]:
        """Return place and envelope of each message that can be sent; the others fail."""
        good: list[tuple[int, Envelope]] = []
        for place, message in enumerate(self._messages):
            try:
                envelope = pack(message)
                check(message, envelope)
            except ConquietError as error:
                self._answers[place] = error
            else:
                good.append((place, envelope))
        self._sent = [place for place, _ in good]
        self._open = set(self._sent)
        return good

    def set(self, place: int, answer: Error) -> None:
        self._answers[place] = answer
        self._open.discard(place)

    def is_open(self, place: int) -> bool:
        return place in self._open

    def interrupt(self, why: SinkUnavailable) -> None:
        """Set the reason for all messages without an answer; they may be tried again."""
        for place in self._open:
            self._answers[place] = why

    def one_by_one(
        self,
        packed: Sequence[tuple[int, Envelope]],
        send: Callable[[tuple[int, Envelope]], object],
    ) -> None:
        """Send each alone; after an outage or the time limit, the rest is not tried."""
        outage: SinkUnavailable | None = None
        for one in packed:
            if outage is not None:
                self.set(one[0], outage)
                continue
            if self.are_late:
                self.set(one[0], not_tried())
                continue
            send(one)
            answer = self._answers[one[0]]
            if isinstance(answer, SinkUnavailable):
                outage = answer

    def conclude(self) -> list[Error]:
        """Return all answers; raise `SinkUnavailable` if no sent message was answered."""
        answers = [self._answers[place] for place in self._sent]
        if answers and all(isinstance(answer, SinkUnavailable) for answer in answers):
            assert answers[0] is not None
            raise answers[0]
        return self._answers
