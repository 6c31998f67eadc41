"""The answers of a batch: who went out, who failed alone, and when all of it is an outage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from conquiet.acking import Error
from conquiet.errors import ConquietError, GivenBack, SinkUnavailable
from conquiet.message import Message
from conquiet.relay.sinks.envelope import Envelope, pack


class Refused(ConquietError):
    """The receiver refused one message; the others of its batch went their way."""


def not_tried() -> GivenBack:
    """For what a slow sink left no time for: what went out before it can be marked meanwhile."""
    return GivenBack("not tried: those before it took all the time")


class Answers:
    """One answer per message, `None` for each that was confirmed.

    After `seconds` nothing more is begun, so that a batch ends however slow the receiver is.
    """

    def __init__(self, messages: Sequence[Message[Any]], seconds: float) -> None:
        self._messages = messages
        self._deadline = time.monotonic() + seconds
        self._answers: list[Error] = [SinkUnavailable("it was not answered")] * len(messages)
        self._sent: list[int] = []
        self._open: set[int] = set()

    @property
    def are_late(self) -> bool:
        """Whether what was not begun is to be given back."""
        return time.monotonic() > self._deadline

    def packed(
        self, check: Callable[[Message[Any], Envelope], object]
    ) -> list[tuple[int, Envelope]]:
        """The place and envelope of each message that can be sent; the others have failed."""
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

    def interrupted(self, why: SinkUnavailable) -> None:
        """Whoever is not answered will not be, for this reason; unless it is tried again."""
        for place in self._open:
            self._answers[place] = why

    def one_by_one(
        self,
        packed: Sequence[tuple[int, Envelope]],
        send: Callable[[tuple[int, Envelope]], object],
    ) -> None:
        """Send each alone; when the sink is away or the time is over, the rest is not tried."""
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

    def concluded(self) -> list[Error]:
        """All answers; raises `SinkUnavailable` if the sink answered for none that was sent."""
        answers = [self._answers[place] for place in self._sent]
        if answers and all(isinstance(answer, SinkUnavailable) for answer in answers):
            assert answers[0] is not None
            raise answers[0]
        return self._answers
