"""The answers of a batch: what is not begun in time is given back."""

from __future__ import annotations

from conquiet.errors import GivenBack
from conquiet.relay.sinks.answers import Answers
from conquiet.testing.contracts.samples import make_messages


def test_sending_one_by_one_ends_when_the_time_of_the_batch_is_over() -> None:
    answers = Answers(make_messages(3), 60)
    packed = answers.pack_all(lambda message, envelope: None)
    sent: list[int] = []

    def send(one: tuple[int, object]) -> None:
        sent.append(one[0])
        answers.set(one[0], None)
        answers._deadline = 0.0  # it took all the time

    answers.one_by_one(packed, send)
    assert sent == [0]
    assert [type(answer) for answer in answers.conclude()] == [type(None), GivenBack, GivenBack]
